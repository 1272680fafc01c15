import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunque.core.errors import DataError
from yunque.core.records import Author, Message, ToolCall, ToolSpec, parse_json

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NAMES = TEXT.filter(lambda name: name.strip() != "")
CALLS = st.builds(ToolCall, NAMES, st.dictionaries(TEXT, JSON, max_size=3), st.none() | TEXT)
MESSAGES = st.one_of(
    st.builds(Message, st.just("system") | st.just("user"), TEXT),
    st.builds(Message, st.just("assistant"), st.none() | TEXT, st.none() | TEXT, st.lists(CALLS).map(tuple)),
    st.builds(Message, st.just("tool"), TEXT, tool_call_id=st.none() | TEXT, name=st.none() | TEXT),
)


@given(MESSAGES)
def test_openai_form_reads_back_as_the_same_message(message: Message) -> None:
    assert Message.from_openai(message.to_openai()) == message


@given(NAMES, st.dictionaries(TEXT, JSON, max_size=3))
def test_arguments_given_as_a_json_string_equal_the_object(name: str, arguments: dict) -> None:
    """zai-org/GLM-5#158: OpenAI clients send arguments as a JSON string."""
    as_object = {"function": {"name": name, "arguments": arguments}}
    as_text = ToolCall(name, arguments).to_openai()
    assert isinstance(as_text["function"]["arguments"], str)
    assert ToolCall.from_openai(as_object) == ToolCall.from_openai(as_text)


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_no_arguments_are_an_empty_object(arguments: object) -> None:
    assert ToolCall.from_openai({"name": "f", "arguments": arguments}).arguments == {}


@given(st.lists(TEXT, max_size=4))
def test_text_parts_read_as_their_concatenation(parts: list[str]) -> None:
    """vllm-project/recipes#327: a tool result given as a list of text parts must not become empty."""
    as_parts = {"role": "tool", "content": [{"type": "text", "text": part} for part in parts]}
    assert Message.from_openai(as_parts) == Message("tool", "".join(parts))


def test_reasoning_is_read_from_either_field() -> None:
    for field in ("reasoning_content", "reasoning"):
        message = Message.from_openai({"role": "assistant", "content": "a", field: "why"})
        assert message.reasoning == "why"


def test_a_missing_content_is_empty_and_a_null_one_is_none() -> None:
    assert Message.from_openai({"role": "assistant"}).content == ""
    assert Message.from_openai({"role": "assistant", "content": None}).content is None


def test_authors_follow_roles() -> None:
    assert [Message(role, "x").author for role in ("system", "user", "assistant", "tool")] == [
        Author.SYSTEM,
        Author.USER,
        Author.ASSISTANT,
        Author.TOOL,
    ]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "asistant", "content": "a"}, ["messages[3]", "'asistant'", "did you mean 'assistant'"]),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            ["content[0]", "image_url", "text"],
        ),
        ({"role": "user", "content": None}, ["user", "None"]),
        ({"role": "user", "content": 3}, ["content", "3"]),
        ({"role": "user", "content": "a", "tool_calls": [{"name": "f"}]}, ["user", "tool_calls"]),
        ({"role": "assistant", "content": "", "tool_calls": "f"}, ["tool_calls", "list"]),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": ""}}]}, ["name", "empty"]),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{"}]},
            ["'f'", "JSON"],
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
            ["'f'", "[1]"],
        ),
        ({"role": "assistant", "content": "", "tool_calls": [{"type": "custom"}]}, ["custom", "function"]),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, ["function_call"]),
        ({"role": "assistant", "content": "", "reasoning_content": 3}, ["reasoning_content", "3"]),
        ("hello", ["messages[3]", "Mapping", "hello"]),
    ],
)
def test_a_bad_message_is_refused_with_place_and_value(message: dict, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        Message.from_openai(message, where="messages[3]")
    assert [word for word in words if word not in str(caught.value)] == []


def test_tools_are_read_wrapped_and_bare_and_keep_what_was_given() -> None:
    function = {"name": "f", "description": "does f", "parameters": {"type": "object"}, "strict": True}
    wrapped = ToolSpec.from_openai({"type": "function", "function": function})
    bare = ToolSpec.from_openai(function)
    assert (wrapped.name, wrapped.description, wrapped.parameters) == ("f", "does f", {"type": "object"})
    assert wrapped.function == bare.function == function
    assert wrapped.raw["type"] == "function"
    assert ToolSpec.from_openai({"name": "g"}).parameters == {}
    with pytest.raises(DataError, match=r"tools\[0\].*'name'"):
        ToolSpec.from_openai({"function": {}}, where="tools[0]")


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "-Infinity", "1e999", "{", ""])
def test_what_json_cannot_hold_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)

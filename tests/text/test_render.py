from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunque.core.errors import TemplateError
from yunque.core.records import Author, Message, ToolCall, ToolSpec
from yunque.text import CONTROL_TOKENS, TAG_TOKENS, ChatFormat, Renderer, TemplateKwargs, Tokenizer

from .conversations import MESSAGES, OPTIONS, TOOLS, tool_rounds

FORMATS = st.sampled_from(list(ChatFormat))
ALL = ("glm-5", "glm-5.1", "glm-5.2", "glm-5.3")
USER = Message("user", "hi")
GREETING = [
    Message("system", "Be brief."),
    USER,
    Message("assistant", "hello", "greet"),
    Message("user", "bye"),
]
WEATHER = [
    Message("user", "Paris?"),
    Message(
        "assistant",
        "Checking.",
        "need tool",
        (
            ToolCall("get_weather", {"city": "Paris", "days": 2}, "a"),
            ToolCall("get_weather", {"city": "Rome", "days": [1, 2]}, "b"),
        ),
    ),
    Message("tool", "hot", tool_call_id="b"),
    Message("tool", "cold", tool_call_id="a"),
]
NULL = [Message("user", "x"), Message("assistant", None, tool_calls=(ToolCall("f"),))]
INLINE = [Message("user", "x"), Message("assistant", "<think>\nplan\n</think>answer")]
NO_THOUGHT = [Message("user", "x"), Message("assistant", "y")]
MAX = "<|system|>Reasoning Effort: Max"
OFF: TemplateKwargs = {"enable_thinking": False}
KEEP: TemplateKwargs = {"clear_thinking": False}
DROP: TemplateKwargs = {"clear_thinking": True}


@pytest.mark.parametrize(
    ("name", "messages", "options", "text"),
    [
        ("glm-5", [USER], {}, "<|user|>hi<|assistant|><think>"),
        ("glm-5.1", [USER], {}, "<|user|>hi<|assistant|><think>"),
        ("glm-5.2", [USER], {}, MAX + "<|user|>hi<|assistant|><think>"),
        ("glm-5.3", [USER], {}, MAX + "<|user|>hi<|assistant|><think>"),
        ("glm-5", [USER], OFF, "<|user|>hi<|assistant|></think>"),
        ("glm-5.1", [USER], OFF, "<|user|>hi<|assistant|></think>"),
        ("glm-5.2", [USER], OFF, "<|user|>hi<|assistant|><think></think>"),
        ("glm-5.3", [USER], OFF, MAX + "<|user|>hi<|assistant|><think>"),
        ("glm-5.2", [USER], {"reasoning_effort": "high"}, MAX[:-3] + "High<|user|>hi<|assistant|><think>"),
        ("glm-5.2", [USER], {"reasoning_effort": "low"}, MAX + "<|user|>hi<|assistant|><think>"),
        ("glm-5.3", [USER], {"reasoning_effort": "low"}, MAX[:-3] + "Low<|user|>hi<|assistant|><think>"),
    ],
)
def test_generation_prompts(
    tokenizer: Tokenizer, name: str, messages: list[Message], options: dict[str, Any], text: str
) -> None:
    """smg-project/smg#2538 too: GLM-5.3 always thinks."""
    renderer = Renderer(tokenizer, name)
    assert renderer.render_text(messages, add_generation_prompt=True, **options) == "[gMASK]<sop>" + text
    rendered = renderer.render(messages, add_generation_prompt=True, **options)
    assert rendered.opens_reasoning is text.endswith("<think>")


@pytest.mark.parametrize(
    ("name", "options", "turn"),
    [
        ("glm-5", {}, "</think>hello"),
        ("glm-5.1", {}, "</think>hello"),
        ("glm-5.2", {}, "<think></think>hello"),
        ("glm-5.3", {}, "<think>greet</think>hello"),
        ("glm-5", KEEP, "<think>greet</think>hello"),
        ("glm-5.1", KEEP, "<think>greet</think>hello"),
        ("glm-5.2", KEEP, "<think>greet</think>hello"),
        ("glm-5.3", DROP, "<think></think>hello"),
    ],
)
def test_reasoning_of_past_turns(tokenizer: Tokenizer, name: str, options: dict[str, Any], turn: str) -> None:
    effort = MAX if name in ("glm-5.2", "glm-5.3") else ""
    expected = f"[gMASK]<sop>{effort}<|system|>Be brief.<|user|>hi<|assistant|>{turn}<|user|>bye<|assistant|><think>"
    assert Renderer(tokenizer, name).render_text(GREETING, add_generation_prompt=True, **options) == expected


@pytest.mark.parametrize("name", ALL)
def test_tool_calls_and_the_order_of_their_results(tokenizer: Tokenizer, name: str) -> None:
    results = ["hot", "cold"] if name in ("glm-5", "glm-5.1") else ["cold", "hot"]
    text = Renderer(tokenizer, name).render_text(WEATHER, add_generation_prompt=True)
    assert text.partition("<|user|>")[2] == (
        "Paris?<|assistant|><think>need tool</think>Checking."
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
        "<arg_key>days</arg_key><arg_value>[1, 2]</arg_value></tool_call><|observation|>"
        f"<tool_response>{results[0]}</tool_response><tool_response>{results[1]}</tool_response>"
        "<|assistant|><think>"
    )


@pytest.mark.parametrize(
    ("call_ids", "result_ids", "order"),
    [
        ("abc", "cba", "abc"),
        ("abc", "ca", "ac"),
        ("ab", "bab", "bab"),
        ("aa", "a", "a"),
        ("ab", "bx", "bx"),
        ("a-", "a", "a"),
        ("ab", "b-", "b-"),
        ("", "ba", "ba"),
    ],
)
def test_results_are_ordered_only_when_ids_are_complete_unique_and_known(
    tokenizer: Tokenizer, call_ids: str, result_ids: str, order: str
) -> None:
    calls = tuple(ToolCall("f", {}, None if call_id == "-" else call_id) for call_id in call_ids)
    results = [Message("tool", i, tool_call_id=None if i == "-" else i) for i in result_ids]
    messages = [USER, Message("assistant", "", tool_calls=calls), *results]
    text = Renderer(tokenizer, "glm-5.3").render_text(messages)
    assert text.endswith("<|observation|>" + "".join(f"<tool_response>{i}</tool_response>" for i in order))


@pytest.mark.parametrize(
    ("name", "null", "inline", "silent", "silent_off"),
    [
        ("glm-5", "</think>None<tool_call>", "<think>plan</think>answer", "</think>y", "</think>y"),
        (
            "glm-5.1",
            "<think></think>None<tool_call>",
            "<think>plan</think>answer",
            "<think></think>y",
            "</think>y",
        ),
        ("glm-5.2", "<think></think><tool_call>", "<think>\nplan\n</think>answer", *["<think></think>y"] * 2),
        ("glm-5.3", "<think></think><tool_call>", "<think>\nplan\n</think>answer", *["<think></think>y"] * 2),
    ],
)
def test_null_content_inline_thoughts_and_turns_without_thought(
    tokenizer: Tokenizer, name: str, null: str, inline: str, silent: str, silent_off: str
) -> None:
    renderer = Renderer(tokenizer, name)
    cases: list[tuple[list[Message], TemplateKwargs, str]] = [
        (NULL, {}, null + "f</tool_call>"),
        (INLINE, {}, inline),
        (NO_THOUGHT, {}, silent),
        (NO_THOUGHT, OFF, silent_off),
    ]
    for messages, options, turn in cases:
        assert renderer.render_text(messages, **options).endswith("<|user|>x<|assistant|>" + turn)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("glm-5", "<think>a</think>"),
        ("glm-5.1", "<think> a\n</think>"),
        ("glm-5.2", "<think> a\n</think>"),
        ("glm-5.3", "<think> a\n</think>"),
    ],
)
def test_white_space_and_emptiness_of_reasoning(tokenizer: Tokenizer, name: str, shown: str) -> None:
    renderer = Renderer(tokenizer, name)
    text = renderer.render_text([USER, Message("assistant", " b ", " a\n")])
    assert text.endswith(f"<|assistant|>{shown}b")
    past = [USER, Message("assistant", "b", ""), USER]
    empty = "</think>" if name == "glm-5" else "<think></think>"
    assert f"<|assistant|>{empty}b<|user|>" in renderer.render_text(past, clear_thinking=False)


TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "strict": True,
        "description": "é",
        "parameters": {"type": "object", "b": [1.0]},
    },
}
DEFERRED = {"type": "function", "function": {"name": "g", "defer_loading": True}}
INNER = '{"name": "f", "description": "é", "parameters": {"type": "object", "b": [1.0]}}\n'
WHOLE = (
    '{"type": "function", "function": {"name": "f", "strict": true, "description": "é", '
    '"parameters": {"type": "object", "b": [1.0]}}}\n'
    '{"type": "function", "function": {"name": "g", "defer_loading": true}}\n'
)


@pytest.mark.parametrize(
    ("name", "lines"),
    [("glm-5", WHOLE), ("glm-5.1", INNER + '{"name": "g"}\n'), ("glm-5.2", INNER), ("glm-5.3", INNER)],
)
def test_tools_block(tokenizer: Tokenizer, name: str, lines: str) -> None:
    tools = [ToolSpec.from_openai(tool) for tool in (TOOL, DEFERRED)]
    text = Renderer(tokenizer, name).render_text([Message("system", "S"), USER], tools)
    effort = MAX if name in ("glm-5.2", "glm-5.3") else ""
    assert text == (
        f"[gMASK]<sop>{effort}<|system|>\n# Tools\n\n"
        "You may call one or more functions to assist with the user query."
        "\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n" + lines + "</tools>"
        "\n\nFor each function call, "
        "output the function name and arguments within the following XML format:\n"
        "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
        "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call><|system|>S<|user|>hi"
    )


@given(FORMATS, MESSAGES | tool_rounds(), TOOLS, OPTIONS, st.booleans())
def test_ids_spell_the_text_and_every_id_has_an_author(
    tokenizer: Tokenizer,
    chat_format: ChatFormat,
    messages: list[Message],
    tools: list[ToolSpec],
    options: dict[str, Any],
    closes: bool,
) -> None:
    renderer = Renderer(tokenizer, chat_format)
    rendered = renderer.render(messages, tools, close_last_turn=closes, **options)
    assert tokenizer.decode(rendered.tokens) == renderer.render_text(messages, tools, close_last_turn=closes, **options)
    assert len(rendered.authors) == len(rendered.tokens)
    inside = {i for turn in rendered.turns for i in range(turn.start, turn.stop)}
    assert sum(turn.stop - turn.start for turn in rendered.turns) == len(inside)
    own = {i for i, author in enumerate(rendered.authors) if author is Author.ASSISTANT}
    assert own <= inside
    assert tokenizer.decode(rendered.tokens[i] for i in sorted(inside - own)).replace("None", "") == ""
    for turn in rendered.turns:
        assert messages[turn.message_index].role == "assistant"
        assert turn.has_end == (rendered.tokens[turn.stop - 1] in tokenizer.special.eos_ids)
    for author in (Author.USER, Author.SYSTEM, Author.TOOL):
        ids = {token for token, writer in zip(rendered.tokens, rendered.authors, strict=True) if writer is author}
        assert ids.isdisjoint(tokenizer.special.ids.values())


@given(FORMATS, MESSAGES, TOOLS)
def test_text_without_lookalikes_has_the_ids_of_the_whole_string(
    tokenizer: Tokenizer, chat_format: ChatFormat, messages: list[Message], tools: list[ToolSpec]
) -> None:
    """So engines that encode the string a template rendered see the ids that we train on."""
    renderer = Renderer(tokenizer, chat_format)
    rendered, text = renderer.render(messages, tools), renderer.render_text(messages, tools)
    plain = [t for t, a in zip(rendered.tokens, rendered.authors, strict=True) if a is not Author.TEMPLATE]
    spelled = tokenizer.decode(plain)
    control = sum(token in tokenizer.special.ids.values() for token in plain)
    if sum(spelled.count(token) for token in (*CONTROL_TOKENS, *TAG_TOKENS)) == control and not tools:
        assert tuple(tokenizer.encode_with_special(text)) == rendered.tokens


def test_tools_block_has_the_ids_of_the_whole_string(tokenizer: Tokenizer) -> None:
    tools = [ToolSpec.from_openai(tool) for tool in (TOOL, DEFERRED)]
    for name in ALL:
        renderer = Renderer(tokenizer, name)
        text = renderer.render_text(WEATHER, tools)
        assert tuple(tokenizer.encode_with_special(text)) == renderer.render(WEATHER, tools).tokens


def spoken(tokenizer: Tokenizer, name: str, messages: list[Message], **options: Any) -> list[str]:
    """The text of every span the assistant wrote."""
    rendered = Renderer(tokenizer, name).render(messages, **options)
    return [tokenizer.decode(rendered.tokens[turn.start : turn.stop]) for turn in rendered.turns]


def test_an_assistant_writes_everything_after_the_prompt_up_to_the_marker_that_ends_its_turn(
    tokenizer: Tokenizer,
) -> None:
    kept = {"clear_thinking": False, "close_last_turn": True}
    two = [USER, Message("assistant", "a", "r"), USER, Message("assistant", "b", "s")]
    for name in ALL:
        assert spoken(tokenizer, name, two, **kept) == ["r</think>a<|user|>", "s</think>b<|endoftext|>"]
    calls = [*WEATHER[:2]]
    assert spoken(tokenizer, "glm-5", calls, close_last_turn=True)[0].endswith("</tool_call><|observation|>")
    assert spoken(tokenizer, "glm-5", WEATHER)[0].endswith("</tool_call><|observation|>")
    assert spoken(tokenizer, "glm-5", NO_THOUGHT) == ["y"]
    followed = [USER, Message("assistant", "a"), Message("assistant", "b"), Message("system", "c")]
    assert spoken(tokenizer, "glm-5", followed) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "dropped", "silent", "silent_off"),
    [
        ("glm-5", "hello<|user|>", "y", "y"),
        ("glm-5.1", "hello<|user|>", "</think>y", "y"),
        ("glm-5.2", "hello<|user|>", "</think>y", "y"),
        ("glm-5.3", "hello<|user|>", "</think>y", "</think>y"),
    ],
)
def test_a_thought_that_was_dropped_or_off_is_not_the_assistants(
    tokenizer: Tokenizer, name: str, dropped: str, silent: str, silent_off: str
) -> None:
    """``</think>`` is the assistant's where its prompt ended with ``<think>`` and its thought is shown."""
    assert spoken(tokenizer, name, GREETING, clear_thinking=True) == [dropped]
    assert spoken(tokenizer, name, NO_THOUGHT) == [silent]
    assert spoken(tokenizer, name, NO_THOUGHT, enable_thinking=False) == [silent_off]


def test_the_word_none_is_the_templates(tokenizer: Tokenizer) -> None:
    rendered = Renderer(tokenizer, "glm-5").render(NULL)
    by_template = [t for t, a in zip(rendered.tokens, rendered.authors, strict=True) if a is Author.TEMPLATE]
    assert tokenizer.decode(by_template).endswith("<|assistant|></think>None")


@given(
    FORMATS,
    st.lists(st.sampled_from(["text", *CONTROL_TOKENS, *TAG_TOKENS]), min_size=1, max_size=4).map("".join),
)
def test_what_a_user_or_tool_writes_never_becomes_control(
    tokenizer: Tokenizer, chat_format: ChatFormat, text: str
) -> None:
    harmless = [Message("user", "x"), Message("tool", "x")]
    hostile = [Message("user", text), Message("tool", text)]
    control = [
        [
            token
            for token in Renderer(tokenizer, chat_format).render(m).tokens
            if token in tokenizer.special.ids.values()
        ]
        for m in (harmless, hostile)
    ]
    assert control[0] == control[1]


def test_what_cannot_be_rendered_is_refused(tokenizer: Tokenizer) -> None:
    """sgl-project/sglang#28454 for the unknown option."""
    renderer = Renderer(tokenizer, "glm-5.2")
    with pytest.raises(TemplateError, match="at least one message"):
        renderer.render([])
    with pytest.raises(TemplateError, match=r"'thinking'.*valid: clear_thinking, enable_thinking, reasoning_effort"):
        renderer.render([USER], thinking=False)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TemplateError, match="close_last_turn"):
        renderer.render([USER], add_generation_prompt=True, close_last_turn=True)

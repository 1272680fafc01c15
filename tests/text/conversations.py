"""Made-up conversations, tools and assistant turns, as hypothesis strategies."""

from typing import Any

from hypothesis import strategies as st

from yunque.core.records import Message, ToolCall, ToolSpec

LOOKALIKES = [
    "<|user|>",
    "<think>",
    "<tool_call>",
    "</tool_call>",
    "</arg_value>",
    "<arg_key>",
    "[gMASK]",
    "<",
]
TEXT = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from([*LOOKALIKES, "\n", " ", "é😀"]),
    max_size=4,
).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
NAMES = st.text("abcdef_.-7é", min_size=1, max_size=6)
ARGUMENTS = st.dictionaries(TEXT, JSON, max_size=3)
IDS = st.sampled_from([None, "", "a", "b", "c"])


def _calls() -> st.SearchStrategy[tuple[ToolCall, ...]]:
    return st.lists(st.builds(ToolCall, NAMES, ARGUMENTS, IDS), max_size=3).map(tuple)


CONTENT = (
    TEXT | st.builds("{}<think>{}</think>{}".format, TEXT, TEXT, TEXT) | st.builds("{}</think>{}".format, TEXT, TEXT)
)
MESSAGES = st.lists(
    st.one_of(
        st.builds(Message, st.sampled_from(["system", "user"]), TEXT),
        st.builds(Message, st.just("assistant"), st.none() | CONTENT, st.none() | TEXT, _calls()),
        st.builds(Message, st.just("tool"), TEXT, tool_call_id=IDS),
    ),
    min_size=1,
    max_size=7,
)


@st.composite
def tool_rounds(draw: st.DrawFn) -> list[Message]:
    """A user, calls with ids, and their results in any order, some perhaps missing or repeated."""
    ids = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=draw(st.booleans())))
    calls = tuple(ToolCall("f", {}, call_id) for call_id in ids)
    results = draw(st.permutations(ids))[: draw(st.integers(1, len(ids)))]
    tools = [Message("tool", f"result {result}", tool_call_id=result) for result in results]
    return [Message("user", "go"), Message("assistant", "", tool_calls=calls), *tools]


@st.composite
def _tool(draw: st.DrawFn) -> ToolSpec:
    function: dict[str, Any] = {"name": draw(NAMES)}
    optional = {
        "description": TEXT,
        "strict": st.booleans(),
        "defer_loading": st.booleans(),
        "parameters": st.dictionaries(TEXT, JSON, max_size=2),
    }
    for key in draw(st.lists(st.sampled_from(sorted(optional)), unique=True)):
        function[key] = draw(optional[key])
    return ToolSpec.from_openai({"type": "function", "function": function} if draw(st.booleans()) else function)


TOOLS = st.lists(_tool(), max_size=3)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "enable_thinking": st.booleans(),
        "clear_thinking": st.none() | st.booleans(),
        "reasoning_effort": st.sampled_from([None, "low", "high", "max", "medium", "High"]),
    },
)

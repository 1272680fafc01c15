"""Well-formed assistant turns and the tools they call, as a hypothesis strategy."""

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from yunque.core.records import Message, ToolCall, ToolSpec
from yunque.text import ChatFormat

from .conversations import JSON, TEXT

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@dataclass(frozen=True)
class Turn:
    """An assistant message that its format can write without loss, and the tools it was offered."""

    message: Message
    tools: tuple[ToolSpec, ...]


def schema_of(value: Any, shape: str) -> dict[str, Any]:
    """A schema under which the text of ``value`` reads as it: bare, in a union, or behind a reference."""
    own = {"type": "null" if value is None else _TYPES[type(value)]}
    if shape == "reference":
        return {"$ref": "#/$defs/" + own["type"]}
    if shape == "union" and not isinstance(value, str):
        return {"anyOf": [own, {"type": "string"}]}
    return own


def _reads_back(value: Any) -> bool:
    """Whether the value needs no schema: it is not a string, or a string that is not JSON of another type."""
    if not isinstance(value, str):
        return True
    try:
        return isinstance(json.loads(value), str)
    except ValueError:
        return True


@st.composite
def _called(draw: st.DrawFn, name: str) -> tuple[ToolCall, ToolSpec]:
    arguments = draw(st.dictionaries(TEXT, JSON, max_size=3))
    properties = {
        key: schema_of(value, draw(st.sampled_from(["own", "union", "reference"])))
        for key, value in arguments.items()
        if not _reads_back(value) or draw(st.booleans())
    }
    definitions = {kind: {"type": kind} for kind in ("null", *_TYPES.values())}
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    return ToolCall(name, arguments), ToolSpec.from_openai({"name": name, "parameters": parameters})


@st.composite
def turns(draw: st.DrawFn, chat_format: ChatFormat, text: st.SearchStrategy[str] = TEXT) -> Turn:
    """A turn whose thought and content the format writes as they are."""
    reasoning = draw(st.none() | text)
    if reasoning is not None and chat_format is ChatFormat.GLM_5:
        reasoning = reasoning.strip() or None  # GLM-5 trims a thought and drops an empty one
    content = draw(text).strip()
    if reasoning is None:
        content = content.replace("</think>", "").strip()  # would be read as the end of a thought
    names = draw(st.lists(st.text("abc_.7é", min_size=1, max_size=4), max_size=3, unique=True))
    called = [draw(_called(name)) for name in names]
    message = Message("assistant", content, reasoning, tuple(call for call, _ in called))
    return Turn(message, tuple(tool for _, tool in called))

"""One generated tool call, read symbol by symbol: its name, then typed arguments as growing JSON."""

import json
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from yunque.core.errors import unknown
from yunque.core.records import ToolCall, ToolSpec
from yunque.text.events import Event, FailureReason, Malformed, ToolCallDelta, ToolCallEnd, ToolCallStart
from yunque.text.lexer import Symbol, Tag
from yunque.text.schema import Schema, is_text, parameter_schema, typed_value
from yunque.text.special import CONTROL_TOKENS


class _State(Enum):
    NAME = auto()
    KEY = auto()
    BEFORE_VALUE = auto()
    VALUE = auto()
    AFTER_VALUE = auto()
    VOID = auto()
    CLOSED = auto()


class CallParser:
    """Reads what follows ``<tool_call>``.

    The grammar is ``NAME (<arg_key>K</arg_key><arg_value>V</arg_value>)* </tool_call>`` with white space
    allowed around the name and between tags. Values are not escaped, so a value runs to the first
    ``</arg_value>`` and other tags inside it are text; only ``</tool_call>`` is taken as the end of a call
    whose value was left open. The first fault makes the call void: the rest of it is read and reported, not
    used.
    """

    def __init__(self, index: int, tools: Mapping[str, ToolSpec] | None) -> None:
        self.index = index
        self.is_started = False
        self._tools = tools
        self._state = _State.NAME
        self._parts: list[str] = []
        self._name = ""
        self._key = ""
        self._schema: Schema = True
        self._takes_text = False
        self._arguments: dict[str, Any] = {}
        self._raw = ["<tool_call>"]
        self._fault: tuple[FailureReason, str] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether ``</tool_call>`` or a fault at the end of the turn has ended this call."""
        return self._state is _State.CLOSED

    @property
    def is_in_value(self) -> bool:
        """Whether the next tag may be a part of an argument's value."""
        return self._state is _State.VALUE

    def push(self, symbol: Symbol) -> list[Event]:
        """Read one symbol; the events that it completes."""
        tag = symbol.text if isinstance(symbol, Tag) else None
        text = symbol.text if isinstance(symbol, Tag) else symbol
        self._raw.append(text)
        if self._state is _State.VALUE:
            return self._in_value(tag, text)
        if tag == "</tool_call>":
            return self._close()
        if tag is None:
            return self._outside_value(text)
        return self._on_tag(tag)

    def abandon(self) -> list[Event]:
        """The turn ended, or another call began, before ``</tool_call>``: the call is void."""
        name = self._name or self._text().strip()
        self._fail(FailureReason.UNCLOSED_CALL, f"the call {name!r} was never closed")
        return self._close()

    def _on_tag(self, tag: str) -> list[Event]:
        match self._state, tag:
            case _State.VOID, _:
                return []
            case _State.NAME, "<arg_key>":
                self._state = _State.KEY
                return self._start(self._take_text())
            case _State.AFTER_VALUE, "<arg_key>":
                self._state = _State.KEY
            case _State.KEY, "</arg_key>":
                self._take_key()
            case _State.BEFORE_VALUE, "<arg_value>":
                self._state = _State.VALUE
                return self._delta(self._opening() + '"') if self._takes_text else []
            case _:
                self._fail(FailureReason.BAD_ARGUMENTS, f"{tag} {self._place()}")
        return []

    def _outside_value(self, text: str) -> list[Event]:
        if self._state in (_State.NAME, _State.KEY):
            self._parts.append(text)
        elif self._state is not _State.VOID and text.strip():
            self._fail(FailureReason.BAD_ARGUMENTS, f"text {self._place()}")
        return []

    def _in_value(self, tag: str | None, text: str) -> list[Event]:
        if tag == "</arg_value>":
            self._state = _State.AFTER_VALUE
            return self._take_value()
        if tag == "</tool_call>" or tag in CONTROL_TOKENS:
            self._fail(FailureReason.BAD_ARGUMENTS, f"{tag} inside the value of {self._key!r}")
            return self._close() if tag == "</tool_call>" else []
        self._parts.append(text)
        return self._delta(_escaped(text)) if self._takes_text else []

    def _start(self, name: str) -> list[Event]:
        self._name = name.strip()
        if not self._name:
            self._fail(FailureReason.MISSING_NAME, "a tool call without a name")
        elif self._tools is not None and self._name not in self._tools:
            self._fail(FailureReason.UNKNOWN_TOOL, unknown("tool", self._name, self._tools))
        if self._fault is not None:
            return []
        self.is_started = True
        return [ToolCallStart(self.index, self._name)]

    def _take_key(self) -> None:
        self._key = self._take_text()
        if self._key in self._arguments:
            self._fail(FailureReason.DUPLICATE_ARGUMENT, f"the argument {self._key!r} is given twice")
            return
        self._state = _State.BEFORE_VALUE
        self._schema = parameter_schema(self._parameters(), self._key)
        self._takes_text = is_text(self._schema, self._parameters())

    def _take_value(self) -> list[Event]:
        opening, text = self._opening(), self._take_text()
        if self._takes_text:
            self._arguments[self._key] = text
            return self._delta('"')
        value = typed_value(text, self._schema, self._parameters())
        self._arguments[self._key] = value
        return self._delta(opening + json.dumps(value, ensure_ascii=False))

    def _close(self) -> list[Event]:
        events: list[Event] = []
        if self._state is _State.NAME:
            events += self._start(self._take_text())
        elif self._state in (_State.KEY, _State.BEFORE_VALUE):
            self._fail(FailureReason.BAD_ARGUMENTS, f"</tool_call> {self._place()}")
        self._state = _State.CLOSED
        if self._fault is not None:
            reason, detail = self._fault
            index = self.index if self.is_started else None
            return [*events, Malformed(reason, detail, "".join(self._raw), index)]
        call = ToolCall(self._name, self._arguments)
        return [*events, *self._delta("}" if self._arguments else "{}"), ToolCallEnd(self.index, call)]

    def _fail(self, reason: FailureReason, detail: str) -> None:
        self._fault = self._fault or (reason, detail)
        self._state = _State.VOID

    def _delta(self, arguments: str) -> list[Event]:
        return [ToolCallDelta(self.index, arguments)] if arguments else []

    def _opening(self) -> str:
        """What precedes the current value in the JSON object."""
        return ("{" if not self._arguments else ", ") + json.dumps(self._key, ensure_ascii=False) + ": "

    def _text(self) -> str:
        return "".join(self._parts)

    def _take_text(self) -> str:
        text = self._text()
        self._parts.clear()
        return text

    def _parameters(self) -> Mapping[str, Any]:
        return self._tools[self._name].parameters if self._tools is not None else {}

    def _place(self) -> str:
        match self._state:
            case _State.NAME:
                return "inside the function name"
            case _State.KEY:
                return f"inside the argument name {self._text()!r}"
            case _State.BEFORE_VALUE:
                return f"where the value of {self._key!r} should open"
            case _:
                return "between arguments"


def _escaped(text: str) -> str:
    """The inside of a JSON string; escapes are per character, so the pieces of a text can be joined."""
    return json.dumps(text, ensure_ascii=False)[1:-1]

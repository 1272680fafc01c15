"""What the turn parser reports: events while a turn streams in, and the whole turn at its end."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from yunque.core.records import Message, ToolCall


class FailureReason(StrEnum):
    """Why a part of a generated turn could not be used."""

    UNCLOSED_CALL = "unclosed call"
    """The turn ended, or another call began, inside a tool call."""
    MISSING_NAME = "missing name"
    """A tool call without a function name."""
    UNKNOWN_TOOL = "unknown tool"
    """A tool call whose name is not among the tools that were offered."""
    BAD_ARGUMENTS = "bad arguments"
    """Keys and values of a tool call do not come in closed pairs, or text stands between them."""
    DUPLICATE_ARGUMENT = "duplicate argument"
    """A tool call gives the same argument twice."""
    STRAY_TAG = "stray tag"
    """A tag or control token where the format has none; it is left out of the text."""


@dataclass(frozen=True)
class ReasoningDelta:
    """The next piece of the thought."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """The next piece of the visible answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call of a known tool began. ``index`` counts started calls from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """The next piece of a call's arguments: the pieces of a completed call concatenate to one JSON object."""

    index: int
    arguments: str


@dataclass(frozen=True)
class ToolCallEnd:
    """A call is complete; ``call.id`` is None: ids are given by whoever answers a client."""

    index: int
    call: ToolCall


@dataclass(frozen=True)
class Malformed:
    """A part of the turn that could not be used. ``raw`` is its text, tags included.

    ``index`` is that of the call if ToolCallStart was already reported for it: that call is void.
    """

    reason: FailureReason
    detail: str
    raw: str
    index: int | None = None


Event = ReasoningDelta | TextDelta | ToolCallStart | ToolCallDelta | ToolCallEnd | Malformed


@dataclass(frozen=True)
class ParsedTurn:
    """A generated turn.

    ``reasoning``: the thought, verbatim; None if no thought was opened, ``""`` if it was opened and left empty.
    ``content``: the visible answer, without white space around it; ``""`` if there is none.
    ``tool_calls``: the complete calls of known tools, in order.
    ``failures``: what could not be used, in order; nothing is guessed or repaired.
    ``stop``: the spelling of the token that ended the turn; None if the ids ended first.
    ``has_closed_reasoning``: False if the ids ended inside the thought.
    ``tail``: the events that ``TurnParser.finish`` released; not compared.
    """

    reasoning: str | None
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    failures: tuple[Malformed, ...] = ()
    stop: str | None = None
    has_closed_reasoning: bool = True
    tail: tuple[Event, ...] = field(default=(), compare=False)

    @property
    def finish_reason(self) -> Literal["tool_calls", "stop", "length"]:
        """OpenAI's word for how the turn ended. Calls that cannot be used are none: then it is "stop"."""
        if self.stop is None:
            return "length"
        return "tool_calls" if self.tool_calls else "stop"

    def to_message(self) -> Message:
        """The turn as an assistant message; failures are not part of it."""
        return Message("assistant", self.content, self.reasoning, self.tool_calls)

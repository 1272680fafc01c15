"""Token deltas of one turn into events for a client: stop strings cut, calls named, failed calls as plain text."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from yunque.core.records import ToolCall, ToolSpec
from yunque.protocol.generation import TokenDelta
from yunque.serve.stop_text import StopText
from yunque.text import (
    Event,
    FailureReason,
    Malformed,
    ReasoningDelta,
    TextDelta,
    Tokenizer,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    TurnParser,
)


@dataclass(frozen=True)
class CallStart:
    """A call is shown from here on. ``index`` counts shown calls from 0; ``id`` is what its result will refer to."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallEnd:
    """A call is complete; ``call`` has its id."""

    index: int
    call: ToolCall


@dataclass(frozen=True)
class CallVoid:
    """A call that was shown in part cannot be used: its arguments stay unfinished, which is never valid JSON, and its
    raw text follows as a ``TextDelta``. A whole (not streamed) reply does not show the call at all."""

    index: int
    failure: Malformed


TurnEvent = ReasoningDelta | TextDelta | CallStart | ToolCallDelta | CallEnd | CallVoid


class TurnReader:
    """Reads one turn's deltas. A call is shown with the first piece of its arguments, so that a call which failed
    before that was never shown; the raw text of every failed call is shown as text, stray tags are not."""

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[ToolSpec], *, in_reasoning: bool, stops: Sequence[str]
    ) -> None:
        self._special = tokenizer.special
        self._parser = TurnParser(tokenizer, tools, in_reasoning=in_reasoning)
        self._thought, self._answer = StopText(stops), StopText(stops)
        self._is_thinking = in_reasoning
        self._has_ended = False
        self._names: dict[int, str] = {}
        self._shown: dict[int, CallStart] = {}
        self._failures: list[Malformed] = []
        self.reasoning_tokens = 0
        self.has_calls = False
        """Whether a call is complete."""

    @property
    def failures(self) -> tuple[Malformed, ...]:
        """What could not be used so far."""
        return tuple(self._failures)

    def read(self, delta: TokenDelta) -> tuple[TurnEvent, ...]:
        """The events that a delta completes; the one with a ``finish`` completes them all."""
        parsed: list[Event] = []
        for token_id in delta.tokens[: self._shown_tokens(delta)]:
            if self._has_ended:
                break
            self._count(token_id)
            parsed += self._parser.feed(token_id)
            self._has_ended = token_id in self._special.eos_ids
        if delta.finish is not None:
            parsed += self._parser.finish().tail
        translated = _joined([event for item in parsed for event in self._translate(item)])
        if delta.finish is None:
            return tuple(shown for event in translated for shown in self._hold(event))
        if isinstance(delta.stopped_by, str):
            return tuple(self._cut(translated, delta.stopped_by))
        held = [shown for event in translated for shown in self._hold(event)]
        return (*held, *self._release())

    def _shown_tokens(self, delta: TokenDelta) -> int:
        """A stop id of the client's own ends the turn and is not part of its text; the format's ids end it in the
        parser."""
        is_own = isinstance(delta.stopped_by, int) and delta.stopped_by not in self._special.eos_ids
        return len(delta.tokens) - is_own

    def _count(self, token_id: int) -> None:
        if token_id in (self._special["<tool_call>"], *self._special.eos_ids):
            self._is_thinking = False
        elif token_id == self._special["<think>"]:
            self._is_thinking = True
        self.reasoning_tokens += self._is_thinking
        if token_id == self._special["</think>"]:
            self._is_thinking = False

    def _translate(self, event: Event) -> list[TurnEvent]:
        match event:
            case ToolCallStart(index, name):
                self._names[index] = name
                return []
            case ToolCallDelta(index, arguments):
                start = [] if index in self._shown else [self._show(index)]
                return [*start, ToolCallDelta(self._shown[index].index, arguments)]
            case ToolCallEnd(index, call):
                self.has_calls = True
                shown = self._shown[index]
                return [CallEnd(shown.index, replace(call, id=shown.id))]
            case Malformed():
                return self._fail(event)
            case _:
                return [event]

    def _show(self, index: int) -> CallStart:
        start = CallStart(len(self._shown), f"call_{uuid.uuid4().hex[:24]}", self._names[index])
        self._shown[index] = start
        return start

    def _fail(self, failure: Malformed) -> list[TurnEvent]:
        self._failures.append(failure)
        if failure.reason is FailureReason.STRAY_TAG:
            return []
        shown = self._shown.get(failure.index) if failure.index is not None else None
        void: list[TurnEvent] = [] if shown is None else [CallVoid(shown.index, failure)]
        return [*void, TextDelta(failure.raw)]

    def _hold(self, event: TurnEvent) -> list[TurnEvent]:
        """An event without what may be the beginning of a stop string."""
        match event:
            case ReasoningDelta(text):
                return _thought(self._thought.push(text))
            case TextDelta(text):
                return [*_thought(self._thought.finish()), *_answer(self._answer.push(text))]
            case _:
                return [*self._release(), event]

    def _cut(self, events: list[TurnEvent], stop: str) -> list[TurnEvent]:
        """The last events up to the stop string; whole where it stands in none (white space is not shown)."""
        kept: list[TurnEvent] = []
        for event in events:
            match event:
                case ReasoningDelta(text):
                    shown, found = self._thought.cut(text, stop)
                    kept += _thought(shown)
                case TextDelta(text):
                    kept += _thought(self._thought.finish())
                    shown, found = self._answer.cut(text, stop)
                    kept += _answer(shown)
                case _:
                    kept += [*self._release(), event]
                    found = False
            if found:
                return kept
        return [*kept, *self._release()]

    def _release(self) -> list[TurnEvent]:
        return [*_thought(self._thought.finish()), *_answer(self._answer.finish())]


def _joined(events: Sequence[TurnEvent]) -> list[TurnEvent]:
    """The same events with neighbouring pieces of one text as one piece."""
    joined: list[TurnEvent] = []
    for event in events:
        match (joined[-1] if joined else None), event:
            case TextDelta(before), TextDelta(text):
                joined[-1] = TextDelta(before + text)
            case ReasoningDelta(before), ReasoningDelta(text):
                joined[-1] = ReasoningDelta(before + text)
            case ToolCallDelta(index, before), ToolCallDelta(same, text) if index == same:
                joined[-1] = ToolCallDelta(index, before + text)
            case _:
                joined.append(event)
    return joined


def _thought(text: str) -> list[TurnEvent]:
    return [ReasoningDelta(text)] if text else []


def _answer(text: str) -> list[TurnEvent]:
    return [TextDelta(text)] if text else []

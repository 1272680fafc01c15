"""Generated ids back into a turn: thinking, text and tool calls, while they stream in."""

from collections.abc import Sequence
from enum import Enum, auto

from yunque.core.errors import DataError
from yunque.core.records import ToolCall, ToolSpec
from yunque.text.calls import CallParser
from yunque.text.events import (
    Event,
    FailureReason,
    Malformed,
    ParsedTurn,
    ReasoningDelta,
    TextDelta,
    ToolCallEnd,
)
from yunque.text.lexer import Symbol, Tag, TagLexer
from yunque.text.tokenizer import Tokenizer

_ENDS = frozenset({"<|endoftext|>", "<|user|>", "<|observation|>"})


class _State(Enum):
    REASONING = auto()
    CONTENT = auto()
    ENDED = auto()


class TurnParser:
    """Reads one assistant turn, in any of the GLM-5 formats, from the ids that were generated for it.

    Thought, then content and tool calls: ``</think>`` or ``<tool_call>`` leaves the thought
    (InternLM/lmdeploy#4737). However the ids are split over calls of ``feed``, the events are the same, and a
    tag or a character is never shown in part. Malformed parts are reported as events and in
    ``ParsedTurn.failures``; nothing of them reaches the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[ToolSpec] | None = None,
        *,
        in_reasoning: bool,
        text_tags: bool = False,
    ) -> None:
        """Start a turn.

        ``tokenizer`` is the vocabulary of the ids. ``tools`` says what may be called: a call of anything else is a
        failure, and their schemas type the arguments; None accepts every name and guesses types (JSON where it is
        JSON). ``in_reasoning``: the prompt opened ``<think>`` (``Rendered.opens_reasoning``). ``text_tags`` also
        recognises tags that ordinary tokens spell, for models that write them so; argument values are not escaped,
        so a value that holds a tag's spelling can then be cut at it.
        """
        self._lexer = TagLexer(tokenizer, text_tags=text_tags)
        self._tools = None if tools is None else {tool.name: tool for tool in tools}
        self._state = _State.REASONING if in_reasoning else _State.CONTENT
        self._reasoning: list[str] | None = [] if in_reasoning else None
        self._content: list[str] = []
        self._space = ""
        self._call: CallParser | None = None
        self._started_calls = 0
        self._calls: list[ToolCall] = []
        self._failures: list[Malformed] = []
        self._stop: str | None = None
        self._result: ParsedTurn | None = None

    def feed(self, *ids: int) -> list[Event]:
        """Read more ids; the events that they complete. DataError for an id after the end of the turn."""
        events: list[Event] = []
        for token_id in ids:
            if self._stop is not None or self._result is not None:
                end = "finish()" if self._stop is None else self._stop
                raise DataError(f"token id {token_id} comes after the end of the turn ({end})")
            for symbol in self._lexer.push(token_id):
                events += self._record(self._read(symbol))
        return events

    def finish(self) -> ParsedTurn:
        """End the turn here, if no id has ended it, and give what it holds. A second call changes nothing."""
        if self._result is None:
            was_thinking = self._state is _State.REASONING
            tail: list[Event] = []
            if self._stop is None:
                for symbol in self._lexer.finish():
                    tail += self._record(self._read(symbol))
                tail += self._record(self._end())
            self._result = ParsedTurn(
                reasoning=None if self._reasoning is None else "".join(self._reasoning),
                content="".join(self._content),
                tool_calls=tuple(self._calls),
                failures=tuple(self._failures),
                stop=self._stop,
                has_closed_reasoning=not was_thinking,
                tail=tuple(tail),
            )
        return self._result

    def _read(self, symbol: Symbol) -> list[Event]:
        if isinstance(symbol, Tag) and symbol.text in _ENDS:
            self._stop = symbol.text
            return self._end()
        if self._call is not None:
            return self._in_call(self._call, symbol)
        if isinstance(symbol, Tag):
            return self._on_tag(symbol.text)
        if self._state is _State.REASONING:
            return self._think(symbol)
        return self._say(symbol)

    def _on_tag(self, tag: str) -> list[Event]:
        match self._state, tag:
            case _, "<tool_call>":
                self._state = _State.CONTENT
                self._call = CallParser(self._started_calls, self._tools)
                return []
            case _State.REASONING, "</think>":
                self._state = _State.CONTENT
                return []
            case _State.REASONING, "<think>" if not self._reasoning:
                return []  # the model repeats the tag that the prompt ends with
            case _State.CONTENT, "<think>":
                self._state = _State.REASONING
                self._reasoning = self._reasoning or []
                return []
            case _State.CONTENT, "</think>" if self._reasoning is None and not (self._content or self._calls):
                return []  # the separator of a turn without a thought
        place = "thought" if self._state is _State.REASONING else "answer"
        return [Malformed(FailureReason.STRAY_TAG, f"{tag} in the {place}", tag)]

    def _in_call(self, call: CallParser, symbol: Symbol) -> list[Event]:
        begins_another = symbol == Tag("<tool_call>") and not call.is_in_value
        events = call.abandon() if begins_another else call.push(symbol)
        if call.is_closed:
            self._started_calls += call.is_started
            self._call = CallParser(self._started_calls, self._tools) if begins_another else None
        return events

    def _think(self, text: str) -> list[Event]:
        assert self._reasoning is not None
        self._reasoning.append(text)
        return [ReasoningDelta(text)]

    def _say(self, text: str) -> list[Event]:
        """White space is shown once text follows it, so that none stands at either end of the answer."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if not self._content:
            shown = shown.lstrip()
        if not shown:
            return []
        self._content.append(shown)
        return [TextDelta(shown)]

    def _end(self) -> list[Event]:
        call, self._call = self._call, None
        return [] if call is None else call.abandon()

    def _record(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, ToolCallEnd):
                self._calls.append(event.call)
            elif isinstance(event, Malformed):
                self._failures.append(event)
        return events

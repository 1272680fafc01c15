"""The steps of one turn: tokens as they come, the events they complete, and how it ended."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from yunque.core.records import ToolCall
from yunque.protocol.generation import Finish, TokenDelta
from yunque.serve.turn_reader import CallEnd, TurnEvent
from yunque.text import Malformed, ReasoningDelta, TextDelta

PARTIAL = "partial"
"""The ``stop_reason`` beside the ``finish_reason`` ``length`` of a reply that another engine may continue."""


@dataclass(frozen=True)
class Usage:
    """Counts of tokens. ``cached_tokens`` are part of the prompt's, ``reasoning_tokens`` of the completion's; the id
    that ended the turn counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class TurnEnd:
    """How a turn ended. ``reason`` is OpenAI's word (aborted and partial replies are ``length``: cut); ``finish`` the
    engine's. ``stop_string`` is the requested string that ended it. ``failures``: calls and tags that were unusable."""

    reason: Literal["stop", "length", "tool_calls"]
    finish: Finish
    usage: Usage
    stop_string: str | None = None
    failures: tuple[Malformed, ...] = ()
    drafted: int = 0
    accepted: int = 0

    @property
    def stop_reason(self) -> str | None:
        """vLLM's ``stop_reason``, and ``partial`` for a reply that was handed back unfinished."""
        return PARTIAL if self.finish is Finish.PARTIAL else self.stop_string


@dataclass(frozen=True)
class TurnStep:
    """One engine step: the tokens it made, the events they completed, and on the last step the end. The first step
    has the ids that the reply was resumed from: they come before ``delta.tokens``, and nothing is told of them."""

    delta: TokenDelta
    events: tuple[TurnEvent, ...]
    end: TurnEnd | None = None
    resumed: tuple[int, ...] = ()


@dataclass(frozen=True)
class FinishedTurn:
    """A whole turn. ``reasoning`` is None where no thought was opened; void calls are in ``content`` as raw text."""

    reasoning: str | None
    content: str
    tool_calls: tuple[ToolCall, ...]
    deltas: tuple[TokenDelta, ...]
    end: TurnEnd
    resumed: tuple[int, ...] = ()


class DeltaReader(Protocol):
    """Turns deltas into events (``TurnReader`` for chats)."""

    reasoning_tokens: int
    has_calls: bool

    @property
    def failures(self) -> tuple[Malformed, ...]: ...

    def read(self, delta: TokenDelta) -> tuple[TurnEvent, ...]: ...


class TurnObserver(Protocol):
    """Who counts turns (the metrics)."""

    def first_token(self, seconds: float) -> None: ...

    def turn_ended(self, end: TurnEnd, seconds: float) -> None: ...


class TurnSteps:
    """The steps of one turn, as an asynchronous iterator. ``aclose`` aborts the request, even before the first step.

    An engine that fails ends the turn with ``Finish.ERROR``; the steps before it are right. ``resumed`` are ids that
    the reply begins with: they are shown with the first step, and count as made.
    """

    def __init__(
        self,
        deltas: AsyncIterator[TokenDelta],
        reader: DeltaReader,
        prompt_tokens: int,
        observer: TurnObserver | None,
        *,
        resumed: tuple[int, ...] = (),
    ) -> None:
        self._deltas = deltas
        self._reader = reader
        self._usage = Usage(prompt_tokens)
        self._observer = observer
        self._resumed = resumed
        self._has_tokens = False
        self._begin_s = time.monotonic()
        self._has_ended = False
        self._is_aborted = False
        self._reading: asyncio.Task[object] | None = None

    def __aiter__(self) -> "TurnSteps":
        return self

    async def __anext__(self) -> TurnStep:
        if self._has_ended:
            raise StopAsyncIteration
        self._reading = asyncio.current_task()
        try:
            delta = TokenDelta(finish=Finish.ABORTED) if self._is_aborted else await anext(self._deltas)
        except StopAsyncIteration:
            delta = TokenDelta(finish=Finish.ERROR, error="the engine ended a reply without saying why")
        except asyncio.CancelledError:
            if not self._is_aborted or self._reading is None or self._reading.uncancel():
                raise
            delta = TokenDelta(finish=Finish.ABORTED)
        finally:
            self._reading = None
        if delta.finish is Finish.ABORTED:
            await self._close()
        return self._step(delta)

    @property
    def is_live(self) -> bool:
        """Whether the end has neither come nor been asked for."""
        return not (self._has_ended or self._is_aborted)

    def abort(self) -> None:
        """End the reply with ``Finish.ABORTED`` for whoever reads it, also while that one waits."""
        self._is_aborted = True
        if self._reading is not None:
            self._reading.cancel()

    async def aclose(self) -> None:
        """Abort the request if it still runs, and free its pages."""
        self._has_ended = True
        await self._close()

    async def _close(self) -> None:
        close = getattr(self._deltas, "aclose", None)
        if close is not None:
            await close()

    def _step(self, delta: TokenDelta) -> TurnStep:
        resumed, self._resumed = self._resumed, ()
        usage = self._usage
        events = self._reader.read(replace(delta, tokens=resumed + delta.tokens) if resumed else delta)
        seconds = time.monotonic() - self._begin_s
        if delta.tokens and not self._has_tokens and self._observer is not None:
            self._observer.first_token(seconds)
        self._has_tokens = self._has_tokens or bool(delta.tokens)
        self._usage = usage = Usage(
            usage.prompt_tokens,
            usage.completion_tokens + len(resumed) + len(delta.tokens),
            max(usage.cached_tokens, min(delta.cached_tokens or 0, usage.prompt_tokens)),
            self._reader.reasoning_tokens,
        )
        if delta.finish is None:
            return TurnStep(delta, events, resumed=resumed)
        self._has_ended = True
        end = TurnEnd(
            reason=_reason(delta.finish, has_calls=self._reader.has_calls),
            finish=delta.finish,
            usage=usage,
            stop_string=delta.stopped_by if isinstance(delta.stopped_by, str) else None,
            failures=self._reader.failures,
            drafted=delta.drafted,
            accepted=delta.accepted,
        )
        if self._observer is not None:
            self._observer.turn_ended(end, seconds)
        return TurnStep(delta, events, end, resumed)


async def collect(steps: TurnSteps) -> FinishedTurn:
    """Run a turn to its end, and close it whatever happens. A stream of the same steps shows the same reply."""
    reasoning: list[str] | None = None
    content: list[str] = []
    calls: list[ToolCall] = []
    deltas: list[TokenDelta] = []
    resumed: tuple[int, ...] = ()
    end: TurnEnd | None = None
    try:
        async for step in steps:
            deltas.append(step.delta)
            resumed += step.resumed
            end = step.end
            for event in step.events:
                match event:
                    case ReasoningDelta(text):
                        reasoning = [*(reasoning or []), text]
                    case TextDelta(text):
                        content.append(text)
                    case CallEnd(_, call):
                        calls.append(call)
                    case _:
                        pass
    finally:
        await steps.aclose()
    assert end is not None, "the last step of a turn has its end"
    return FinishedTurn(
        reasoning=None if reasoning is None else "".join(reasoning),
        content="".join(content),
        tool_calls=tuple(calls),
        deltas=tuple(deltas),
        end=end,
        resumed=resumed,
    )


def _reason(finish: Finish, *, has_calls: bool) -> Literal["stop", "length", "tool_calls"]:
    if finish is not Finish.STOP:
        return "length"
    return "tool_calls" if has_calls else "stop"

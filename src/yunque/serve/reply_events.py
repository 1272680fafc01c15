"""A turn written in a dialect of typed blocks or items (Anthropic's messages, OpenAI's responses)."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from yunque.protocol.generation import Finish
from yunque.protocol.http_errors import HttpError, HttpProblem, engine_failed, problem_of
from yunque.protocol.openai import dump
from yunque.protocol.sse import encode_event
from yunque.serve.conversation import (
    CallEnd,
    CallStart,
    CallVoid,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    TurnEnd,
    TurnEvent,
)
from yunque.serve.replies import Replies

logger = logging.getLogger(__name__)
WireEvent = dict[str, Any]


class ReplyWriter(Protocol):
    """Who puts a reply together; each method gives the stream events that it causes."""

    def thinking(self, text: str) -> list[WireEvent]: ...

    def text(self, text: str) -> list[WireEvent]: ...

    def begin_call(self, call_id: str, name: str) -> list[WireEvent]: ...

    def arguments(self, text: str) -> list[WireEvent]: ...

    def end_call(self) -> list[WireEvent]: ...

    def void_call(self) -> list[WireEvent]: ...


class Dialect(Protocol):
    """How a dialect begins and ends the reply that its ``writer`` writes."""

    @property
    def writer(self) -> ReplyWriter: ...

    def begin(self) -> list[WireEvent]:
        """Before anything is known of the reply."""
        ...

    def open(self, cached_tokens: int) -> list[WireEvent]:
        """The engine took the prompt in."""
        ...

    def close(self, end: TurnEnd) -> list[WireEvent]: ...

    def fail(self, found: HttpProblem) -> list[WireEvent]:
        """The reply breaks off, after its status was sent."""
        ...


async def written(replies: Replies, dialect: Dialect) -> AsyncGenerator[WireEvent, None]:
    """The events of one reply. Raises ``HttpError`` when the engine breaks down."""
    for opening in dialect.begin():
        yield opening
    is_open = False
    async with aclosing(aiter(replies)) as steps:
        async for _, step in steps:
            events = [] if is_open else dialect.open(step.delta.cached_tokens or 0)
            is_open = True
            for shown in step.events:
                events += _write(dialect.writer, shown)
            if step.end is not None and step.end.finish is not Finish.ERROR:
                events += dialect.close(step.end)
            for event in events:
                yield event
            if step.end is not None and step.end.finish is Finish.ERROR:
                raise HttpError(engine_failed(step.delta.error))


async def streamed(replies: Replies, dialect: Dialect) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream of these events; an exception becomes the dialect's own last events."""
    try:
        async with aclosing(written(replies, dialect)) as events:
            async for event in events:
                yield _encoded(event)
    except Exception as error:
        if not isinstance(error, HttpError):
            logger.error("a stream failed", exc_info=error)
        for event in dialect.fail(problem_of(error)):
            yield _encoded(event)


async def complete(replies: Replies, dialect: Dialect) -> None:
    """Write the whole reply."""
    async with aclosing(written(replies, dialect)) as events:
        async for _ in events:
            pass


def _encoded(event: WireEvent) -> bytes:
    return encode_event(dump(event), event=event["type"])


def _write(writer: ReplyWriter, event: TurnEvent) -> Sequence[WireEvent]:
    match event:
        case ReasoningDelta(text):
            return writer.thinking(text)
        case TextDelta(text):
            return writer.text(text)
        case CallStart(_, call_id, name):
            return writer.begin_call(call_id, name)
        case ToolCallDelta(_, arguments):
            return writer.arguments(arguments)
        case CallEnd():
            return writer.end_call()
        case CallVoid():
            return writer.void_call()

"""Answers that watch their client: a stream, or a long computation, ends at once when the client has left."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from yunque.protocol.http_errors import HttpError, problem, problem_of
from yunque.protocol.openai import dump
from yunque.protocol.sse import encode_comment, encode_event

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def _nothing() -> None:
    """Nobody counts."""


class Closable(Protocol):
    """A stream of bytes that is closed whether it was read to its end or not."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None: ...


class ClientLeft(HttpError):
    """Nobody waits for the answer any more."""

    def __init__(self) -> None:
        super().__init__(problem(499, "the client closed the connection", code="client_closed_request"))


async def until_client_leaves(
    receive: Receive, work: Coroutine[Any, Any, _Result], *, on_leave: Callable[[], None] = _nothing
) -> _Result:
    """The result of ``work``, which is cancelled when the client leaves; then ``on_leave`` and ``ClientLeft``."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            on_leave()
            raise ClientLeft
        return task.result()
    finally:
        await _cancel(task, watcher)


class EventStream(Response):
    """Server-sent events of ``source``, which is closed when it ends, when it fails, and when the client leaves.

    A silent connection gets a comment every ``ping_interval_s``. An exception of the source becomes a last event of
    OpenAI's error shape.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: Closable,
        *,
        ping_interval_s: float,
        headers: Mapping[str, str] | None = None,
        on_leave: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._source = source
        self._ping_interval_s = ping_interval_s
        self._on_leave = on_leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        sender = asyncio.ensure_future(self._send(send))
        watcher = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not sender.done():
                self._on_leave()
            else:
                sender.result()
        finally:
            await _cancel(sender, watcher)
            await self._source.aclose()

    async def _send(self, send: Send) -> None:
        lock = asyncio.Lock()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def write(data: bytes) -> None:
            async with lock:
                await send({"type": "http.response.body", "body": data, "more_body": True})

        async def ping() -> None:
            while True:
                await asyncio.sleep(self._ping_interval_s)
                await write(encode_comment("ping"))

        pinger = asyncio.ensure_future(ping())
        try:
            async for data in self._source:
                await write(data)
        except Exception as error:
            logger.error("a stream failed; its status is sent, so the error goes into it", exc_info=error)
            await write(encode_event(dump(problem_of(error).openai_body())))
        finally:
            await _cancel(pinger)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

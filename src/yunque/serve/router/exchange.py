"""One engine's answer on its way to the client: passed on as it is, or followed event by event."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
from starlette.types import Send

from yunque.serve.router import answers, sse
from yunque.serve.router.continuation import TokenReply
from yunque.serve.router.health import Sign
from yunque.serve.router.replay import TextReply

#: Answers below this size are read to their end before the client hears of them: until then nothing is lost.
HOLD_BYTES = 2**20
_READ_OUT_S = 1.0
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"}
    | {"transfer-encoding", "upgrade", "host", "content-length", "expect"}
)
Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Failure:
    """An attempt that did not finish. ``sign``: what it says of the engine's health; ``is_final``: nobody else can
    do better; ``may_return``: the same engine may be asked again."""

    reason: str
    sign: Sign | None = None
    is_final: bool = False
    may_return: bool = False


class ClientSide:
    """What the client has been told. ``send`` takes its time with a slow reader, and so do the methods here: nothing
    more is read from the engine meanwhile."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_started = False
        self.is_ended = False
        self.is_events = False

    async def start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """Say status and headers, unless that has been done."""
        if self.is_started:
            return
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        self.is_started = True
        self.is_events = any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in raw)
        await self._tell({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes) -> None:
        await self._tell({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        self.is_ended = True
        await self._tell({"type": "http.response.body", "body": data, "more_body": False})

    async def json(self, status: int, data: bytes, headers: Headers = ()) -> None:
        """A whole answer."""
        length = ("content-length", str(len(data)))
        await self.start(status, [("content-type", "application/json"), length, *headers])
        await self.end(data)

    async def _tell(self, message: dict[str, Any]) -> None:
        with anyio.CancelScope(shield=True):  # an attempt may be given up, but not with half an event said
            await self._send(message)


def kept_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Headers without those that concern one connection only."""
    pairs = list(headers)
    named = {part.strip().lower() for name, value in pairs if name.lower() == "connection" for part in value.split(",")}
    return [(name, value) for name, value in pairs if name.lower() not in _HOP_BY_HOP | named]


def is_events(response: httpx.Response) -> bool:
    return response.headers.get("content-type", "").startswith("text/event-stream")


async def pass_on(response: httpx.Response, client: ClientSide) -> None:
    """Hand the answer through, bytes and headers as they are. A short one, and the first bytes of a stream, are
    waited for before the client hears anything."""
    headers = kept_headers(response.headers.multi_items())
    if length := response.headers.get("content-length"):
        headers.append(("content-length", length))
    held, limit = bytearray(), 1 if is_events(response) else HOLD_BYTES
    async for chunk in response.aiter_raw():
        held += chunk
        if len(held) >= limit:
            await client.start(response.status_code, headers)
            await client.write(bytes(held))
            held.clear()
            limit = 1
    await client.start(response.status_code, headers)
    await client.end(bytes(held))


async def follow(
    response: httpx.Response,
    reply: TokenReply | TextReply,
    client: ClientSide,
    is_leaving: Callable[[], Awaitable[bool]],
    on_event: Callable[[], None],
) -> Failure | None:
    """Hand a reply on event by event while ``reply`` takes note; None when it is finished.

    ``is_leaving`` is asked when the engine hands a reply back unfinished: one on its way out leaves it to others; one
    that stays gets it again where the engine says that it may go on, and else the client has it as it is.
    ``on_event`` is called when ``reply`` has taken note of one more. Raises ``CannotContinue`` when a second engine
    does not fit the first, and httpx's errors.
    """
    headers = kept_headers(response.headers.multi_items())
    stream = _events_of(response)
    async for event in stream:
        if event.is_done:
            break
        data = event.json()
        if data is None:
            if reply.wants_stream and client.is_started:  # a comment that keeps the connection open
                await client.write(event.raw)
            continue
        if "error" in data and not data.get("choices"):
            return await _stopped_by(data, event, reply, client)
        told = reply.feed(data)
        on_event()
        is_partial, goes_on, leaves = reply.is_partial, False, False
        if reply.is_handed_back and told is not None:
            leaves = await is_leaving()
            goes_on = leaves or is_partial
            told = reply.reopen(told) if goes_on else told
        if reply.wants_stream and told is not None:
            await client.start(200, headers)
            await client.write(event.raw if told is data else sse.encode(told))
        if goes_on:
            return Failure(f"handed back by a {'draining' if leaves else 'paused'} engine", may_return=not leaves)
    if not reply.is_finished:
        return Failure("the stream ended before the reply did", Sign.SILENT)
    await finish(reply, client)
    await _read_out(stream)
    return None


async def _read_out(stream: AsyncIterator[sse.Event]) -> None:
    """Read what follows the end, nothing as a rule: a connection whose answer was not read out cannot be used again."""
    with anyio.move_on_after(_READ_OUT_S), contextlib.suppress(httpx.TransportError):
        async for _ in stream:
            pass


async def finish(reply: TokenReply | TextReply, client: ClientSide) -> None:
    """Say the end of a finished reply."""
    if reply.wants_stream:
        await client.start(200, [("content-type", "text/event-stream; charset=utf-8")])
        await client.end(sse.DONE)
    elif isinstance(reply, TokenReply):
        await client.json(200, json.dumps(reply.whole(), ensure_ascii=False).encode("utf-8", "replace"))


async def _events_of(response: httpx.Response) -> AsyncIterator[sse.Event]:
    if is_events(response):
        async for event in sse.events(response.aiter_bytes()):
            yield event
        return
    content = await response.aread()  # the engine did not stream: all of it is one event
    text = content.decode("utf-8", "replace")
    yield sse.Event(b"data: " + content + b"\n\n", text)


async def _stopped_by(
    data: dict[str, Any], event: sse.Event, reply: TokenReply | TextReply, client: ClientSide
) -> Failure | None:
    """An error came instead of an event: the engine's fault is a failed attempt, the request's is passed on."""
    error = data["error"]
    if answers.is_engine_fault(error):
        return Failure(f"the engine says {error.get('message')!r}")
    if reply.wants_stream:
        await client.start(200, [("content-type", "text/event-stream; charset=utf-8")])
        await client.write(event.raw)
        await client.end(sse.DONE)
    else:
        await client.json(400, event.data.encode("utf-8", "replace"))
    return None

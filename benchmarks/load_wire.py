"""HTTP/1.1 by hand: what a well-behaved client library would not send, and streams that are timed or cut anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from load_server import API_KEY

HOST = "127.0.0.1"


def request_bytes(
    path: str, body: bytes, *, key: str | None = API_KEY, method: str = "POST", headers: Mapping[str, str] | None = None
) -> bytes:
    """One request whose connection ends with the answer."""
    fields = {"host": HOST, "connection": "close", "content-type": "application/json"}
    fields |= {"content-length": str(len(body))} | ({} if key is None else {"authorization": f"Bearer {key}"})
    head = "".join(f"{name}: {value}\r\n" for name, value in (fields | dict(headers or {})).items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def json_request(path: str, body: Mapping[str, Any], **options: Any) -> bytes:
    """The same with a JSON body."""
    return request_bytes(path, json.dumps(body).encode(), **options)


@contextlib.asynccontextmanager
async def connection(
    port: int, *, receive_bytes: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is cut when the block is left. A small ``receive_bytes`` makes the server wait for us."""
    if receive_bytes is None:
        reader, writer = await asyncio.open_connection(HOST, port)
    else:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, (HOST, port))
        reader, writer = await asyncio.open_connection(sock=plain, limit=receive_bytes)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def status_of(reader: asyncio.StreamReader) -> int:
    """The status of an answer; 0 where the connection ends without one."""
    line = await reader.readline()
    parts = line.split()
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0


@dataclass(frozen=True)
class Timed:
    """One streamed reply. Times are from the first byte of the request; None where that point was not reached."""

    status: int
    first_token_s: float | None = None
    total_s: float | None = None
    is_finished: bool = False
    """Whether the reason of the end and the end of the stream came."""


async def timed_stream(port: int, request: bytes) -> Timed:
    """Send ``request``, read the whole answer, and time it."""
    begin_s = time.monotonic()
    try:
        async with connection(port) as (reader, writer):
            writer.write(request)
            await writer.drain()
            status = await status_of(reader)
            first_s, tail, has_reason = None, b"", False
            while data := await reader.read(65536):
                if first_s is None and b'"text":' in data:
                    first_s = time.monotonic() - begin_s
                tail = tail[-80:] + data
                has_reason = has_reason or b'"finish_reason":"' in tail
            is_finished = has_reason and b"data: [DONE]" in tail
            return Timed(status, first_s, time.monotonic() - begin_s, is_finished)
    except OSError:
        return Timed(0)

"""A real HTTP server that answers from a script: the double of other people's servers."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


@dataclass(frozen=True)
class Answer:
    """One answer: a JSON value, text or bytes. ``delay_s`` is waited before it. ``breaks_off``: the body stops half-way
    and the connection is closed."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    breaks_off: bool = False

    @property
    def content(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return (self.body if isinstance(self.body, str) else json.dumps(self.body)).encode()


@dataclass(frozen=True)
class Asked:
    """One request as it came."""

    path: str
    body: Any
    headers: Mapping[str, str]


class ScriptedServer:
    """Plays ``answers`` in order, the last one for ever, and keeps what was asked."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[Asked] = []
        self.left = 0
        """Clients that went away before they had their answer."""
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])
        config = uvicorn.Config(app, log_config=None, lifespan="off", access_log=False, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def play(self, *answers: Answer) -> None:
        """What comes next; what was asked before is forgotten."""
        self.answers, self.asked = list(answers), []

    def __enter__(self) -> "ScriptedServer":
        self._thread.start()
        end = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < end, "the scripted server did not start"
            time.sleep(0.005)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    async def _answer(self, request: Request) -> Response:
        raw = await request.body()
        self.asked.append(Asked(request.url.path, json.loads(raw) if raw else None, dict(request.headers)))
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        end = time.monotonic() + answer.delay_s
        while time.monotonic() < end:
            if await request.is_disconnected():
                self.left += 1
                return Response(status_code=499)
            await asyncio.sleep(0.01)
        headers = {"content-type": "application/json", **answer.headers}
        if not answer.breaks_off:
            return Response(answer.content, answer.status, headers)

        async def half() -> Any:
            yield answer.content[: len(answer.content) // 2]

        return StreamingResponse(half(), answer.status, headers | {"content-length": str(len(answer.content))})


class ClosingServer:
    """Takes connections, reads a request and closes without a word, ``times`` times; then plays an answer."""

    def __init__(self, times: int, body: Any) -> None:
        self.times, self.body = times, json.dumps(body).encode()
        self.asked = 0
        self.url = ""

    async def __aenter__(self) -> "ClosingServer":
        self._server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-le"))
        await reader.readexactly(length)
        self.asked += 1
        if self.asked > self.times:
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(self.body)}\r\nconnection: close\r\n\r\n"
            writer.write(head.encode() + self.body)
            await writer.drain()
        writer.close()

"""Apps over a scripted engine: called in process, or listening on a free port of this machine in a thread."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from fastapi import FastAPI

from yunque.protocol.sse import DONE, SseDecoder
from yunque.serve.app import create_app
from yunque.serve.run import Server
from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .scripted_engine import Rule, ScriptedEngine, ScriptSettings


@dataclass
class Served:
    """An app, its engine and its chat format; ``replies`` are written with tags (``hm</think>Hi<|user|>``)."""

    renderer: Renderer
    engine: ScriptedEngine
    app: FastAPI
    settings: ServeSettings = field(default_factory=ServeSettings)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """One request, in process."""
        return self.call("POST", path, json=body, **options)

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            async with self.client() as client:
                return await client.request(method, path, **options)

        return asyncio.run(run())

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20)

    def ids(self, text: str) -> list[int]:
        return self.renderer.tokenizer.encode_with_special(text)


def serve(
    renderer: Renderer, *replies: str, settings: ServeSettings | None = None, rule: Rule | None = None, **script: Any
) -> Served:
    """An app whose engine plays ``replies``, or ``rule``."""
    settings = settings or ServeSettings()
    played = rule or [renderer.tokenizer.encode_with_special(text) for text in replies or ("",)]
    script = {"vocab_size": renderer.tokenizer.vocab_size, **script}
    engine = ScriptedEngine(played, ScriptSettings(**script), decode=renderer.tokenizer.decode)
    return Served(renderer, engine, create_app(engine, renderer, settings), settings)


def events(response: httpx.Response) -> list[Any]:
    """The JSON events of an OpenAI stream; asserts that ``[DONE]`` ends it."""
    decoder = SseDecoder()
    found = [event.data for event in (*decoder.feed(response.content), *decoder.finish())]
    assert found.pop() == DONE
    return [json.loads(data) for data in found]


@contextlib.contextmanager
def listening(served: Served) -> Iterator[str]:
    """The URL of a real server in a thread; it has ended when the block is left."""
    server = Server(served.app, served.engine, replace(served.settings, port=0))
    url = server.bind()
    thread = threading.Thread(target=lambda: asyncio.run(server.answer()), daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield url
    finally:
        server.should_exit = True
        thread.join(timeout=20)
    assert not thread.is_alive()


def wait_until(is_true: Any, timeout_s: float = 10.0) -> None:
    """Wait for a condition; fails after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


async def eventually(is_true: Any, timeout_s: float = 10.0) -> None:
    """The same inside an event loop."""
    async with asyncio.timeout(timeout_s):
        while not is_true():
            await asyncio.sleep(0.005)


async def lines_of(response: httpx.Response) -> AsyncIterator[str]:
    """The lines of a stream as they come."""
    async for line in response.aiter_lines():
        yield line

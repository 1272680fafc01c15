"""Scripted engines behind real ports: tokens are a function of what stands before them, deaths and refusals as told."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PAGE = 16
PROMPT = list(range(100, 140))
#: What tests speak through; one for all, because making one takes longer than a request.
CLIENT = httpx.Client(timeout=20)


def next_token(prefix: Sequence[int]) -> int:
    """The model: one token for every prefix, so that a continuation from it can be checked."""
    return int.from_bytes(blake2b(array("q", prefix).tobytes(), digest_size=4).digest(), "big") % 900 + 50


def model_tokens(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def logprob(token: int) -> float:
    return -(token % 64) / 8


def word(token: int) -> str:
    return f"w{token} "


class Death(Exception):
    """The engine dies here: the connection is cut."""


@dataclass
class Served:
    """An application on a port of its own, in a thread."""

    server: uvicorn.Server
    thread: threading.Thread
    url: str

    def ask_to_stop(self) -> None:
        self.server.should_exit = True
        self.server.force_exit = True

    def stop(self) -> None:
        self.ask_to_stop()
        self.thread.join(10)


def serve(app: Any, port: int = 0) -> Served:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio: no Nagle delay
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False, timeout_graceful_shutdown=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    return Served(server, thread, f"http://127.0.0.1:{listener.getsockname()[1]}")


def until(condition: Callable[[], Any], *, timeout_s: float = 10.0) -> None:
    """Wait for ``condition``; an assertion fails when it does not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.005)


@dataclass
class Engine:
    """One engine. ``deaths`` requests die after ``die_after`` tokens (0: before the first byte); ``refuses`` is a
    status for every generation; ``health`` what /health says; ``delay_s`` lies between two tokens; ``gives_ids``,
    ``resumes``, ``is_incremental``, ``streams``: what it can do; ``hands_back`` ends replies as aborted."""

    name: str = "engine"
    die_after: int = 0
    deaths: int = 0
    refuses: int | None = None
    retry_after: str = "7"
    health: tuple[int, str] = (200, "ok")
    delay_s: float = 0.0
    version: str = "v1"
    gives_ids: bool = True
    resumes: bool = True
    is_incremental: bool = True
    streams: bool = True
    hands_back: bool = False
    error_event: dict[str, Any] | None = None
    flood_bytes: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sessions: list[str | None] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)
    closed: int = 0
    live: int = 0
    sent_bytes: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    served: Served | None = None
    pages: set[bytes] = field(default_factory=set)

    @property
    def url(self) -> str:
        assert self.served is not None
        return self.served.url

    def start(self, port: int = 0) -> None:
        routes = [
            Route("/health", self._health),
            Route("/generate", self._generate, methods=["POST"]),
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/v1/chat/completions", self._text, methods=["POST"]),
            Route("/v1/completions", self._text, methods=["POST"]),
            Route("/v1/messages", self._messages, methods=["POST"]),
            Route("/flood", self._flood),
            Route("/{path:path}", self._other, methods=["GET", "POST", "DELETE"]),
        ]
        self.served = serve(Starlette(routes=routes), port)

    def stop(self) -> None:
        if self.served is not None:
            self.served.stop()
            self.served = None

    def cached(self, prompt: Sequence[int]) -> int:
        """Prompt tokens in the cache; the prompt is cached from now on."""
        count, state, is_known = 0, blake2b(digest_size=16), True
        for start in range(0, len(prompt) - PAGE + 1, PAGE):
            state.update(array("q", prompt[start : start + PAGE]).tobytes())
            digest = state.copy().digest()
            is_known = is_known and digest in self.pages
            count += PAGE if is_known else 0
            self.pages.add(digest)
        self.prompt_tokens += len(prompt)
        self.cached_tokens += count
        return count

    async def _health(self, _: Request) -> Response:
        status, reason = self.health
        return JSONResponse({"status": reason}, status)

    async def _begin(self, request: Request) -> dict[str, Any] | Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.ports.add(request.client.port if request.client else 0)
        self.sessions.append(request.headers.get("x-session-id"))
        if self.refuses is not None:
            return JSONResponse(
                {"error": {"message": self.name, "code": "busy"}}, self.refuses, {"retry-after": self.retry_after}
            )
        if self.deaths and self.die_after == 0:
            self.deaths -= 1
            return StreamingResponse(_dead(), media_type="text/event-stream")
        return body

    async def _tokens(self, prompt: Sequence[int], limit: int, made: Sequence[int] = ()) -> AsyncIterator[list[int]]:
        """The reply so far, longer by one token every time; ``made`` is played first."""
        is_dying = self.deaths > 0
        self.deaths -= is_dying
        self.live += 1
        reply: list[int] = []
        try:
            while len(reply) < limit:
                await asyncio.sleep(self.delay_s)
                if is_dying and len(reply) == self.die_after:
                    raise Death
                reply.append(made[len(reply)] if len(reply) < len(made) else next_token([*prompt, *reply]))
                yield reply
        except (GeneratorExit, asyncio.CancelledError):
            self.closed += 1
            raise
        finally:
            self.live -= 1

    async def _generate(self, request: Request) -> Response:
        body = await self._begin(request)
        if isinstance(body, Response):
            return body
        is_sglang = request.url.path == "/generate"
        prompt = body["input_ids" if is_sglang else "token_ids"]
        cached = self.cached(prompt)
        limit = body["sampling_params"]["max_new_tokens" if is_sglang else "max_tokens"]
        shape = self._sglang if is_sglang else self._vllm
        if body.get("stream") and not self.streams:
            return JSONResponse({"error": {"message": "no streams here", "code": "unsupported"}}, 400)
        if not body.get("stream"):
            reply = [list(made) async for made in self._tokens(prompt, limit)][-1]
            return JSONResponse(shape(body, cached, reply, 0, limit))

        async def events() -> AsyncIterator[bytes]:
            if self.error_event:
                yield _event(self.error_event)
                return
            async for made in self._tokens(prompt, limit):
                begin = len(made) - 1 if self.is_incremental or not is_sglang else 0
                event = shape(body, cached, made, begin, limit)
                yield _event(event)
                if event.get("meta_info", {}).get("finish_reason") is not None:
                    break
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    def _sglang(self, body: dict, cached: int, made: list[int], begin: int, limit: int) -> dict[str, Any]:
        new = made[begin:]
        kind = "abort" if self.hands_back and len(made) == 5 else "length" if len(made) == limit else None
        return {
            "text": "".join(map(word, new)),
            "output_ids": list(new),
            "meta_info": {
                "id": f"{self.name}-request",
                "finish_reason": {"type": kind} if kind else None,
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(made),
                "cached_tokens": cached,
                "weight_version": self.version,
                "output_token_logprobs": [[logprob(token), token, None] for token in new],
                "output_token_versions": [self.version for _ in new],
            },
        }

    def _vllm(self, body: dict, cached: int, made: list[int], begin: int, limit: int) -> dict[str, Any]:
        new = made[begin:]
        entries = [{"token": f"token_id:{token}", "logprob": logprob(token)} for token in new]
        choice = {"index": 0, "token_ids": new, "logprobs": {"content": entries}, "finish_reason": None}
        if len(made) == limit:
            choice["finish_reason"] = "length"
        usage = {
            "prompt_tokens": len(body["token_ids"]),
            "completion_tokens": len(made),
            "total_tokens": len(body["token_ids"]) + len(made),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return {"request_id": f"{self.name}-request", "choices": [choice], "usage": usage}

    async def _text(self, request: Request) -> Response:
        body = await self._begin(request)
        if isinstance(body, Response):
            return body
        is_chat = request.url.path.endswith("chat/completions")
        text = json.dumps(body["messages"]) if is_chat else body["prompt"]
        prompt = list(text.encode())
        self.cached(prompt)
        limit = body["max_tokens"]
        if not body.get("stream"):
            reply = [list(made) async for made in self._tokens(prompt, limit)][-1]
            return JSONResponse({"id": self.name, "choices": [{"message": {"content": "".join(map(word, reply))}}]})
        asks_ids = bool(body.get("return_token_ids")) and self.gives_ids
        resumed = body.get("resume_token_ids", []) if self.resumes else []

        async def chunks() -> AsyncIterator[bytes]:
            head = {"id": f"{self.name}-chat", "created": len(self.name), "model": "scripted"}
            if is_chat:
                first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield _event({**head, "choices": [first], **({"prompt_token_ids": prompt} if asks_ids else {})})
            said = 0
            async for made in self._tokens(prompt, limit, resumed):
                # the text of a token is held back until the next one is there
                upto = len(made) if len(made) == limit else len(made) - 1
                choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if len(made) == limit else None}
                choice |= _said(made, said, upto, is_chat=is_chat, has_tools="tools" in body)
                said = upto
                is_handed_back = self.hands_back and len(made) == 5
                if is_handed_back:
                    choice["finish_reason"] = "abort"
                if body.get("logprobs"):
                    choice["logprobs"] = {"content": [{"token": word(made[-1]), "logprob": logprob(made[-1])}]}
                if asks_ids:
                    choice |= {"token_ids": [made[-1]], "weight_versions": [self.version]}
                yield _event({**head, "choices": [choice]})
                if is_handed_back:
                    break
            usage = {"prompt_tokens": len(prompt), "completion_tokens": limit, "total_tokens": len(prompt) + limit}
            if not is_handed_back:
                yield _event({**head, "choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def _messages(self, request: Request) -> Response:
        body = await self._begin(request)
        if isinstance(body, Response):
            return body

        async def events() -> AsyncIterator[bytes]:
            async for made in self._tokens([1], body["max_tokens"]):
                yield _event({"type": "content_block_delta", "delta": {"text": word(made[-1])}}, name="delta")
            yield _event({"type": "message_stop"}, name="message_stop")

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _flood(self, _: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            while self.sent_bytes < self.flood_bytes:
                yield bytes(65536)
                self.sent_bytes += 65536

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def _other(self, request: Request) -> Response:
        self.calls.append((request.method, request.url.path))
        self.headers.append(dict(request.headers))
        if self.refuses is not None:
            return JSONResponse({"error": self.name}, self.refuses)
        return JSONResponse({"version": self.version}, headers={"x-engine": self.name})


def _said(made: Sequence[int], begin: int, end: int, *, is_chat: bool, has_tools: bool) -> dict[str, Any]:
    """What a chunk says of ``made[begin:end]``: three words of reasoning, then text, with tools a call from the
    sixth on."""
    if not is_chat:
        return {"text": "".join(map(word, made[begin:end]))}
    delta: dict[str, Any] = {}
    for place in range(begin, end):
        if has_tools and place >= 5:
            call = delta.setdefault("tool_calls", [{"index": 0, "function": {"arguments": ""}}])[0]
            if place == 5:
                call |= {"id": f"call-{id(made)}", "type": "function"}
                call["function"]["name"] = "look"
            call["function"]["arguments"] += word(made[place])
        else:
            name = "reasoning_content" if place < 3 else "content"
            delta[name] = delta.get(name, "") + word(made[place])
    return {"delta": delta}


async def _dead() -> AsyncIterator[bytes]:
    raise Death
    yield b""


def _event(data: dict[str, Any], *, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(data)}\n\n".encode()

"""Hostile requests: each with the statuses that may answer it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from load_server import CONTEXT
from load_wire import connection, json_request, request_bytes, status_of

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Abuse:
    """``request`` makes the bytes; one of ``statuses`` (or 429) answers it. ``share`` weighs how often it comes."""

    name: str
    request: Callable[[random.Random], bytes]
    statuses: tuple[int, ...]
    share: float = 1.0


def _chat(**fields: object) -> bytes:
    return json_request(CHAT, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **fields})


def _completion(**fields: object) -> bytes:
    return json_request(COMPLETIONS, {"prompt": "hello", "max_tokens": 8, **fields})


def _raw(body: bytes, **options: object) -> Callable[[random.Random], bytes]:
    sent = request_bytes(CHAT, body, **options)  # type: ignore[arg-type]
    return lambda _: sent


def _hostile_schema(draw: random.Random) -> bytes:
    """A schema that no cache has seen, near or over what a grammar may cost."""
    salt, size = draw.getrandbits(32), draw.choice((50, 400, 3000))
    kind = draw.choice(("wide", "pattern", "union", "nested"))
    if kind == "wide":
        schema = {"properties": {f"p{salt}_{i}": {"type": "string"} for i in range(size)}}
    elif kind == "pattern":
        pattern = f"^((a|b|{salt}){{1,{size}}}c?){{1,{size}}}$"
        schema = {"properties": {f"p{salt}": {"type": "string", "pattern": pattern}}}
    elif kind == "union":
        values = {"enum": [f"v{salt}{k}" for k in range(20)]}
        schema = {"anyOf": [{"properties": {f"q{salt}_{i}": values}} for i in range(50)]}
    else:
        schema = {"properties": {f"q{salt}": {"type": "integer"}}}
        for _ in range(size // 10):
            schema = {"properties": {"inner": {"type": "object", **schema}}, "required": ["inner"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", **schema}}}
    return _chat(response_format=form, max_tokens=16)


def _huge_headers(draw: random.Random) -> bytes:
    size = draw.choice((70_000, 400_000))
    many = {f"x-{i}": "y" * 100 for i in range(size // 100)}
    return request_bytes(CHAT, b"{}", headers=draw.choice((many, {"x-large": "y" * size})))


def abuses(body_limit_bytes: int) -> list[Abuse]:
    """All kinds. The large bodies are made once."""
    ids = json_request(COMPLETIONS, {"prompt": [7] * 10**6, "max_tokens": 8})
    text = json_request(COMPLETIONS, {"prompt": "to be or not " * 400_000, "max_tokens": 8})
    chat = json_request(CHAT, {"messages": [{"role": "user", "content": "be " * 10**6}]})
    chunk = b"%x\r\n%s\r\n" % (MEBIBYTE, b"a" * MEBIBYTE)
    endless = request_bytes(CHAT, b"", headers={"transfer-encoding": "chunked"})
    endless = endless.replace(b"content-length: 0\r\n", b"") + chunk * (body_limit_bytes // MEBIBYTE + 2)
    announced = request_bytes(CHAT, b"{", headers={"content-length": str(10 * body_limit_bytes)})
    brackets = b'{"messages": [' + b"[[[[[[[[]]]]]]]]," * 400_000 + b"1]}"
    return [
        Abuse("bad UTF-8", _raw(b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}'), (400,)),
        Abuse("bad JSON", _raw(b'{"messages": [{"role": "user",'), (400,)),
        Abuse("deep JSON", _raw(b"[" * 200_000), (400,)),
        Abuse("many brackets", _raw(brackets), (400,), 0.05),
        Abuse("half a surrogate", _raw(rb'{"messages": [{"role": "user", "content": "\ud800"}]}'), (400,)),
        Abuse("not a number", _raw(b'{"messages": [], "temperature": NaN}'), (400,)),
        Abuse("not JSON at all", _raw(b"a=b", headers={"content-type": "text/plain"}), (415,)),
        Abuse("wrong types", lambda _: _chat(temperature="warm", stop=7, tools={"a": 1}), (400,)),
        Abuse("values out of range", lambda _: _chat(temperature=-3, top_p=9), (400,)),
        Abuse("another model", lambda _: _chat(model="nothing"), (404,)),
        Abuse("no such route", lambda _: request_bytes("/v2/nothing", b"{}"), (404,)),
        Abuse("a wrong method", lambda _: request_bytes(CHAT, b"{}", method="DELETE"), (405,)),
        Abuse("a wrong key", lambda _: request_bytes(CHAT, b"{}", key="wrong"), (401,)),
        Abuse("no key", lambda _: request_bytes(CHAT, b"{}", key=None), (401,)),
        Abuse("an API key at an admin route", lambda _: request_bytes("/admin/pause", b"{}"), (401,)),
        Abuse("huge headers", _huge_headers, (400, 431)),
        Abuse("not HTTP", lambda draw: draw.randbytes(200) + b"\r\n\r\n", (400,)),
        Abuse("an announced oversize body", lambda _: announced, (413,)),
        Abuse("an endless body", lambda _: endless, (413, 0), 0.05),
        Abuse("a prompt of 1e6 ids", lambda _: ids, (400,), 0.1),
        Abuse("a prompt of 1e6 tokens of text", lambda _: text, (400,), 0.1),
        Abuse("a message of 1e6 words", lambda _: chat, (400,), 0.1),
        Abuse("ids that are none", lambda _: _completion(prompt=[10**9, -1]), (400,)),
        Abuse("more than the context", lambda _: _completion(max_tokens=2 * CONTEXT), (400,)),
        Abuse("choices without end", lambda _: _chat(n=10**6), (400,)),
        Abuse("many choices", lambda _: _chat(n=32, max_tokens=2), (200,), 0.3),
        Abuse("a hostile schema", _hostile_schema, (200, 400)),
        Abuse("a regex bomb", lambda _: _chat(structured_outputs={"regex": "((a{1,99}){1,99}){1,99}"}), (200, 400)),
        Abuse("a past of the void", lambda _: json_request(GENERATE, {"input_ids": []}), (400,)),
        Abuse("a body that stops", lambda _: request_bytes(CHAT, b"{", headers={"content-length": "999"}), (0,)),
        Abuse("headers that stop", lambda _: b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-", (0,)),
    ]


async def abuse(port: int, request: bytes, *, patience_s: float) -> int:
    """The status that answers ``request``; 0 where none comes within ``patience_s`` or the connection is cut."""
    try:
        async with asyncio.timeout(patience_s), connection(port) as (reader, writer):
            writer.write(request)
            status = asyncio.ensure_future(status_of(reader))
            with contextlib.suppress(ConnectionError):  # it may answer and close before it has read all
                await writer.drain()
            return await status
    except (OSError, TimeoutError):
        return 0

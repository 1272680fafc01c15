"""Five hundred streaming clients: most read to the end, others leave, dawdle, or send what is hostile."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from load_abuse import Abuse, abuse
from load_server import API_KEY
from load_wire import connection, json_request, status_of

CHAT, COMPLETIONS, MESSAGES, GENERATE = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate"
ENDS = {CHAT: b"data: [DONE]", COMPLETIONS: b"data: [DONE]", GENERATE: b"data: [DONE]", MESSAGES: b"message_stop"}
# One process of its own: connects, streams without end, says so, and waits to be killed.
_DOOMED = """
import socket, sys
port, request = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
link = socket.create_connection(("127.0.0.1", port))
link.sendall(request)
link.recv(100)
print("begun", flush=True)
while link.recv(4096): pass
"""


@dataclass
class Tally:
    """What the clients saw. ``broken``: replies to clients that behaved which ended neither well nor by their wish."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    killed: int = 0

    def rows(self) -> list[dict[str, object]]:
        """One row for each kind of client."""
        kinds = dict.fromkeys(kind for kind, _ in self.answers)
        return [
            {"client": kind, "answers": ", ".join(f"{status or 'none'} x {n}" for status, n in self._of(kind))}
            for kind in kinds
        ]

    def _of(self, kind: str) -> list[tuple[int, int]]:
        return sorted((status, count) for (found, status), count in self.answers.items() if found == kind)


@dataclass
class Crowd:
    """``count`` clients of one server until ``end``; what each does next is drawn."""

    port: int
    abuses: list[Abuse]
    until: asyncio.Event
    tally: Tally

    async def run(self, count: int, seed: int) -> None:
        """All of them, side by side."""
        await asyncio.gather(*(self._client(random.Random(f"{seed}/{number}")) for number in range(count)))

    async def _client(self, draw: random.Random) -> None:
        kinds = {
            self._reader: 60,
            self._leaver_before: 8,
            self._leaver_midway: 10,
            self._waiter_that_leaves: 5,
            self._slow_reader: 5,
            self._abuser: 12,
        }
        options = httpx.Limits(max_connections=2, max_keepalive_connections=1)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"authorization": f"Bearer {API_KEY}"},
            timeout=120,
            limits=options,
            verify=False,
            trust_env=False,
        ) as client:
            await asyncio.sleep(draw.random())
            while not self.until.is_set():
                (do,) = draw.choices(list(kinds), list(kinds.values()))
                status = await do(client, draw)
                if status == 429:
                    await self._rest(0.5 + draw.random())

    async def _reader(self, client: httpx.AsyncClient, draw: random.Random) -> int:
        """Reads to the end; anything but an end is a fault."""
        path, body = _streamed(draw)
        status, tail = 0, b""
        try:
            async with client.stream("POST", path, json=body) as response:
                status = response.status_code
                async for data in response.aiter_bytes():
                    tail = tail[-100:] + data
        except httpx.HTTPError as error:
            self.tally.broken[f"reader: {type(error).__name__}: {error}"] += 1
        else:
            if status == 200 and ENDS[path] not in tail:
                self.tally.broken[f"reader of {path}: ends with {tail[-80:]!r}"] += 1
        return self._note("reads to the end", status, (200,))

    async def _leaver_before(self, client: httpx.AsyncClient, draw: random.Random) -> int:  # noqa: ARG002
        """Cuts the connection before the first byte of the answer."""
        try:
            async with connection(self.port) as (_, writer):
                writer.write(_endless(draw))
                await writer.drain()
                await asyncio.sleep(draw.choice((0.0, 0.01, 0.1)))
        except OSError:
            pass
        return self._note("leaves before the first byte", 0, (0,))

    async def _leaver_midway(self, client: httpx.AsyncClient, draw: random.Random) -> int:  # noqa: ARG002
        """Cuts the connection after a few events."""
        status = 0
        try:
            async with connection(self.port) as (reader, writer):
                writer.write(_endless(draw))
                status = await status_of(reader)
                for _ in range(draw.randrange(1, 12)):
                    if not await reader.read(2000):
                        break
        except OSError:
            pass
        return self._note("leaves midway", status, (200,))

    async def _waiter_that_leaves(self, client: httpx.AsyncClient, draw: random.Random) -> int:
        """Wants the whole reply at once and gives up waiting for it."""
        body = {"prompt": [draw.randrange(256)], "max_tokens": None, "ignore_eos": True}
        try:
            response = await client.post(COMPLETIONS, json=body, timeout=draw.uniform(0.1, 2))
        except httpx.TimeoutException:
            return self._note("gives up waiting", 0, (0,))
        except httpx.HTTPError as error:
            self.tally.broken[f"waiter: {type(error).__name__}: {error}"] += 1
            return 0
        return self._note("gives up waiting", response.status_code, (200,))

    async def _slow_reader(self, client: httpx.AsyncClient, draw: random.Random) -> int:  # noqa: ARG002
        """Takes a few bytes at a time of a long reply through a small window, and leaves in the end."""
        status = 0
        try:
            async with connection(self.port, receive_bytes=2048) as (reader, writer):
                writer.write(_endless(draw, max_tokens=400))
                status = await status_of(reader)
                for _ in range(draw.randrange(10, 40)):
                    if self.until.is_set() or not await reader.read(64):
                        break
                    await asyncio.sleep(0.1)
        except OSError:
            pass
        return self._note("reads slowly", status, (200,))

    async def every_abuse(self, seed: int) -> None:
        """Each kind once, all together."""
        draw = random.Random(seed)
        await asyncio.gather(*(self._send(one, draw) for one in self.abuses))

    async def _abuser(self, client: httpx.AsyncClient, draw: random.Random) -> int:  # noqa: ARG002
        (one,) = draw.choices(self.abuses, [each.share for each in self.abuses])
        return await self._send(one, draw)

    async def _send(self, one: Abuse, draw: random.Random) -> int:
        patience_s = 1.0 if one.statuses == (0,) else 90.0
        return self._note(one.name, await abuse(self.port, one.request(draw), patience_s=patience_s), one.statuses)

    async def kill_clients(self, every_s: float) -> None:
        """Start a client process, and kill it with SIGKILL as soon as its stream has begun; again and again."""
        while not self.until.is_set():
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-S", "-E", "-c", _DOOMED, str(self.port), _endless(random.Random(0)).hex()),
                stdout=subprocess.PIPE,
            )
            assert process.stdout is not None
            await process.stdout.readline()
            process.kill()
            await process.wait()
            self.tally.killed += 1
            await self._rest(every_s)

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.until.wait()
        except TimeoutError:
            pass

    def _note(self, kind: str, status: int, expected: tuple[int, ...]) -> int:
        self.tally.answers[kind, status] += 1
        if status not in (*expected, 429):
            self.tally.unexpected[f"{kind}: {status}"] += 1
        return status


def _streamed(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A request of one of four dialects that streams."""
    words = " ".join(draw.choice(("page", "tree", "step", "draft", "token")) for _ in range(draw.randrange(2, 60)))
    count = draw.randrange(4, 48)
    messages = [{"role": "user", "content": words}]
    return draw.choice(
        (
            (CHAT, {"messages": messages, "max_tokens": count, "stream": True}),
            (MESSAGES, {"model": "load-model", "messages": messages, "max_tokens": count, "stream": True}),
            (COMPLETIONS, {"prompt": words, "max_tokens": count, "stream": True, "logprobs": 2}),
            (GENERATE, {"text": words, "sampling_params": {"max_new_tokens": count}, "stream": True}),
        )
    )


def _endless(draw: random.Random, *, max_tokens: int | None = None) -> bytes:
    """A streaming request for as much as fits."""
    prompt = [draw.randrange(256) for _ in range(draw.randrange(1, 200))]
    return json_request(
        COMPLETIONS, {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "logprobs": 5}
    )

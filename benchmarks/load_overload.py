"""More requests than a server can answer: what is admitted stays quick, the rest is told to come later; and a drain."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from load_server import ServerProcess
from load_wire import Timed, json_request, timed_stream

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Offer:
    """Replies of ``tokens`` tokens each, asked for over ``seconds``."""

    tokens: int
    seconds: float

    def request(self, draw: random.Random) -> bytes:
        prompt = [draw.randrange(256) for _ in range(16)]
        body = {"prompt": prompt, "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        return json_request(COMPLETIONS, body)


@dataclass(frozen=True)
class Outcome:
    """What came of one offered load."""

    offered_per_s: float
    seconds: float
    replies: Sequence[Timed]

    @property
    def done(self) -> list[Timed]:
        return [reply for reply in self.replies if reply.status == 200 and reply.is_finished]

    @property
    def share_429(self) -> float:
        return sum(reply.status == 429 for reply in self.replies) / len(self.replies)

    @property
    def num_other(self) -> int:
        """Answers that are neither complete nor a 429."""
        return len(self.replies) - len(self.done) - sum(reply.status == 429 for reply in self.replies)

    def first_token_s(self, share: float) -> float:
        return quantile([reply.first_token_s or 0.0 for reply in self.done], share)

    def row(self, name: str) -> dict[str, object]:
        total = [reply.total_s or 0.0 for reply in self.done]
        return {
            "offered": name,
            "requests/s": self.offered_per_s,
            "completed/s": len(self.done) / self.seconds,
            "first token p50 s": self.first_token_s(0.5),
            "first token p95 s": self.first_token_s(0.95),
            "whole p50 s": quantile(total, 0.5),
            "whole p95 s": quantile(total, 0.95),
            "429 share": self.share_429,
            "other answers": self.num_other,
        }


def quantile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of all do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


async def capacity_per_s(port: int, offer: Offer, clients: int) -> float:
    """Replies a second that ``clients`` get who each ask again as soon as they are answered."""
    ends: list[float] = []
    begin_s = time.monotonic()

    async def client(number: int) -> None:
        draw = random.Random(f"capacity/{number}")
        while time.monotonic() < begin_s + offer.seconds:
            await timed_stream(port, offer.request(draw))
            ends.append(time.monotonic() - begin_s)

    await asyncio.gather(*(client(number) for number in range(clients)))
    within = [end for end in ends if end <= offer.seconds]
    return len(within) / offer.seconds


async def overload(port: int, offer: Offer, per_s: float, seed: int) -> Outcome:
    """Requests at drawn times, ``per_s`` on average, whatever becomes of those before; nobody asks again."""
    draw = random.Random(seed)
    begin_s = time.monotonic()
    tasks: list[asyncio.Task[Timed]] = []
    at_s = 0.0
    while at_s < offer.seconds:
        await asyncio.sleep(max(0.0, begin_s + at_s - time.monotonic()))
        tasks.append(asyncio.create_task(timed_stream(port, offer.request(draw))))
        at_s += draw.expovariate(per_s)
    replies = await asyncio.gather(*tasks)
    return Outcome(per_s, time.monotonic() - begin_s, replies)


@dataclass(frozen=True)
class Drained:
    """A stop under load. ``unfinished``: replies in flight that came to neither an end nor a refusal."""

    seconds: float
    exit_code: int
    in_flight: int
    unfinished: int


async def drain(server: ServerProcess, clients: int, seed: int) -> Drained:
    """SIGTERM while ``clients`` stream; half of the replies are longer than the drain, and more clients knock."""
    draw = random.Random(seed)
    long, short = Offer(1900, 0), Offer(40, 0)
    streams = [
        asyncio.create_task(timed_stream(server.port, (long, short)[number % 2].request(draw)))
        for number in range(clients)
    ]
    await asyncio.sleep(1.0)
    begin_s = time.monotonic()
    server.terminate()
    late = [asyncio.create_task(timed_stream(server.port, short.request(draw))) for _ in range(20)]
    exit_code = await asyncio.to_thread(server.process.wait, 60)
    seconds = time.monotonic() - begin_s
    replies = await asyncio.gather(*streams, *late)
    answered = [reply for reply in replies if reply.status == 200]
    return Drained(seconds, exit_code, len(answered), sum(not reply.is_finished for reply in answered))


def median(values: Sequence[float]) -> float:
    """Over seeds."""
    return statistics.median(values)

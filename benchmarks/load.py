"""A server under load and abuse: streaming clients that leave, dawdle and lie, while witnesses compare answers.

One run: the right answers are recorded on the idle server; a warm-up of the same load brings the process to its
working size; then memory and pages are noted, the load goes on for its time, and when all is quiet again they are
compared. Then SIGTERM under load, and a second server with small limits is offered 1, 4 and 16 times what it can do.
Client and server share the machine, so times and rates are those of both.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import httpx
from load_abuse import Abuse, abuses
from load_clients import Crowd, Tally
from load_overload import Drained, Offer, Outcome, capacity_per_s, drain, median, overload, quantile
from load_server import Checkpoint, Limits, Metrics, ServerProcess, write_checkpoint
from load_witness import Witnesses, cases

BODY_LIMIT_BYTES = 32 * 2**20
OFFERS = (1, 4, 16)
OFFER = Offer(tokens=48, seconds=12.0)
CROWDED = Limits(max_running=16, max_concurrent=16, max_queued=16)


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    clients: int = 500
    warm_up_s: float = 30.0
    seconds: float = 60.0
    witnesses: int = 32
    draining: int = 100
    kill_every_s: float = 2.0
    offer: Offer = OFFER
    crowded: Limits = CROWDED
    drain_s: float = 5.0


QUICK = Size(
    clients=24, warm_up_s=2.0, seconds=3.0, witnesses=2, draining=8, kill_every_s=1.0, offer=Offer(8, 0.7), drain_s=1.0
)


@dataclass(frozen=True)
class Loaded:
    """One load: what its clients and witnesses saw, and the server before and after."""

    tally: Tally
    witnesses: Witnesses
    probe_s: list[float]
    before: Metrics
    after: Metrics
    rss_growth: float
    log: list[str]

    @property
    def leaked_pages(self) -> float:
        return self.before.pages_at_hand - self.after.pages_at_hand

    @property
    def wrong(self) -> Counter[str]:
        return self.witnesses.wrong


async def crowd(
    server: ServerProcess, witnesses: Witnesses, hostile: list[Abuse], size: Size, *, seconds: float, seed: int
) -> tuple[Tally, list[float]]:
    """Clients, witnesses and a prober for ``seconds``; ends when the last one has its answer."""
    until, tally = asyncio.Event(), Tally()
    probe_s: list[float] = []
    clients = Crowd(server.port, hostile, until, tally)
    watching = [witnesses.watch(random.Random(f"{seed}/witness/{n}"), until) for n in range(size.witnesses)]
    asyncio.get_running_loop().call_later(seconds, until.set)
    await asyncio.gather(
        clients.run(size.clients, seed),
        clients.every_abuse(seed),
        clients.kill_clients(size.kill_every_s),
        _probe(server.url, probe_s, until),
        *watching,
    )
    return tally, probe_s


async def _probe(url: str, found_s: list[float], until: asyncio.Event) -> None:
    """How long ``/health`` takes to answer: what stalls the server's loop shows here."""
    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False, trust_env=False) as client:
        while not until.is_set():
            begin_s = time.monotonic()
            (await client.get("/health")).raise_for_status()
            found_s.append(time.monotonic() - begin_s)
            await asyncio.sleep(0.05)


async def load(server: ServerProcess, size: Size, seed: int) -> Loaded:
    """Record, warm up, load, wait for quiet."""
    witnesses = Witnesses(server.url, cases(random.Random(seed)))
    await witnesses.record()
    before = server.quiet()
    hostile = abuses(BODY_LIMIT_BYTES)
    await crowd(server, witnesses, hostile, size, seconds=size.warm_up_s, seed=seed + 1000)
    server.quiet()
    rss = server.rss_bytes
    tally, probe_s = await crowd(server, witnesses, hostile, size, seconds=size.seconds, seed=seed)
    after = server.quiet()
    return Loaded(tally, witnesses, probe_s, before, after, server.rss_bytes / rss, server.log_lines())


async def overloads(server: ServerProcess, size: Size, seed: int) -> dict[int, Outcome]:
    """What comes of once, four times and sixteen times the server's capacity."""
    await capacity_per_s(server.port, Offer(size.offer.tokens, size.offer.seconds / 4), size.crowded.max_running)
    capacity = await capacity_per_s(server.port, size.offer, size.crowded.max_running)
    return {times: await overload(server.port, size.offer, times * max(capacity, 1.0), seed) for times in OFFERS}


@dataclass(frozen=True)
class Run:
    """Everything of one seed."""

    loaded: Loaded
    drained: Drained
    outcomes: Mapping[int, Outcome]
    errors_5xx: float

    def print(self) -> None:
        """What people want to see besides the figures."""
        loaded, drained = self.loaded, self.drained
        tally = loaded.tally
        for name, found in (("unexpected", tally.unexpected), ("broken", tally.broken), ("wrong", loaded.wrong)):
            for what, count in found.items():
                print(f"{name}: {what} x {count}", file=sys.stderr)
        for line in loaded.log[-40:]:
            print(f"server log: {line}", file=sys.stderr)
        print(f"drain: {drained.in_flight} replies in flight, {drained.unfinished} unfinished, "
              f"exit {drained.exit_code}")  # fmt: skip
        print(f"statuses: {dict(sorted(loaded.after.statuses.items()))}, {loaded.tally.killed} client processes killed")
        print(f"witnesses: {loaded.witnesses.asked} answers compared, {loaded.witnesses.refused} refused")
        print(f"/health: p50 {quantile(loaded.probe_s, 0.5):.4f} s, p99 {quantile(loaded.probe_s, 0.99):.4f} s, "
              f"max {max(loaded.probe_s):.4f} s")  # fmt: skip


def run(checkpoint: Checkpoint, size: Size, seed: int, scratch: Path) -> Run:
    """Both servers, one after the other."""
    with ServerProcess(checkpoint, Limits(drain_s=size.drain_s), scratch / "load.log") as server:
        loaded = asyncio.run(load(server, size, seed))
        drained = asyncio.run(drain(server, size.draining, seed))
    with ServerProcess(checkpoint, size.crowded, scratch / "overload.log") as server:
        outcomes = asyncio.run(overloads(server, size, seed))
        errors = server.quiet().errors_5xx
    return Run(loaded, drained, outcomes, loaded.after.errors_5xx + errors)


def figures_of(runs: list[Run], size: Size) -> dict[str, float]:
    """Counts are sums over the seeds, the rest medians."""
    loads = [run.loaded for run in runs]
    return {
        "clients": size.clients,
        "seconds": size.seconds,
        "errors_5xx": sum(run.errors_5xx for run in runs),
        "leaked_pages": sum(loaded.leaked_pages for loaded in loads),
        "rss_growth_ratio": median([loaded.rss_growth for loaded in loads]),
        "wrong_answers": sum(loaded.wrong.total() for loaded in loads),
        "compared_answers": sum(loaded.witnesses.asked for loaded in loads),
        "unexpected_answers": sum(loaded.tally.unexpected.total() + loaded.tally.broken.total() for loaded in loads),
        "health_p99_s": median([quantile(loaded.probe_s, 0.99) for loaded in loads]),
        "drain_seconds": max(run.drained.seconds for run in runs),
        "drain_unfinished": sum(run.drained.unfinished + (run.drained.exit_code != 0) for run in runs),
        "shed_429_share_16x": median([run.outcomes[16].share_429 for run in runs]),
        "p95_ttft_16x_over_1x": median(
            [run.outcomes[16].first_token_s(0.95) / run.outcomes[1].first_token_s(0.95) for run in runs]
        ),
    }


def main() -> None:
    arguments = common.options(
        "A server under load and abuse: pages, memory, answers, statuses, drain.", seeds=[0]
    ).parse_args()
    size = QUICK if arguments.quick else Size()
    with tempfile.TemporaryDirectory(prefix="yunque-load-") as scratch:
        checkpoint = write_checkpoint(Path(scratch))
        runs = [run(checkpoint, size, seed, Path(scratch)) for seed in arguments.seeds]
    rows: list[dict[str, Any]] = []
    for each in runs:
        each.print()
        for row in each.loaded.tally.rows():
            print(f"  {row['client']:<34} {row['answers']}")
        rows += [outcome.row(f"{times}x") for times, outcome in each.outcomes.items()]
    common.report("load", rows, figures_of(runs, size), to=arguments.json)


if __name__ == "__main__":
    main()

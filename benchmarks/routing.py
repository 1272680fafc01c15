"""Cached share of prompt tokens behind the router, against the ideal and beside round robin.

    python benchmarks/routing.py

Simulated engines, the router's own placement. Sessions of several turns arrive at four engines; every turn's prompt is
the conversation so far, which an engine finds in its cache page by page unless it was evicted (least recently used
first) or the turn before went elsewhere. Requests overlap: a turn takes a time that grows with the tokens that it
computes and makes, and agents wait between turns. The ideal is one engine with a cache without end that has every
session's turns in order. ``*_cached_share_of_ideal`` are shares of prompt tokens found in a cache, over that of the
ideal, medians over the seeds.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import common

from yunque.serve.router.placement import Ask, Placement, PlacementSettings

PAGE = 16


@dataclass(frozen=True)
class Load:
    """Sessions and engines of a simulation. Lengths are means of tokens, times of seconds."""

    engines: int = 4
    sessions: int = 600
    sessions_per_s: float = 1.5
    turns: int = 10
    system_tokens: int = 400
    user_tokens: int = 250
    reply_tokens: int = 300
    pause_s: float = 5.0
    prefill_tokens_per_s: float = 20_000.0
    decode_tokens_per_s: float = 60.0
    cache_tokens: int = 400_000


@dataclass(frozen=True)
class Turn:
    """One request: its session, whole prompt and reply; ``tokens`` = prompt + reply in the order they stand."""

    session: str
    prompt: int
    reply: int
    pause_s: float


@dataclass(frozen=True)
class Outcome:
    """What a simulation counted."""

    prompt_tokens: int
    cached_tokens: int
    requests_by_engine: Mapping[str, int]
    most_running: int

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


class Cache:
    """Pages of conversations in an engine, least recently used sessions losing their last pages first."""

    def __init__(self, tokens: int) -> None:
        self._pages = tokens // PAGE
        self._used = 0
        self._held: OrderedDict[str, int] = OrderedDict()

    def known(self, session: str, prompt: int) -> int:
        """Tokens of the prompt in whole pages here; the last token is always computed."""
        return min(self._held.get(session, 0), (prompt - 1) // PAGE) * PAGE

    def store(self, session: str, tokens: int) -> None:
        pages = max(tokens // PAGE, self._held.get(session, 0))
        self._used += pages - self._held.get(session, 0)
        self._held[session] = pages
        self._held.move_to_end(session)
        while self._used > self._pages and self._held:
            oldest = next(iter(self._held))
            lost = min(self._used - self._pages, self._held[oldest])
            self._held[oldest] -= lost
            self._used -= lost
            if not self._held[oldest]:
                del self._held[oldest]


Route = Callable[[Turn, Mapping[str, int], float], str]


def conversations(load: Load, seed: int) -> list[tuple[float, list[Turn]]]:
    """Arrival and turns of every session."""
    draw = random.Random(seed)
    made, now_s = [], 0.0
    for number in range(load.sessions):
        now_s += draw.expovariate(load.sessions_per_s)
        tokens, turns = load.system_tokens, []
        for _ in range(max(1, round(draw.expovariate(1 / load.turns)))):
            prompt = tokens + 1 + round(draw.expovariate(1 / load.user_tokens))
            reply = 1 + round(draw.expovariate(1 / load.reply_tokens))
            turns.append(Turn(f"session-{number}", prompt, reply, draw.expovariate(1 / load.pause_s)))
            tokens = prompt + reply
        made.append((now_s, turns))
    return made


def ideal_share(load: Load, seed: int) -> float:
    """Cached share of one engine whose cache has no end."""
    prompt_tokens = cached_tokens = 0
    for _, turns in conversations(load, seed):
        cache = Cache(10**12)
        for turn in turns:
            prompt_tokens += turn.prompt
            cached_tokens += cache.known(turn.session, turn.prompt)
            cache.store(turn.session, turn.prompt + turn.reply)
    return cached_tokens / prompt_tokens


def simulate(load: Load, seed: int, route: Route, done: Callable[[Turn], None] = lambda _: None) -> Outcome:
    """Play all sessions; ``route`` chooses an engine for a turn, ``done`` hears when it has been answered."""
    names = [f"http://engine-{number}" for number in range(load.engines)]
    caches = {name: Cache(load.cache_tokens) for name in names}
    running, served = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    prompt_tokens = cached_tokens = most = 0
    talks = conversations(load, seed)
    # (time, order, kind, session number, turn, engine)
    queue = [(at_s, number, "ask", number, 0, "") for number, (at_s, _) in enumerate(talks)]
    heapq.heapify(queue)
    order = len(queue)
    while queue:
        now_s, _, kind, number, place, engine = heapq.heappop(queue)
        turn = talks[number][1][place]
        if kind == "ask":
            engine = route(turn, running, now_s)
            cached = caches[engine].known(turn.session, turn.prompt)
            prompt_tokens, cached_tokens = prompt_tokens + turn.prompt, cached_tokens + cached
            running[engine] += 1
            served[engine] += 1
            most = max(most, running[engine])
            took_s = (turn.prompt - cached) / load.prefill_tokens_per_s + turn.reply / load.decode_tokens_per_s
            event = (now_s + took_s, order, "end", number, place, engine)
        else:
            caches[engine].store(turn.session, turn.prompt + turn.reply)
            running[engine] -= 1
            done(turn)
            if place + 1 == len(talks[number][1]):
                continue
            event = (now_s + turn.pause_s, order, "ask", number, place + 1, "")
        heapq.heappush(queue, event)
        order += 1
    return Outcome(prompt_tokens, cached_tokens, served, most)


def by_router(load: Load, seed: int) -> Outcome:
    """The router's placement, with its default bounds."""
    placement = Placement(PlacementSettings())
    for number in range(load.engines):
        placement.add(f"http://engine-{number}")

    def route(turn: Turn, running: Mapping[str, int], now_s: float) -> str:
        return placement.place(Ask(turn.session), running, now_s=now_s).engine

    return simulate(load, seed, route, lambda turn: placement.release(Ask(turn.session)))


def by_turns(load: Load, seed: int) -> Outcome:
    """Round robin."""

    def circle() -> Iterator[int]:
        while True:
            yield from range(load.engines)

    numbers = circle()
    return simulate(load, seed, lambda *_: f"http://engine-{next(numbers)}")


def routing_figures(seeds: list[int], load: Load) -> tuple[list[dict], dict[str, float]]:
    """Rows for people and the figures, over ``seeds``."""
    ideal = [ideal_share(load, seed) for seed in seeds]
    rows, figures = [{"routing": "ideal", "cached share": statistics.median(ideal)}], {}
    for name, way in (("router", by_router), ("round_robin", by_turns)):
        outcomes = [way(load, seed) for seed in seeds]
        shares = [outcome.cached_share / best for outcome, best in zip(outcomes, ideal, strict=True)]
        figures[f"{name}_cached_share_of_ideal"] = statistics.median(shares)
        rows.append(
            {
                "routing": name,
                "cached share": statistics.median(outcome.cached_share for outcome in outcomes),
                "of the ideal": statistics.median(shares),
                "busiest engine, of the mean": statistics.median(
                    max(o.requests_by_engine.values()) * load.engines / sum(o.requests_by_engine.values())
                    for o in outcomes
                ),
                "most requests at once": statistics.median(outcome.most_running for outcome in outcomes),
            }
        )
    return rows, figures


def main() -> None:
    arguments = common.options("Cached share of prompt tokens by way of routing.", seeds=range(5)).parse_args()
    load = Load(sessions=150) if arguments.quick else Load()
    rows, figures = routing_figures(arguments.seeds, load)
    common.report("routing", rows, figures, to=arguments.json)


if __name__ == "__main__":
    main()

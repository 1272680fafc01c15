"""Which engine takes a request: sessions keep theirs, loads stay bounded, known prefixes break ties."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from yunque.serve.router.ring import HashRing


@dataclass(frozen=True)
class PlacementSettings:
    """``load_factor`` c and ``free_slots`` set the bound of an engine's load; a session is forgotten after
    ``session_idle_s`` without a request, or as the oldest of more than ``max_sessions``; ``max_blocks`` prefix blocks
    are remembered."""

    load_factor: float = 1.25
    free_slots: int = 8
    session_idle_s: float = 1800.0
    max_sessions: int = 200_000
    max_blocks: int = 500_000

    def __post_init__(self) -> None:
        if not self.load_factor >= 1 or math.isinf(self.load_factor):
            raise ValueError(f"load_factor is {self.load_factor}; it must be a number of at least 1")
        for name in ("free_slots", "max_sessions", "max_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.session_idle_s > 0:
            raise ValueError(f"session_idle_s is {self.session_idle_s}; it must be above 0")


class Why(StrEnum):
    """What decided."""

    STICKY = "sticky"
    """The session's last request went there."""
    HOME = "home"
    """The session is new, and the ring says so."""
    SPILLED = "spilled"
    """The engine of the session is at its bound."""
    MOVED = "moved"
    """The engine of the session may not be used any more."""
    PREFIX = "prefix"
    """No session; the engine knows the longest prefix of the prompt."""
    LEAST_LOADED = "least_loaded"
    """No session, no known prefix."""


@dataclass(frozen=True)
class Ask:
    """What placement knows of a request: its session, and one hash for every prefix of whole blocks of its prompt."""

    session: str | None = None
    blocks: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Placed:
    engine: str
    why: Why


def load_bound(loads: Mapping[str, int], settings: PlacementSettings) -> int:
    """Most requests that an engine may hold, the new one included.

    ceil(c (m + 1) / n) for m requests on n engines (Mirrokni, Thorup, Zadimoghaddam 2016), at least ``free_slots``:
    below that, engines batch requests for almost nothing and moving a session costs its whole prefix. With c >= 1
    some engine is below the bound.
    """
    return max(settings.free_slots, math.ceil(settings.load_factor * (sum(loads.values()) + 1) / len(loads)))


def choose(
    loads: Mapping[str, int],
    sessions: Mapping[str, int],
    known: Mapping[str, int],
    order: Sequence[str],
    last: str | None,
    settings: PlacementSettings,
) -> Placed:
    """Decide for a request with a session.

    ``loads`` has the engines that may be used, ``sessions`` how many live sessions each has, ``known`` how much of
    the prompt each has seen, ``order`` all engines as the ring has them for the session, ``last`` the session's
    engine. A new session goes to the first engine of ``order`` with room for a request and for a session; other
    requests, away from ``last``, to the engine with room that knows most, then to the first of ``order``.
    """
    bound = load_bound(loads, settings)
    free = [engine for engine in order if engine in loads and loads[engine] < bound]
    if last in free:
        return Placed(last, Why.STICKY)
    if last is None:
        settled = {engine: sessions.get(engine, 0) for engine in loads}
        roomy = [engine for engine in free if settled[engine] < load_bound(settled, settings)]
        first = next(engine for engine in order if engine in loads)
        engine = (roomy or free)[0]
        return Placed(engine, Why.HOME if engine == first else Why.SPILLED)
    engine = max(free, key=lambda candidate: known.get(candidate, 0))  # the first of equals, in the ring's order
    return Placed(engine, Why.SPILLED if last in loads else Why.MOVED)


def choose_by_prefix(
    loads: Mapping[str, int], known: Mapping[str, int], order: Sequence[str], settings: PlacementSettings
) -> Placed:
    """Decide for a request without a session: among the engines below their bound the one that knows the longest
    prefix, of equals the least loaded, of equals the first of ``order``."""
    bound = load_bound(loads, settings)
    free = [engine for engine in order if engine in loads and loads[engine] < bound]
    engine = min(free, key=lambda candidate: (-known.get(candidate, 0), loads[candidate]))
    return Placed(engine, Why.PREFIX if known.get(engine, 0) else Why.LEAST_LOADED)


@dataclass
class _Session:
    engine: str
    used_at_s: float
    running: int = 0


class Placement:
    """The decisions above with what they remember: the ring, the engine of every live session, prefixes seen."""

    def __init__(self, settings: PlacementSettings) -> None:
        self.settings = settings
        self._ring = HashRing()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._sessions_of: Counter[str] = Counter()
        self._blocks: OrderedDict[bytes, set[str]] = OrderedDict()

    @property
    def sessions_of(self) -> Mapping[str, int]:
        """Live sessions by engine."""
        return self._sessions_of

    def add(self, engine: str) -> None:
        self._ring.add(engine)

    def remove(self, engine: str) -> None:
        """Forget the engine; its sessions are placed anew."""
        self._ring.remove(engine)
        self.forget_cache(engine)
        for name in [name for name, session in self._sessions.items() if session.engine == engine]:
            del self._sessions[name]
        del self._sessions_of[engine]

    def forget_cache(self, engine: str) -> None:
        """The engine's cache is empty: no prefix is known to be there."""
        for block in [block for block, engines in self._blocks.items() if engine in engines]:
            self._blocks[block].discard(engine)
            if not self._blocks[block]:
                del self._blocks[block]

    def engine_of(self, session: str | None) -> str | None:
        """The engine of a live session."""
        entry = self._sessions.get(session) if session is not None else None
        return entry.engine if entry else None

    def place(self, ask: Ask, loads: Mapping[str, int], *, now_s: float) -> Placed:
        """Choose one of the engines in ``loads`` (requests running by usable engine; not empty) and remember it.

        A session that has requests running keeps its engine when another one of them goes elsewhere, so that a
        crowd under one name does not wander; a lone request takes its session along. Every call wants its
        `release` when the request has left the engine.
        """
        self._expire(now_s)
        known = self._known_by_engine(ask.blocks)
        if ask.session is None:
            order = list(self._ring.walk(ask.blocks[0].hex() if ask.blocks else ""))
            placed = choose_by_prefix(loads, known, order, self.settings)
        else:
            last, order = self.engine_of(ask.session), list(self._ring.walk(ask.session))
            placed = choose(loads, self._sessions_of, known, order, last, self.settings)
            self._remember_session(ask.session, placed.engine, is_last_usable=last in loads, now_s=now_s)
        self._remember_blocks(ask.blocks, placed.engine)
        return placed

    def release(self, ask: Ask) -> None:
        """The request has left its engine."""
        entry = self._sessions.get(ask.session) if ask.session is not None else None
        if entry is not None:
            entry.running = max(0, entry.running - 1)

    def _remember_session(self, name: str, engine: str, *, is_last_usable: bool, now_s: float) -> None:
        entry = self._sessions.get(name)
        if entry is None:
            entry = self._sessions[name] = _Session(engine, now_s)
            self._sessions_of[engine] += 1
        elif entry.engine != engine and not (entry.running and is_last_usable):
            self._sessions_of[entry.engine] -= 1
            self._sessions_of[engine] += 1
            entry.engine = engine
        entry.used_at_s = now_s
        entry.running += 1
        self._sessions.move_to_end(name)
        while len(self._sessions) > self.settings.max_sessions:
            self._sessions_of[self._sessions.popitem(last=False)[1].engine] -= 1

    def _expire(self, now_s: float) -> None:
        while self._sessions:
            name, entry = next(iter(self._sessions.items()))
            if now_s - entry.used_at_s <= self.settings.session_idle_s:
                return
            if entry.running:  # alive: its request is still being answered
                entry.used_at_s = now_s
                self._sessions.move_to_end(name)
                continue
            self._sessions_of[entry.engine] -= 1
            del self._sessions[name]

    def _known_by_engine(self, blocks: Sequence[bytes]) -> dict[str, int]:
        known: dict[str, int] = {}
        for count, block in enumerate(blocks, start=1):
            engines = self._blocks.get(block)
            if not engines:
                break
            for engine in engines:
                if known.get(engine, 0) == count - 1:
                    known[engine] = count
        return known

    def _remember_blocks(self, blocks: Sequence[bytes], engine: str) -> None:
        for block in reversed(blocks):  # the first block is the last to be forgotten
            self._blocks.setdefault(block, set()).add(engine)
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.settings.max_blocks:
            self._blocks.popitem(last=False)

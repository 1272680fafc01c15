"""Token deltas from the engine's thread to those who wait: event loops and plain threads."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from yunque.protocol.generation import Finish, TokenDelta


@dataclass(eq=False)
class Reply:
    """The deltas of one request, as an asynchronous iterator; it ends after the one with a ``finish``.

    ``aclose`` before that aborts the request, even where nothing was read yet.
    """

    request_id: str
    loop: asyncio.AbstractEventLoop
    abort: Callable[[str], None]
    deltas: asyncio.Queue[TokenDelta] = field(default_factory=asyncio.Queue)
    is_over: bool = False

    def __aiter__(self) -> Reply:
        return self

    async def __anext__(self) -> TokenDelta:
        if self.is_over:
            raise StopAsyncIteration
        delta = await self.deltas.get()
        self.is_over = delta.finish is not None
        return delta

    async def aclose(self) -> None:
        """Stop listening; the engine drops the request unless it is over."""
        if not self.is_over:
            self.is_over = True
            self.abort(self.request_id)


class Outbox:
    """What one engine step says, delivered together: an event loop is woken once a step, not once a token."""

    def __init__(self) -> None:
        self._ready: list[tuple[Reply | SimpleQueue[TokenDelta], TokenDelta]] = []

    def put(self, to: Reply | SimpleQueue[TokenDelta], delta: TokenDelta) -> None:
        self._ready.append((to, delta))

    def flush(self) -> list[str]:
        """Deliver everything; returns the requests whose event loop is gone."""
        ready, self._ready = self._ready, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Reply, TokenDelta]]] = defaultdict(list)
        for to, delta in ready:
            if isinstance(to, Reply):
                by_loop[to.loop].append((to, delta))
            else:
                to.put(delta)
        lost = []
        for loop, deliveries in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, deliveries)
            except RuntimeError:  # the loop is closed: nobody can read these any more
                lost += [reply.request_id for reply, _ in deliveries]
        return lost


def _deliver(deliveries: list[tuple[Reply, TokenDelta]]) -> None:
    for reply, delta in deliveries:
        reply.deltas.put_nowait(delta)


def error_delta(reason: str) -> TokenDelta:
    """The end of a reply that the engine could not finish."""
    return TokenDelta(finish=Finish.ERROR, error=reason)

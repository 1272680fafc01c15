"""The replies to one HTTP request (several prompts, several choices): started, merged and closed together."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from yunque.protocol.generation import Finish
from yunque.protocol.http_errors import HttpError, engine_failed
from yunque.serve.conversation import FinishedTurn, TurnStep, TurnSteps, collect

MAX_AHEAD = 64
"""Steps that are read before a slow client takes them."""
NumberedStep = tuple[int, TurnStep]


class Replies:
    """Numbered replies. They are read once: whole (``collect``) or step by step as they come."""

    def __init__(self, steps: Sequence[TurnSteps]) -> None:
        self._steps = steps
        self._readers: list[asyncio.Task[Any]] = []

    @staticmethod
    async def start(starts: Iterable[Callable[[], TurnSteps]]) -> "Replies":
        """Submit all; when one is refused, those before it are withdrawn and its error is raised."""
        started: list[TurnSteps] = []
        try:
            for start in starts:
                started.append(start())
        except BaseException:
            await Replies(started).aclose()
            raise
        return Replies(started)

    async def collect(self) -> list[FinishedTurn]:
        """All replies, whole. Raises when the engine broke; the first to fail ends the others."""
        self._readers = [asyncio.ensure_future(collect(steps)) for steps in self._steps]
        turns: list[FinishedTurn] = []
        try:
            turns += await asyncio.gather(*self._readers)
        finally:
            await self._stop_reading()
        for turn in turns:
            if turn.end.finish is Finish.ERROR:
                raise HttpError(engine_failed(turn.deltas[-1].error))
        return turns

    async def __aiter__(self) -> AsyncGenerator[NumberedStep, None]:
        """The steps of all replies, in the order in which they come."""
        queue: asyncio.Queue[NumberedStep | int] = asyncio.Queue()
        room = asyncio.Semaphore(MAX_AHEAD)

        async def pump(index: int, steps: TurnSteps) -> None:
            try:
                async for step in steps:
                    queue.put_nowait((index, step))
                    await room.acquire()
            finally:
                queue.put_nowait(index)

        self._readers = [asyncio.ensure_future(pump(index, steps)) for index, steps in enumerate(self._steps)]
        num_live = len(self._readers)
        try:
            while num_live:
                item = await queue.get()
                if isinstance(item, int):
                    num_live -= 1
                    await self._readers[item]
                else:
                    room.release()
                    yield item
        finally:
            await self._stop_reading()

    async def aclose(self) -> None:
        """Abort those that still run."""
        await self._stop_reading()
        for steps in self._steps:
            await steps.aclose()

    async def _stop_reading(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)


class ReplyEvents:
    """The bytes of a stream made from replies, which are closed with it."""

    def __init__(self, replies: Replies, events: Callable[[Replies], AsyncIterator[bytes]]) -> None:
        self._replies = replies
        self._events = events(replies)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._events

    async def aclose(self) -> None:
        """Stop writing and abort the replies."""
        close = getattr(self._events, "aclose", None)
        if close is not None:
            await close()
        await self._replies.aclose()

"""A torch-free engine that plays written replies: the public double of ``EngineService`` for tests of servers."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from yunque.protocol.errors import ContextLengthExceeded, EngineUnavailable, Overloaded, RequestError
from yunque.protocol.generation import (
    Constraint,
    EngineInfo,
    EngineStats,
    Finish,
    GenerationRequest,
    Health,
    TokenDelta,
    TopToken,
)

Rule = Callable[[GenerationRequest], Sequence[int]]


@dataclass(frozen=True)
class ScriptSettings:
    """How the scripted engine behaves. ``chunk`` tokens come per step, ``delay_s`` apart; every reply says that it
    ``drafted`` so many and that so many were ``accepted``."""

    chunk: int = 1
    delay_s: float = 0.0
    max_model_len: int = 8192
    max_live: int = 10_000
    page_size: int = 16
    num_pages: int = 100_000
    vocab_size: int = 1000
    retry_after_s: float = 3.0
    model_name: str = "scripted"
    drafted: int = 0
    accepted: int = 0


class ScriptedEngine:
    """Plays ``replies``: a rule (request -> ids), or written replies in order, the last one for ever.

    Log-probability of the i-th token of a reply is ``-(i + 1) / 8``, the model's own ``-(i + 1) / 4``; the prompt's
    i-th ``-i / 16``. The best tokens at a place are the sampled one and then ids from 0 on; the kept set is the sampled
    one. A request holds pages of prompt and reply until its iterator ends or is closed. A resumed reply goes on in its
    script. ``requests`` keeps all that was asked. ``decode`` turns ids into text where stop strings are to be honoured.
    """

    def __init__(
        self,
        replies: Rule | Sequence[Sequence[int]] = ((),),
        settings: ScriptSettings | None = None,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.settings = settings or ScriptSettings()
        self.decode = decode
        self.requests: list[GenerationRequest] = []
        self.live: dict[str, _Reply] = {}
        self.aborted: list[str] = []
        self.version = 1
        self.calls: list[tuple[object, ...]] = []
        """Calls of the policy's life: pause, resume, load_weights, drain."""
        self.prepared: list[Constraint] = []
        self.fails_after: int | None = None
        """Break down after that many tokens of each reply."""
        self.hands_back_after: int | None = None
        """Give up every reply after that many tokens, as an engine does that drains."""
        self._replies = replies
        self._is_paused = False
        self._is_draining = False
        self._running = asyncio.Event()
        self._running.set()
        self._generated = 0
        self._prompted = 0

    @staticmethod
    def echo(request: GenerationRequest) -> Sequence[int]:
        """A rule: the reply is the prompt again."""
        return request.tokens

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            self.settings.model_name, self.settings.max_model_len, self.settings.vocab_size, self.version, 1_700_000_000
        )

    @property
    def pages_used(self) -> int:
        return sum(reply.pages for reply in self.live.values())

    async def prepare(self, constraint: Constraint) -> None:
        self.prepared.append(constraint)

    def submit(self, request: GenerationRequest) -> "_Reply":
        if self._is_draining:
            raise EngineUnavailable("the engine is draining")
        if not request.tokens:
            raise RequestError("the prompt has no tokens", param="prompt")
        if max(request.tokens) >= self.settings.vocab_size or min(request.tokens) < 0:
            raise RequestError(f"a token id is outside the vocabulary of {self.settings.vocab_size}", param="prompt")
        if len(request.tokens) >= self.settings.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.tokens)} tokens and the context {self.settings.max_model_len}"
            )
        if request.id in self.live:
            raise RequestError(f"request id {request.id!r} is live", param="rid")
        reply = _Reply(self, request, self._next(request))
        if len(self.live) >= self.settings.max_live or self.pages_used + reply.pages > self.settings.num_pages:
            raise Overloaded("the queue is full", retry_after_s=self.settings.retry_after_s)
        self.requests.append(request)
        self.live[request.id] = reply
        self._prompted += len(request.tokens)
        return reply

    def health(self) -> Health:
        if self._is_draining or self._is_paused:
            return Health(False, "draining" if self._is_draining else "paused")
        return Health(True)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.live),
            pages_total=self.settings.num_pages,
            pages_free=self.settings.num_pages - self.pages_used,
            prompt_tokens=self._prompted,
            generated_tokens=self._generated,
        )

    async def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        self.calls.append(("pause", mode))
        self._is_paused = True
        self._running.clear()
        if mode == "abort":
            self._hand_back()

    async def resume(self) -> None:
        self.calls.append(("resume",))
        self._is_paused = False
        self._running.set()

    async def load_weights(self, version: int, source: str, *, keep_cache: bool = False) -> None:
        self.calls.append(("load_weights", version, source, keep_cache))
        self.version = version

    async def weight_hashes(self) -> Mapping[str, str]:
        return {"model.embed_tokens.weight": "ab" * 32}

    async def drain(self, timeout_s: float) -> None:
        self.calls.append(("drain", timeout_s))
        self._is_draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.live and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.005)
        self._hand_back()

    def _hand_back(self) -> None:
        for reply in self.live.values():
            reply.is_handed_back = True
        self._running.set()

    def _next(self, request: GenerationRequest) -> Sequence[int]:
        if callable(self._replies):
            return self._replies(request)
        return self._replies[min(len(self.requests), len(self._replies) - 1)]


class _Reply:
    """The iterator of one request."""

    def __init__(self, engine: ScriptedEngine, request: GenerationRequest, script: Sequence[int]) -> None:
        self._engine = engine
        self._request = request
        self._script = script
        self._start = request.num_prompt
        self._made: list[int] = list(request.tokens[self._start :])
        self._num_resumed = len(self._made)
        self.is_handed_back = False

    def __aiter__(self) -> "_Reply":
        return self

    @property
    def pages(self) -> int:
        size = self._engine.settings.page_size
        return -(-(self._start + len(self._made)) // size)

    async def __anext__(self) -> TokenDelta:
        engine = self._engine
        if engine.live.get(self._request.id) is not self:
            raise StopAsyncIteration
        await asyncio.sleep(engine.settings.delay_s)
        if not self.is_handed_back:
            await engine._running.wait()
        delta = self._step()
        if delta.finish is not None:
            self._release()
        return delta

    async def aclose(self) -> None:
        if self._release():
            self._engine.aborted.append(self._request.id)

    def _release(self) -> bool:
        if self._engine.live.get(self._request.id) is not self:
            return False
        del self._engine.live[self._request.id]
        return True

    def _step(self) -> TokenDelta:
        engine, sampling, begin = self._engine, self._request.sampling, len(self._made)
        limit = engine.hands_back_after
        if self.is_handed_back or (limit is not None and begin >= limit):
            return self._delta(begin, Finish.PARTIAL)
        room = engine.settings.max_model_len - self._start
        limit = room if sampling.max_new_tokens is None else min(room, sampling.max_new_tokens)
        if self._made and begin == self._num_resumed and self._made[-1] in sampling.stop_ids:
            return replace(self._delta(begin, Finish.STOP), stopped_by=self._made[-1])
        if begin >= limit:
            return self._delta(begin, Finish.LENGTH)
        for token in self._script[begin : begin + engine.settings.chunk]:
            if engine.fails_after is not None and len(self._made) >= engine.fails_after:
                return replace(self._delta(begin, Finish.ERROR), error="the script says so")
            self._made.append(token)
            engine._generated += 1
            if token in sampling.stop_ids and len(self._made) > sampling.min_new_tokens:
                return replace(self._delta(begin, Finish.STOP), stopped_by=token)
            stop = self._stop_string()
            if stop is not None:
                return replace(self._delta(begin, Finish.STOP), stopped_by=stop)
            if len(self._made) >= limit:
                return self._delta(begin, Finish.LENGTH)
        is_over = len(self._made) >= len(self._script)
        return self._delta(begin, Finish.STOP if is_over else None)

    def _stop_string(self) -> str | None:
        if self._engine.decode is None or not self._request.sampling.stop:
            return None
        text = self._engine.decode(self._made)
        return next((stop for stop in self._request.sampling.stop if stop in text), None)

    def _delta(self, begin: int, finish: Finish | None) -> TokenDelta:
        places = range(begin, len(self._made))
        tokens = tuple(self._made[begin:])
        num_top = self._request.sampling.num_top
        prompt = tuple(-place / 16 for place in range(1, self._start))
        is_first = begin == self._num_resumed
        return TokenDelta(
            tokens=tokens,
            logprobs=tuple(-(place + 1) / 8 for place in places),
            model_logprobs=tuple(-(place + 1) / 4 for place in places),
            versions=(self._engine.version,) * len(tokens),
            top=tuple(self._top(token, place, num_top) for token, place in zip(tokens, places, strict=True))
            if num_top
            else (),
            kept=tuple((token,) for token in tokens) if self._request.sampling.record_kept else (),
            finish=finish,
            drafted=self._engine.settings.drafted if finish else 0,
            accepted=self._engine.settings.accepted if finish else 0,
            cached_tokens=len(self._request.tokens) // 2 if is_first else None,
            prompt_logprobs=prompt if is_first and self._request.prompt_logprobs else None,
        )

    @staticmethod
    def _top(token: int, place: int, count: int) -> tuple[TopToken, ...]:
        others = [other for other in range(count) if other != token]
        return (TopToken(token, -(place + 1) / 4), *(TopToken(other, -9.0) for other in others))[:count]

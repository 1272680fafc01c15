"""The engine as its users see it: one thread that steps, and calls from any thread or event loop."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, TypeVar

from yunque.core.logging import get_logger
from yunque.engine.core import EngineCore
from yunque.engine.loading import Loaded, load_parts
from yunque.engine.mailbox import Outbox, Reply, error_delta
from yunque.engine.settings import EngineSettings
from yunque.engine.weights import PartlyReplaced, hashes, replace_weights
from yunque.model.transformer import Transformer
from yunque.protocol.errors import EngineUnavailable, Overloaded, RequestError
from yunque.protocol.generation import (
    Completion,
    Constraint,
    EngineInfo,
    EngineStats,
    Finish,
    GenerationRequest,
    Health,
    SamplingParams,
    TokenDelta,
)
from yunque.text import Tokenizer

_log = get_logger(__name__)
T = TypeVar("T")


class Engine:
    """Continuous batching over one model. Implements ``protocol.generation.EngineService``.

    >>> engine = Engine.load("runs/quickstart/model")                       # doctest: +SKIP
    >>> reply = engine.generate("import os", SamplingParams(max_new_tokens=16))  # doctest: +SKIP
    >>> print(engine.decode(reply.tokens))                                  # doctest: +SKIP

    In an event loop, ``await engine.generate_async(...)`` or ``async for delta in engine.submit(request)``. Requests
    of all threads share one batch. Use it as a context manager, or ``close`` it.
    """

    def __init__(
        self,
        model: Transformer,
        settings: EngineSettings | None = None,
        *,
        num_pages: int,
        tokenizer: Tokenizer | None = None,
        model_name: str = "yunque",
    ) -> None:
        self._core = EngineCore(model, settings or EngineSettings(), num_pages=num_pages, tokenizer=tokenizer)
        self._model_name = model_name
        self._created_unix_s = int(time.time())
        self._outbox = Outbox()
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._live: dict[str, Reply | SimpleQueue[TokenDelta]] = {}
        self._is_paused = self._is_draining = self._is_closing = False
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._run, name="yunque-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        path: Path | str,
        settings: EngineSettings | None = None,
        *,
        dtype: str | None = None,
        device: str = "auto",
        cache_bytes: int | None = None,
        batch_invariant: bool = False,
    ) -> Engine:
        """An engine over a checkpoint folder, a snapshot or a run's snapshots.

        ``dtype`` is by default the stored one. ``cache_bytes`` is what the pages may take; by default enough for
        ``max_running`` requests of full length, within half of the free memory. Raises ``CheckpointError`` or
        ``ConfigError``, the latter too when the memory does not hold one request of full length.
        """
        settings = settings or EngineSettings()
        parts: Loaded = load_parts(
            path, settings, dtype=dtype, device=device, cache_bytes=cache_bytes, batch_invariant=batch_invariant
        )
        _log.info("%s", parts.summary)
        return cls(
            parts.model,
            parts.settings,
            num_pages=parts.num_pages,
            tokenizer=parts.tokenizer,
            model_name=parts.model_name,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._core.tokenizer

    @property
    def info(self) -> EngineInfo:
        core = self._core
        return EngineInfo(
            self._model_name,
            core.intake.max_model_len,
            core.model.config.vocab_size,
            core.version,
            self._created_unix_s,
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens. Raises ``RequestError`` without a tokenizer."""
        return self._text().decode(list(tokens), skip_special=True)

    def generate(self, prompt: str | Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """One reply, waited for. Text is encoded as it stands, and ends at the model's end tokens; ids end where
        ``sampling`` says."""
        request, box = self._request(prompt, sampling), SimpleQueue[TokenDelta]()
        self._start(request, box)
        deltas = [box.get()]
        while deltas[-1].finish is None:
            deltas.append(box.get())
        return _whole(deltas, request)

    async def generate_async(self, prompt: str | Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """As ``generate``; a cancelled call aborts its request."""
        return await self.complete(self._request(prompt, sampling))

    async def complete(self, request: GenerationRequest) -> Completion:
        """The whole reply to ``request``; a cancelled call aborts it."""
        reply = self.submit(request)
        try:
            deltas = [delta async for delta in reply]
        finally:
            await reply.aclose()
        return _whole(deltas, request)

    async def prepare(self, constraint: Constraint) -> None:
        """See ``EngineService.prepare``."""
        await asyncio.to_thread(self._core.intake.compile, constraint)

    def submit(self, request: GenerationRequest) -> Reply:
        """See ``EngineService.submit``; call it inside an event loop."""
        reply = Reply(request.id, asyncio.get_running_loop(), self.abort)
        self._start(request, reply)
        return reply

    def abort(self, request_id: str) -> None:
        """End a request; its last delta says ``ABORTED``. Nothing happens if it is over."""
        self._tell(lambda: self._core.abort(request_id))

    def health(self) -> Health:
        """Whether a token can be made now."""
        if self._broken is not None:
            return Health(False, self._broken)
        if not self._thread.is_alive() or self._is_closing:
            return Health(False, "the engine is closed")
        if self._is_draining:
            return Health(False, "the engine is draining")
        return Health(False, "the engine is paused") if self._is_paused else Health(True)

    def stats(self) -> EngineStats:
        return self._core.stats()

    async def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """See ``EngineService.pause``."""

        def command() -> None:
            self._is_paused = True
            if mode == "abort":
                self._hand_back(Finish.PARTIAL)

        await asyncio.wrap_future(self._call(command))

    async def resume(self) -> None:
        """Go on after ``pause``."""

        def command() -> None:
            self._is_paused = False

        await asyncio.wrap_future(self._call(command))

    async def load_weights(self, version: int, source: str, *, keep_cache: bool = False) -> None:
        """See ``EngineService.load_weights``. Raises ``CheckpointError``: before anything was changed the old weights
        go on; when reading broke off, the engine is unhealthy until weights are loaded whole."""

        def command() -> None:
            core = self._core
            try:
                replace_weights(core.model, source)
            except PartlyReplaced as error:
                self._broken = str(error)
                raise
            self._broken = None
            core.version = version
            if not keep_cache:
                core.drop_cache()

        await asyncio.wrap_future(self._call(command))

    async def weight_hashes(self) -> Mapping[str, str]:
        """SHA-256 of every served tensor's bytes by name, all of one version."""
        return await asyncio.wrap_future(self._call(lambda: hashes(self._core.model)))

    async def drain(self, timeout_s: float) -> None:
        """See ``EngineService.drain``."""
        self._is_draining = True
        end = time.monotonic() + timeout_s
        while self._live and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await asyncio.wrap_future(self._call(lambda: self._hand_back(Finish.PARTIAL)))

    def close(self) -> None:
        """End the thread; requests in flight come back ``ABORTED``."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _text(self) -> Tokenizer:
        if self._core.tokenizer is None:
            raise RequestError("this engine has no tokenizer: give token ids, not text", param="prompt")
        return self._core.tokenizer

    def _request(self, prompt: str | Sequence[int], sampling: SamplingParams | None) -> GenerationRequest:
        sampling = sampling or SamplingParams()
        if isinstance(prompt, str):
            text = self._text()
            ends = sampling.stop_ids | frozenset(text.special.eos_ids)
            sampling = replace(sampling, stop_ids=ends)
            prompt = text.encode(prompt)
        return GenerationRequest(uuid.uuid4().hex, tuple(prompt), sampling)

    def _start(self, request: GenerationRequest, to: Reply | SimpleQueue[TokenDelta]) -> None:
        """Check and queue a request; raises what ``submit`` may."""
        sequence = self._core.intake.prepare(request)
        with self._wake:
            if self._broken is not None or self._is_draining or not self._thread.is_alive() or self._is_closing:
                raise EngineUnavailable(self.health().reason)
            if request.id in self._live:
                raise RequestError(f"request id {request.id!r} is in use", param="id")
            if len(self._live) >= self._core.settings.max_live:
                raise Overloaded(f"{len(self._live)} requests are in progress already", retry_after_s=1.0)
            self._live[request.id] = to
            self._commands.append(lambda: self._core.enqueue(sequence, lambda delta: self._put(request.id, delta)))
            self._wake.notify()

    def _put(self, request_id: str, delta: TokenDelta) -> None:
        to = self._live[request_id]
        self._outbox.put(to, delta)
        if delta.finish is not None:
            del self._live[request_id]

    def _hand_back(self, finish: Finish) -> None:
        for request_id in self._core.live_ids:
            self._core.abort(request_id, finish)

    def _tell(self, command: Callable[[], object]) -> None:
        """Have ``command`` run between two steps."""
        with self._wake:
            self._commands.append(lambda: (command(), None)[1])
            self._wake.notify()

    def _call(self, command: Callable[[], T]) -> Future[T]:
        """Have ``command`` run between two steps; its result or exception comes back."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = command()
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits, nothing is hidden
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._wake:
            if not self._thread.is_alive():
                raise EngineUnavailable("the engine is closed")
            self._commands.append(run)
            self._wake.notify()
        return future

    def _run(self) -> None:
        """The engine's thread."""
        reason = "the engine was closed"
        try:
            while self._turn():
                pass
        except BaseException as error:
            reason = self._broken = f"the engine failed: {type(error).__name__}: {error}"
            raise
        finally:
            with self._wake:
                self._is_closing = True
                for to in self._live.values():
                    self._outbox.put(to, error_delta(reason) if self._broken else TokenDelta(finish=Finish.ABORTED))
                self._live.clear()
                pending, self._commands = self._commands, []
            self._outbox.flush()
            for command in pending:
                command()

    def _turn(self) -> bool:
        """Commands, then a step; waits where there is neither. False when the engine is to close."""
        with self._wake:
            while not (self._commands or self._is_closing or (self._core.has_work and not self._is_paused)):
                self._wake.wait()
            commands, self._commands = self._commands, []
            if self._is_closing:
                self._commands = commands
                return False
        for command in commands:
            command()
        if self._core.has_work and not self._is_paused:
            self._core.step()
        for request_id in self._outbox.flush():
            self._core.abort(request_id)
        return True


def _whole(deltas: Sequence[TokenDelta], request: GenerationRequest) -> Completion:
    if deltas[-1].finish is Finish.ERROR and deltas[-1].error is not None:
        raise EngineUnavailable(deltas[-1].error)
    return Completion.of(deltas, prompt_tokens=request.num_prompt)

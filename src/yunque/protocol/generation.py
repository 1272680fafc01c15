"""What is asked of a policy and what it answers: sampling settings, requests, tokens, completions, engines."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from yunque.core.records import ToolSpec
from yunque.protocol.errors import RequestError


class Finish(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    """A stop id was sampled (it is the last token), a stop string appeared, or the constraint was complete."""
    LENGTH = "length"
    """``max_new_tokens`` were made, or the context is full."""
    ABORTED = "aborted"
    """The client went away or asked for an end."""
    PARTIAL = "partial"
    """The engine handed back what there was (weights were exchanged, or it is draining); the reply may be continued."""
    ERROR = "error"
    """The engine failed; the tokens so far are right."""


@dataclass(frozen=True)
class JsonConstraint:
    """The text after the thinking is JSON of ``schema`` (``{}``: any JSON object)."""

    schema: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RegexConstraint:
    """The text after the thinking matches ``pattern`` (whole)."""

    pattern: str


@dataclass(frozen=True)
class ToolConstraint:
    """Tool calls are of ``tools`` and their arguments of the tools' schemas.

    ``required``: at least one call; ``parallel``: more than one allowed; text before the calls stays free unless a
    call is required, when none is allowed. ``output``: the reply after the thinking is either calls alone or text of
    that form (not with ``required``).
    """

    tools: tuple[ToolSpec, ...]
    required: bool = False
    parallel: bool = True
    output: JsonConstraint | RegexConstraint | None = None


Constraint = JsonConstraint | RegexConstraint | ToolConstraint


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    In order: penalties and ``logit_bias`` on the logits, ``temperature`` (0: the best token, the lowest id on a
    tie), then ``top_k`` (0: off), ``top_p`` and ``min_p`` keep tokens. ``repetition_penalty`` counts prompt and
    reply, ``presence_penalty`` and ``frequency_penalty`` the reply alone. The reply ends after an id of
    ``stop_ids``, before the first of ``stop`` (strings), or after ``max_new_tokens`` (None: as many as fit; 0: the
    prompt is computed and nothing drawn).
    ``min_new_tokens`` bars stop ids until then. ``seed`` fixes the draws, whatever else runs beside it; None takes
    one from the engine. ``num_top`` > 0 records that many best tokens; ``record_kept`` the kept-token sets.
    Raises ``RequestError`` naming the field.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    seed: int | None = None
    num_top: int = 0
    record_kept: bool = False
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens": (self.max_new_tokens is None or self.max_new_tokens >= 0, "at least 0"),
            "min_new_tokens": (self.min_new_tokens >= 0, "at least 0"),
            "temperature": (_within(self.temperature, 0, 100), "between 0 and 100"),
            "top_k": (self.top_k >= 0, "at least 0 (0: off)"),
            "top_p": (_within(self.top_p, 0, 1) and self.top_p > 0, "above 0 and at most 1"),
            "min_p": (_within(self.min_p, 0, 1), "between 0 and 1"),
            "repetition_penalty": (_within(self.repetition_penalty, 0, 100) and self.repetition_penalty > 0, "above 0"),
            "presence_penalty": (_within(self.presence_penalty, -100, 100), "between -100 and 100"),
            "frequency_penalty": (_within(self.frequency_penalty, -100, 100), "between -100 and 100"),
            "logit_bias": (all(_within(v, -1e9, 1e9) for v in self.logit_bias.values()), "finite numbers by token id"),
            "stop": (all(self.stop), "strings that are not empty"),
            "num_top": (0 <= self.num_top <= 100, "between 0 and 100"),
        }
        for name, (is_valid, valid) in checks.items():
            if not is_valid:
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be {valid}", param=name)


def _within(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


@dataclass(frozen=True)
class GenerationRequest:
    """One reply to be made.

    ``id`` is unique among live requests. ``session`` groups requests that share a prefix (routing). A larger
    ``priority`` goes first. ``prompt_logprobs`` asks for the log-probability of every prompt token but the first.
    Requests of different ``cache_salt`` never share cached rows.

    ``reply_start`` resumes a reply that was begun elsewhere: the tokens from that index on are its beginning. They
    count as made (``max_new_tokens``, ``min_new_tokens``, penalties, stops, the constraint), and the deltas have what
    follows them, which is what the uninterrupted reply would have gone on with. None: nothing was made yet.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    session: str | None = None
    priority: int = 0
    prompt_logprobs: bool = False
    cache_salt: str | None = None
    reply_start: int | None = None

    @property
    def num_prompt(self) -> int:
        """How many of ``tokens`` are the prompt."""
        return len(self.tokens) if self.reply_start is None else self.reply_start


@dataclass(frozen=True)
class TopToken:
    """One of the best tokens at a position, by the model's own distribution."""

    token: int
    logprob: float


@dataclass(frozen=True)
class TokenDelta:
    """What one engine step added to a reply: equally long tuples, maybe empty, and at the end ``finish``.

    ``logprobs``: of each token under the distribution it was drawn from (after penalties, temperature and the kept
    set; at temperature 0 the model's own). ``model_logprobs``: under the model's own distribution (temperature 1,
    nothing removed). ``versions``: the policy version that made the token. ``top``/``kept`` where asked for.
    ``stopped_by`` is the stop string or id that ended it. A stop string's tokens are in ``tokens``: whoever shows
    text cuts it at ``stopped_by``. The first delta carries ``cached_tokens`` (prompt tokens that were not computed
    again) and ``prompt_logprobs``; the last one ``drafted`` and ``accepted`` (speculation) of the whole reply.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    model_logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    top: tuple[tuple[TopToken, ...], ...] = ()
    kept: tuple[tuple[int, ...] | None, ...] = ()
    finish: Finish | None = None
    stopped_by: str | int | None = None
    cached_tokens: int | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    drafted: int = 0
    accepted: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Completion:
    """A whole reply. ``tokens``, ``logprobs`` and ``versions`` are equally long; so is every one of ``columns``
    (``model_logprobs``, ``top``, ``kept`` and what else was recorded per token)."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    stopped_by: str | int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: tuple[float, ...] | None = None
    drafted: int = 0
    accepted: int = 0

    @staticmethod
    def of(deltas: Sequence[TokenDelta], *, prompt_tokens: int) -> Completion:
        """Join the deltas of one reply; the last one has its finish. Raises ``ValueError`` without one."""
        last = deltas[-1] if deltas else TokenDelta()
        if last.finish is None:
            raise ValueError(f"the reply is not finished after {len(deltas)} deltas")
        columns: dict[str, tuple[Any, ...]] = {
            name: tuple(value for delta in deltas for value in getattr(delta, name))
            for name in ("model_logprobs", "top", "kept")
        }
        tokens = tuple(token for delta in deltas for token in delta.tokens)
        return Completion(
            tokens=tokens,
            logprobs=tuple(value for delta in deltas for value in delta.logprobs),
            versions=tuple(value for delta in deltas for value in delta.versions),
            finish=last.finish,
            columns={name: values for name, values in columns.items() if len(values) == len(tokens) and values},
            stopped_by=last.stopped_by,
            prompt_tokens=prompt_tokens,
            cached_tokens=max((delta.cached_tokens or 0 for delta in deltas), default=0),
            prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
            drafted=last.drafted,
            accepted=last.accepted,
        )


class PolicyClient(Protocol):
    """A policy that makes and scores tokens: in process, or an engine behind HTTP."""

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, session: str | None = None
    ) -> Completion: ...

    async def score(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        """Log-probability of every token but the first, under ``sampling``'s distribution (its kept sets included)."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class EngineInfo:
    """What a server tells about its engine. ``max_model_len`` counts prompt and reply."""

    model_name: str
    max_model_len: int
    vocab_size: int
    version: int
    created_unix_s: int = 0


@dataclass(frozen=True)
class EngineStats:
    """Numbers of the moment and totals since the start."""

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Health:
    """``ok`` only when a token can be made now; ``reason`` says why not."""

    ok: bool
    reason: str = ""


class EngineService(Protocol):
    """An engine as a server sees it; every method may be called from one event loop, concurrently."""

    @property
    def info(self) -> EngineInfo: ...

    async def prepare(self, constraint: Constraint) -> None:
        """Do away from the event loop what ``submit`` would else do on it: compile the grammar of ``constraint``.

        Raises ``RequestError``."""
        ...

    def submit(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Queue ``request``; raises ``RequestError`` or ``Overloaded`` at once. The iterator ends after the delta
        with a ``finish``; closing it early aborts the request and frees its pages."""
        ...

    def health(self) -> Health: ...

    def stats(self) -> EngineStats: ...

    async def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """Stop between steps. ``keep``: requests in flight wait; ``abort``: they come back ``PARTIAL``."""
        ...

    async def resume(self) -> None: ...

    async def load_weights(self, version: int, source: str, *, keep_cache: bool = False) -> None:
        """Exchange the weights between two steps for those of the folder ``source``; requests in flight go on with
        them. The cache is dropped (its rows are recomputed) unless ``keep_cache``."""
        ...

    async def weight_hashes(self) -> Mapping[str, str]:
        """SHA-256 of every served tensor's bytes, by name."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let those in flight finish, and after ``timeout_s`` hand them back ``PARTIAL``."""
        ...

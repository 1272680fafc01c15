"""Learning rate, batch size and other settings as pure functions of the tokens trained on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import cos, pi
from typing import Literal

from yunque.core.checks import above_zero, at_least
from yunque.core.errors import ConfigError

# --- the curves ---


def warm_up(tokens: float, *, over: float) -> float:
    """Share of the peak while warming up: linear from 0 at 0 tokens to 1 at ``over`` tokens."""
    return 1.0 if tokens >= over else tokens / over


def cosine(tokens: float, *, peak: float, end: float, warmup: float, total: float) -> float:
    """Linear warm-up to ``peak``, then half a cosine that reaches ``end`` at ``total`` tokens and stays
    there."""
    if tokens < warmup:
        return peak * warm_up(tokens, over=warmup)
    return end + (peak - end) * 0.5 * (1 + cos(pi * _progress(tokens, warmup, total)))


def linear(tokens: float, *, peak: float, end: float, warmup: float, total: float) -> float:
    """Linear warm-up to ``peak``, then a straight line that reaches ``end`` at ``total`` tokens and stays
    there."""
    if tokens < warmup:
        return peak * warm_up(tokens, over=warmup)
    return end + (peak - end) * (1 - _progress(tokens, warmup, total))


def constant(tokens: float, *, peak: float, warmup: float) -> float:
    """Linear warm-up to ``peak``, then ``peak``."""
    return peak * warm_up(tokens, over=warmup)


def _progress(tokens: float, warmup: float, total: float) -> float:
    return 1.0 if tokens >= total else (tokens - warmup) / (total - warmup)


# --- what a run file says ---


@dataclass(frozen=True, kw_only=True)
class Decay:
    """From ``lr_peak`` to ``lr_end`` at the stage's last token, by ``kind``, after a warm-up from 0."""

    kind: Literal["cosine", "linear"] = "cosine"
    lr_peak: float
    lr_end: float = 0.0
    warmup_tokens: int = 0

    def __post_init__(self) -> None:
        above_zero(lr_peak=self.lr_peak)
        at_least(0, warmup_tokens=self.warmup_tokens)
        if not 0 <= self.lr_end <= self.lr_peak:
            raise ConfigError(f"lr_end is {self.lr_end}; valid: 0 <= lr_end <= lr_peak ({self.lr_peak})")


@dataclass(frozen=True, kw_only=True)
class Constant:
    """``lr_peak`` throughout, after a warm-up from 0."""

    kind: Literal["constant"] = "constant"
    lr_peak: float
    warmup_tokens: int = 0

    def __post_init__(self) -> None:
        above_zero(lr_peak=self.lr_peak)
        at_least(0, warmup_tokens=self.warmup_tokens)


Schedule = Decay | Constant


def learning_rate(schedule: Schedule, tokens: int, total: int) -> float:
    """The rate of the step that ends at ``tokens`` of ``total``: the first step moves, the last one uses the
    end."""
    if isinstance(schedule, Constant):
        return constant(tokens, peak=schedule.lr_peak, warmup=schedule.warmup_tokens)
    curve = cosine if schedule.kind == "cosine" else linear
    return curve(tokens, peak=schedule.lr_peak, end=schedule.lr_end, warmup=schedule.warmup_tokens, total=total)


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """Tokens per step grow linearly from ``start_tokens`` to the stage's own over the first
    ``over_tokens``."""

    start_tokens: int
    over_tokens: int

    def __post_init__(self) -> None:
        at_least(1, start_tokens=self.start_tokens, over_tokens=self.over_tokens)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many tokens each step takes: whole microbatches of ``microbatch_tokens``, at most
    ``microbatches``."""

    microbatch_tokens: int
    microbatches: int = 1
    ramp: BatchRamp | None = None

    def microbatches_at(self, tokens: int) -> int:
        """Microbatches of the step that starts when ``tokens`` have been trained on; at least one."""
        if self.ramp is None or tokens >= self.ramp.over_tokens:
            return self.microbatches
        full = self.microbatches * self.microbatch_tokens
        wanted = self.ramp.start_tokens + (full - self.ramp.start_tokens) * tokens / self.ramp.over_tokens
        return min(self.microbatches, max(1, round(wanted / self.microbatch_tokens)))

    def step_tokens(self, tokens: int) -> int:
        """Tokens of the step that starts at ``tokens``."""
        return self.microbatches_at(tokens) * self.microbatch_tokens

    def steps(self, total: int) -> int:
        """Steps until at least ``total`` tokens are trained on."""
        steps, tokens = 0, 0
        while tokens < total and self.ramp is not None and tokens < self.ramp.over_tokens:
            tokens += self.step_tokens(tokens)
            steps += 1
        return steps + max(0, -(-(total - tokens) // (self.microbatches * self.microbatch_tokens)))


# --- settings that change at a token count ---

#: A number, or pairs (tokens, value): from that token of the stage on, the setting has that value.
Stepwise = float | tuple[tuple[int, float], ...]


def stepwise_value(setting: Stepwise, tokens: int) -> float:
    """``setting`` at ``tokens``: a number stays, pairs give the value of the last change that has
    happened."""
    if not isinstance(setting, tuple):
        return setting
    return [value for start, value in setting if start <= tokens][-1]


def check_stepwise(name: str, setting: Stepwise) -> None:
    """Raise ``ConfigError`` unless ``setting`` is a finite number of 0 or more, or changes between such numbers
    from token 0 on in ascending order."""
    changes = setting if isinstance(setting, tuple) else ((0, setting),)
    starts = [start for start, _ in changes]
    if not starts or starts[0] != 0 or any(after <= before for before, after in pairwise(starts)):
        raise ConfigError(f"{name} changes at {starts} tokens; the list must start at 0 and ascend")
    for _, value in changes:
        at_least(0, **{name: value})


def change_points(*settings: Stepwise) -> tuple[int, ...]:
    """Token counts above 0 at which any of ``settings`` changes, ascending."""
    points = {start for setting in settings if isinstance(setting, tuple) for start, _ in setting}
    return tuple(sorted(points - {0}))

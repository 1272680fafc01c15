"""Schedules by hand: values at the corners, and the number of steps they imply."""

from __future__ import annotations

import pytest

from yunque.core.errors import ConfigError
from yunque.train.schedule import (
    BatchRamp,
    Constant,
    Decay,
    Pace,
    change_points,
    check_stepwise,
    cosine,
    learning_rate,
    linear,
    stepwise_value,
)


def test_cosine_warms_up_linearly_passes_the_middle_at_half_and_ends_at_the_end() -> None:
    def rate(tokens: int) -> float:
        return cosine(tokens, peak=2e-4, end=4e-5, warmup=100, total=1100)

    assert rate(25) == pytest.approx(0.5e-4)
    assert rate(100) == pytest.approx(2e-4)
    assert rate(600) == pytest.approx((2e-4 + 4e-5) / 2)
    assert rate(350) == pytest.approx(4e-5 + 1.6e-4 * 0.5 * (1 + 0.5**0.5))
    assert rate(1100) == rate(5000) == 4e-5


def test_linear_falls_in_proportion_and_stays_at_the_end() -> None:
    rates = [linear(t, peak=4e-5, end=1e-5, warmup=0, total=300) for t in (0, 100, 200, 300, 400)]
    assert rates == pytest.approx([4e-5, 3e-5, 2e-5, 1e-5, 1e-5])


def test_the_first_step_moves_and_the_last_one_uses_the_end_rate() -> None:
    schedule = Decay(kind="linear", lr_peak=1.0, lr_end=0.1, warmup_tokens=40)
    assert learning_rate(schedule, 10, 100) == 0.25
    assert learning_rate(schedule, 100, 100) == 0.1
    assert learning_rate(Constant(lr_peak=0.5, warmup_tokens=20), 10, 100) == 0.25
    assert learning_rate(Constant(lr_peak=0.5), 90, 100) == 0.5


def test_batch_grows_linearly_from_a_quarter_to_all_as_in_glm_4_5() -> None:
    """16 M to 64 M tokens over 500 B, in microbatches of 4 M: 4, 10 half-way, 16 at the end and after."""
    pace = Pace(microbatch_tokens=4, microbatches=16, ramp=BatchRamp(start_tokens=16, over_tokens=500_000))
    assert [pace.microbatches_at(t) for t in (0, 250_000, 500_000, 900_000)] == [4, 10, 16, 16]


def test_steps_are_counted_through_the_ramp() -> None:
    """Microbatches of 10: steps of 10 at 0, 20 at 10 and 30, 30 at 50, then 40s from 80 on."""
    ramp = BatchRamp(start_tokens=10, over_tokens=80)
    pace = Pace(microbatch_tokens=10, microbatches=4, ramp=ramp)
    tokens, sizes = 0, []
    for _ in range(6):
        sizes.append(pace.step_tokens(tokens))
        tokens += sizes[-1]
    assert sizes == [10, 10, 20, 20, 30, 40]
    assert [pace.steps(t) for t in (1, 10, 11, 60, 90, 91, 130, 131)] == [1, 1, 2, 4, 5, 6, 6, 7]
    assert Pace(microbatch_tokens=8, microbatches=2).steps(33) == 3


def test_stepwise_settings_change_where_they_say() -> None:
    weight = ((0, 0.3), (15, 0.1))
    assert [stepwise_value(weight, t) for t in (0, 14, 15, 99)] == [0.3, 0.3, 0.1, 0.1]
    assert stepwise_value(0.5, 10**15) == 0.5
    assert change_points(weight, 1.0, ((0, 1.0), (7, 0.0))) == (7, 15)
    for bad in ((), ((5, 1.0),), ((0, 1.0), (0, 2.0))):
        with pytest.raises(ConfigError, match="start at 0 and ascend"):
            check_stepwise("mtp_weight", bad)
    with pytest.raises(ConfigError, match="0 or more"):
        check_stepwise("mtp_weight", -1.0)


def test_impossible_rates_are_refused() -> None:
    with pytest.raises(ConfigError, match="lr_end is 2"):
        Decay(lr_peak=1.0, lr_end=2.0)
    with pytest.raises(ConfigError, match="lr_peak is 0"):
        Constant(lr_peak=0.0)

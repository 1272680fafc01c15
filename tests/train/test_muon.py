"""Muon and Muon Split against hand-worked numbers and a per-head loop."""

from __future__ import annotations

import math

import pytest
import torch

from yunque.ops.reference.orthogonal import newton_schulz, polar_factor
from yunque.train.muon import lookahead, matrices_of, orthogonalise_all_, update_scale
from yunque.train.roles import MatrixLayout


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_split_equals_a_loop_over_heads_with_key_and_value_blocks_apart() -> None:
    heads, nope, value, columns = 3, 4, 6, 10
    direction = _random(heads * (nope + value), columns)
    expected = direction.clone()
    for head in range(heads):
        start = head * (nope + value)
        for low, high in ((start, start + nope), (start + nope, start + nope + value)):
            scale = 0.2 * math.sqrt(max(high - low, columns))
            expected[low:high] = newton_schulz(direction[low:high]) * scale
    orthogonalise_all_([direction], [MatrixLayout(heads, (nope, value), columns)], rms=0.2, steps=5)
    assert (direction - expected).abs().max() < 1e-5


def test_split_and_whole_differ_unless_there_is_one_head() -> None:
    whole, split, single = (_random(12, 8) for _ in range(3))
    orthogonalise_all_([whole], [MatrixLayout(1, (12,), 8)], rms=0.2, steps=5)
    orthogonalise_all_([split], [MatrixLayout(3, (4,), 8)], rms=0.2, steps=5)
    orthogonalise_all_([single], [MatrixLayout(1, (12,), 8)], rms=0.2, steps=5)
    assert (whole - single).abs().max() == 0
    assert (whole - split).abs().max() > 0.01


def test_parameters_of_one_shape_share_a_batch_without_mixing() -> None:
    """A tall and a wide matrix of the same two sides go through one product, transposed; each keeps its own
    result."""
    tall, wide, other = _random(9, 5, seed=1), _random(5, 9, seed=2), _random(4, 4, seed=3)
    expected = [newton_schulz(m) * 0.2 * math.sqrt(max(m.shape)) for m in (tall, wide, other)]
    orthogonalise_all_(
        [tall, wide, other],
        [MatrixLayout(1, (9,), 5), MatrixLayout(1, (5,), 9), MatrixLayout(1, (4,), 4)],
        rms=0.2,
        steps=5,
    )
    for result, wanted in zip((tall, wide, other), expected, strict=True):
        assert (result - wanted).abs().max() < 1e-5


def test_update_rms_is_exactly_the_setting_for_an_exact_polar_factor() -> None:
    for rows, columns in ((4, 30), (30, 4), (12, 12)):
        update = polar_factor(_random(rows, columns)) * update_scale(rows, columns, 0.2)
        assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-5)


@pytest.mark.parametrize(
    "layout", [MatrixLayout(4, (16,), 48), MatrixLayout(4, (8, 12), 24), MatrixLayout(1, (64,), 32)]
)
def test_update_rms_after_newton_schulz_is_within_its_singular_values_of_the_setting(
    layout: MatrixLayout,
) -> None:
    direction = _random(layout.stacks * sum(layout.rows), layout.columns) * 1e-4
    orthogonalise_all_([direction], [layout], rms=0.2, steps=5)
    for view in matrices_of(direction, layout):
        rms_B = view.square().mean(dim=(1, 2)).sqrt()
        assert rms_B.min() > 0.2 * 0.68
        assert rms_B.max() < 0.2 * 1.14


def test_momentum_by_hand() -> None:
    """beta 0.5, gradients 1 then 2: m = 1, then 2.5; Nesterov looks ahead to 1.5, then 3.25."""
    momentum = torch.zeros(1)
    ahead = [lookahead(torch.tensor([g]), momentum, beta=0.5, nesterov=True).item() for g in (1.0, 2.0)]
    assert ahead == [1.5, 3.25]
    assert momentum.item() == 2.5
    momentum.zero_()
    plain = [lookahead(torch.tensor([g]), momentum, beta=0.5, nesterov=False).item() for g in (1.0, 2.0)]
    assert plain == [1.0, 2.5]

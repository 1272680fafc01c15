"""Rotary embedding in both pair layouts: hand-worked values, the specification, relative positions."""

import math

import pytest
import torch
from drawn import normal

from yunque.ops.reference import rotary as reference
from yunque.ops.rotary import rotary_phases, rotate


def test_two_pairs_at_position_one_by_hand():
    """transformers#46842: the pair layout changed when the code was reorganised, and the key was ignored.
    transformers#46372: half-split pairs where neighbours were meant."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    phase = rotary_phases(torch.tensor([1]), width=4, theta=100.0, dtype=torch.float32)
    # Angles 1 and 1 * 100^(-2/4) = 0.1.
    (c0, s0), (c1, s1) = ((math.cos(a), math.sin(a)) for a in (1.0, 0.1))
    neighbours = [1 * c0 - 2 * s0, 2 * c0 + 1 * s0, 3 * c1 - 4 * s1, 4 * c1 + 3 * s1]
    halves = [1 * c0 - 3 * s0, 2 * c1 - 4 * s1, 3 * c0 + 1 * s0, 4 * c1 + 2 * s1]
    torch.testing.assert_close(rotate(x, phase, interleaved=True), torch.tensor([neighbours]))
    torch.testing.assert_close(rotate(x, phase, interleaved=False), torch.tensor([halves]))
    numbers = {True: [-1.142640, 1.922076, 2.585679, 4.279517], False: [-1.984111, 1.590675, 2.462378, 4.179683]}
    for layout, expected in numbers.items():
        torch.testing.assert_close(rotate(x, phase, interleaved=layout), torch.tensor([expected]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(9, 8), (9, 3, 8), (9, 2, 3, 4), (0, 3, 8)])
def test_output_and_gradient_equal_the_specification(interleaved, shape):
    positions = torch.arange(shape[0]) * 37
    cos, sin = reference.rotary_table(positions, width=shape[-1], theta=10_000.0)
    phase = rotary_phases(positions, width=shape[-1], theta=10_000.0, dtype=torch.float64)
    x = normal(*shape, seed=0).requires_grad_()
    got = rotate(x, phase, interleaved=interleaved)
    expected = reference.rotate(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)
    upstream = normal(*shape, seed=1)
    (one,), (other,) = (torch.autograd.grad(out, x, upstream) for out in (got, expected))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "start"), [(9, 0), (12, 1), (13, 5)])
def test_slices_of_odd_rows_turn_like_copies(interleaved, dtype, width, start):
    phase = rotary_phases(torch.arange(7), width=8, theta=10_000.0, dtype=dtype)
    x = normal(7, 3, width, seed=0).to(dtype)[..., start : start + 8]
    expected = rotate(x.clone().contiguous(), phase, interleaved=interleaved)
    assert torch.equal(rotate(x, phase, interleaved=interleaved), expected)


@pytest.mark.parametrize("interleaved", [True, False])
def test_products_depend_on_relative_position_only(interleaved):
    """transformers#46372: the property that every layout must have."""
    q, k = normal(1, 16, seed=0), normal(1, 16, seed=1)

    def product(query_position: int, key_position: int) -> float:
        phases = rotary_phases(
            torch.tensor([query_position, key_position]), width=16, theta=10_000.0, dtype=torch.float64
        )
        turned = [rotate(x, phases[i : i + 1], interleaved=interleaved) for i, x in enumerate((q, k))]
        return float((turned[0] * turned[1]).sum())

    for distance in (0, 1, 5, 100):
        assert product(distance, 0) == pytest.approx(product(distance + 700, 700), abs=1e-3)
    assert abs(product(5, 0) - product(6, 0)) > 1e-3


def test_the_layouts_differ_and_keep_lengths():
    x = normal(5, 8, seed=0)
    phase = rotary_phases(torch.arange(5), width=8, theta=10_000.0, dtype=torch.float64)
    one, other = rotate(x, phase, interleaved=True), rotate(x, phase, interleaved=False)
    assert torch.equal(one[0], x[0])
    assert torch.equal(other[0], x[0])
    assert (one[1:] - other[1:]).abs().max() > 0.1
    for turned in (one, other):
        torch.testing.assert_close(turned.norm(dim=1), x.norm(dim=1), rtol=0, atol=1e-6)


def test_narrow_inputs_are_turned_in_fp32():
    x = normal(50, 8, seed=0, dtype=torch.bfloat16)
    phase = rotary_phases(torch.arange(50) + 100_000, width=8, theta=10_000.0, dtype=torch.bfloat16)
    assert phase.dtype == torch.complex64
    got = rotate(x, phase, interleaved=True)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotate(x.float(), phase, interleaved=True).bfloat16())

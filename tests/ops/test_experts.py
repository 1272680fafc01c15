"""Routed experts by sorting against one token at a time."""

import random

import pytest
import torch
from drawn import normal
from torch import Tensor

from yunque.ops.blockwise import experts as blockwise
from yunque.ops.blockwise.experts import routed_experts
from yunque.ops.reference import experts as reference


def case(seed: int, dtype: torch.dtype = torch.float64, *, num_tokens: int | None = None) -> list[Tensor]:
    """Rows, chosen experts, weights, gate-and-up rows, down rows; widths that no kernel is tuned for."""
    draw = random.Random(seed)
    tokens = draw.choice([1, 2, 3, 17, 60]) if num_tokens is None else num_tokens
    num_experts, hidden, width = draw.randint(2, 9), draw.choice([6, 12, 20]), draw.choice([5, 8, 12])
    per_token = draw.randint(1, min(4, num_experts))
    busy = draw.randint(per_token, num_experts)  # the others get no token
    chosen = torch.stack([torch.tensor(draw.sample(range(busy), per_token)) for _ in range(tokens)])
    return [
        normal(tokens, hidden, seed=seed, dtype=dtype),
        chosen,
        normal(tokens, per_token, seed=seed + 1, dtype=dtype),
        normal(num_experts, 2 * width, hidden, seed=seed + 2, dtype=dtype),
        normal(num_experts, hidden, width, seed=seed + 3, dtype=dtype),
    ]


def outputs_and_gradients(function, values: list[Tensor], **options) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in values]
    out = function(*leaves, **options)
    upstream = normal(*out.shape, seed=99).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x for x in leaves if x.requires_grad], upstream)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("invariant", [False, True])
def test_output_and_gradients_equal_one_token_at_a_time(seed, dtype, invariant):
    values = case(seed)
    expected = outputs_and_gradients(reference.routed_experts, values)
    narrow = [x.to(dtype) if x.is_floating_point() else x for x in values]
    got = outputs_and_gradients(routed_experts, narrow, invariant=invariant)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for name, one, other in zip(("out", "d_x", "d_weight", "d_gate_up", "d_down"), got, expected, strict=True):
        limit = tolerance * max(1.0, other.abs().max().item())
        torch.testing.assert_close(one.double(), other, rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("num_tokens", [1, 2, 60])
def test_gradient_mode_and_repetition_do_not_change_a_bit(num_tokens):
    """flashinfer#2584: training must see the numbers that sampling saw."""
    values = case(4, torch.float32, num_tokens=num_tokens)
    first = outputs_and_gradients(routed_experts, values)
    for _ in range(20):
        again = outputs_and_gradients(routed_experts, values)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with torch.no_grad():
        assert torch.equal(routed_experts(*values), first[0])


def test_few_rows_equal_many_rows(monkeypatch):
    values = case(7, torch.float32, num_tokens=2)
    with torch.no_grad():
        few = routed_experts(*values)
        monkeypatch.setattr(blockwise, "FEW_ROWS", 0)
        torch.testing.assert_close(few, routed_experts(*values), rtol=1e-5, atol=1e-5)


def test_invariant_rows_do_not_depend_on_their_neighbours():
    x, chosen, weights, gate_up, down = case(11, torch.float32, num_tokens=60)
    whole = routed_experts(x, chosen, weights, gate_up, down, invariant=True)
    for span in (slice(0, 1), slice(5, 12), slice(20, 60)):
        part = routed_experts(x[span], chosen[span], weights[span], gate_up, down, invariant=True)
        assert torch.equal(part, whole[span])


def test_weights_may_be_wider_than_the_rows():
    x, chosen, weights, gate_up, down = case(3, torch.float32, num_tokens=17)
    expected = routed_experts(x, chosen, weights, gate_up, down)
    for rows in (slice(0, 17), slice(0, 1)):
        narrow = [a.bfloat16() for a in (x[rows], gate_up, down)]
        got = routed_experts(narrow[0], chosen[rows], weights[rows], *narrow[1:])
        assert got.dtype == torch.bfloat16
        # bf16 keeps 8 bits: three roundings of the sum's largest term.
        assert (got.float() - expected[rows]).abs().max() < 3 * 2**-8 * expected.abs().max()

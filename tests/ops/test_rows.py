"""Row-wise maps and norms: formulas, precision, and bits that do not depend on neighbours."""

import pytest
import torch
import torch.nn.functional as F
from drawn import normal

from yunque.ops.rows import INVARIANT_ROWS, layer_norm, linear, rms_norm


@pytest.mark.parametrize("num_rows", [0, 1, 31, 32, 33, 100])
def test_invariant_linear_equals_a_plain_product(num_rows):
    x, weight = normal(num_rows, 20, seed=0).requires_grad_(), normal(7, 20, seed=1).requires_grad_()
    upstream = normal(num_rows, 7, seed=2)
    got, expected = linear(x, weight, invariant=True), F.linear(x, weight)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    pairs = zip(*(torch.autograd.grad(out, (x, weight), upstream) for out in (got, expected)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_invariant_rows_give_the_same_bits_in_any_batch(dtype):
    x, weight = normal(150, 300, seed=0, dtype=dtype), normal(70, 300, seed=1, dtype=dtype)
    whole = linear(x, weight, invariant=True)
    for start, stop in ((0, 1), (3, 5), (10, 10 + INVARIANT_ROWS), (37, 150)):
        assert torch.equal(linear(x[start:stop], weight, invariant=True), whole[start:stop])


def test_invariant_linear_keeps_leading_axes():
    x, weight = normal(3, 5, 20, seed=0), normal(7, 20, seed=1)
    torch.testing.assert_close(linear(x, weight, invariant=True), F.linear(x, weight), rtol=0, atol=1e-12)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm_is_its_formula_where_epsilon_decides(eps):
    """transformers#48762, vllm#35515: the epsilon of the latent norms is disputed; it matters at tiny variance."""
    x, weight = 1e-3 * normal(6, 16, seed=0), normal(16, seed=1)
    expected = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, eps), expected, rtol=1e-12, atol=0)
    assert (rms_norm(x, weight, 1e-5) - rms_norm(x, weight, 1e-6)).abs().max() > 0.1


def test_layer_norm_is_its_formula():
    x, weight, bias = 1e-3 * normal(6, 16, seed=0), normal(16, seed=1), normal(16, seed=2)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight + bias
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-6), expected, rtol=1e-12, atol=1e-14)


def test_narrow_norms_are_computed_in_fp32():
    x, weight, bias = (normal(*shape, seed=0).bfloat16() for shape in ((6, 64), (64,), (64,)))
    x = x * 100
    for got, expected in (
        (rms_norm(x, weight, 1e-5), rms_norm(x.double(), weight.double(), 1e-5)),
        (layer_norm(x, weight, bias, 1e-5), layer_norm(x.double(), weight.double(), bias.double(), 1e-5)),
    ):
        assert got.dtype == torch.bfloat16
        # One rounding of the result: half a unit in the eighth bit.
        torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-30)

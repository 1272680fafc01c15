"""The chunked cross-entropy against whole float64 logits, and what it promises about memory and gradients."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from yunque.core.errors import DataError
from yunque.ops.blockwise.cross_entropy import linear_cross_entropy
from yunque.ops.reference import cross_entropy as reference

# Shapes: T tokens, D hidden, V vocabulary.


@dataclass(frozen=True)
class Case:
    """Inputs of one call."""

    hidden_TD: Tensor
    weight_VD: Tensor
    targets_T: Tensor
    weights_T: Tensor

    def to(self, dtype: torch.dtype) -> "Case":
        return Case(self.hidden_TD.to(dtype), self.weight_VD.to(dtype), self.targets_T, self.weights_T)

    def run(self, chunk_tokens: int = 256, grad: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Sum and both gradients of the chunked form."""
        hidden_TD = self.hidden_TD.detach().requires_grad_()
        weight_VD = self.weight_VD.detach().requires_grad_()
        out = linear_cross_entropy(hidden_TD, weight_VD, self.targets_T, self.weights_T, chunk_tokens=chunk_tokens)
        seed = torch.tensor(grad, dtype=out.sum.dtype)
        grad_hidden_TD, grad_weight_VD = torch.autograd.grad(out.sum, (hidden_TD, weight_VD), seed)
        return out.sum.detach(), grad_hidden_TD, grad_weight_VD

    def run_reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sum and both gradients of the specification in float64."""
        hidden_TD = self.hidden_TD.detach().double().requires_grad_()
        weight_VD = self.weight_VD.detach().double().requires_grad_()
        out = reference.linear_cross_entropy(hidden_TD, weight_VD, self.targets_T, self.weights_T.double())
        grad_hidden_TD, grad_weight_VD = torch.autograd.grad(out.sum, (hidden_TD, weight_VD))
        return out.sum.detach(), grad_hidden_TD, grad_weight_VD


def make_case(*, num_tokens: int, hidden: int, vocab: int, seed: int = 0, live: float = 0.7) -> Case:
    g = torch.Generator().manual_seed(seed)
    targets_T = torch.randint(vocab, (num_tokens,), generator=g)
    targets_T[torch.rand(num_tokens, generator=g) > live] = -1
    weights_T = torch.rand(num_tokens, generator=g) * 2 - 0.5
    weights_T[torch.rand(num_tokens, generator=g) > live] = 0.0
    return Case(
        torch.randn(num_tokens, hidden, generator=g),
        torch.randn(vocab, hidden, generator=g),
        targets_T,
        weights_T,
    )


@given(
    num_tokens=st.integers(0, 40),
    hidden=st.integers(1, 17),
    vocab=st.sampled_from([1, 2, 7, 33]),
    chunk_tokens=st.sampled_from([1, 3, 8, 64]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_sum_and_gradients_equal_whole_float64_logits(num_tokens, hidden, vocab, chunk_tokens, seed):
    case = make_case(num_tokens=num_tokens, hidden=hidden, vocab=vocab, seed=seed)
    for got, expected in zip(case.run(chunk_tokens), case.run_reference(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)
    exact = case.to(torch.float64)
    for got, expected in zip(exact.run(chunk_tokens), case.run_reference(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def test_two_tokens_worked_by_hand():
    """Logits [0, ln 3]: p = [1/4, 3/4], so the loss is ln 4 for token 0 and ln(4/3) for token 1, times 2."""
    hidden_TD = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight_VD = torch.tensor([[0.0], [math.log(3.0)]], requires_grad=True)
    out = linear_cross_entropy(hidden_TD, weight_VD, torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    out.sum.backward()
    assert out.sum.item() == pytest.approx(math.log(4) + 2 * math.log(4 / 3), rel=1e-6)
    assert out.log_probs_T.tolist() == pytest.approx([-math.log(4), -math.log(4 / 3)], rel=1e-6)
    assert out.correct_T.tolist() == [False, True]
    # errors: [1/4 - 1, 3/4] once and [1/4, 3/4 - 1] twice
    assert weight_VD.grad is not None
    assert weight_VD.grad.flatten().tolist() == pytest.approx([-0.25, 0.25], abs=1e-6)
    assert hidden_TD.grad is not None
    assert hidden_TD.grad.flatten().tolist() == pytest.approx([0.75 * math.log(3), -0.5 * math.log(3)], rel=1e-5)


def test_every_chunk_size_gives_the_same_numbers():
    case = make_case(num_tokens=67, hidden=12, vocab=50)
    whole = case.run(chunk_tokens=1000)
    for chunk_tokens in (1, 2, 13, 66, 67):
        for got, expected in zip(case.run(chunk_tokens), whole, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_log_probs_and_hits_equal_the_specification():
    case = make_case(num_tokens=90, hidden=5, vocab=6)
    got = linear_cross_entropy(case.hidden_TD, case.weight_VD, case.targets_T, case.weights_T, chunk_tokens=16)
    expected = reference.linear_cross_entropy(
        case.hidden_TD.double(), case.weight_VD.double(), case.targets_T, case.weights_T
    )
    torch.testing.assert_close(got.log_probs_T.double(), expected.log_probs_T, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.correct_T, expected.correct_T)
    assert 0 < int(got.correct_T.sum()) < int((case.targets_T >= 0).sum())


def test_vocabulary_of_one_costs_nothing():
    case = make_case(num_tokens=9, hidden=4, vocab=1, live=1.0)
    total, grad_hidden_TD, grad_weight_VD = case.run()
    assert total.item() == 0.0
    assert grad_hidden_TD.abs().max().item() == 0.0
    assert grad_weight_VD.abs().max().item() == 0.0


@pytest.mark.parametrize(("num_tokens", "target", "weight"), [(0, 0, 1.0), (5, -1, 1.0), (5, 2, 0.0)])
def test_no_live_token_gives_exact_zero_and_zero_gradients(num_tokens, target, weight):
    case = Case(
        torch.randn(num_tokens, 3),
        torch.randn(8, 3),
        torch.full((num_tokens,), target),
        torch.full((num_tokens,), weight),
    )
    total, grad_hidden_TD, grad_weight_VD = case.run()
    assert total.item() == 0.0
    assert grad_hidden_TD.shape == (num_tokens, 3)
    assert grad_weight_VD.shape == (8, 3)
    assert not grad_hidden_TD.any()
    assert not grad_weight_VD.any()


def test_a_skipped_row_may_hold_nan():
    case = make_case(num_tokens=30, hidden=4, vocab=9)
    dead_T = (case.targets_T < 0) | (case.weights_T == 0)
    assert 0 < int(dead_T.sum()) < 30
    spoiled = Case(
        case.hidden_TD.masked_fill(dead_T[:, None], torch.nan), case.weight_VD, case.targets_T, case.weights_T
    )
    for got, expected in zip(spoiled.run(), case.run(), strict=True):
        assert torch.equal(got, expected)


def test_a_nan_in_a_live_row_reaches_the_sum():
    case = make_case(num_tokens=5, hidden=4, vocab=9, live=1.0)
    case.hidden_TD[2, 1] = torch.nan
    assert math.isnan(case.run()[0].item())


def test_huge_logits_stay_finite_and_exact():
    """Logits 0 and 3e4: log p of the small one is -3e4, of the large one 0."""
    weight_VD = torch.tensor([[0.0], [3e4]])
    out = linear_cross_entropy(torch.ones(2, 1), weight_VD, torch.tensor([0, 1]), torch.ones(2))
    assert out.log_probs_T.tolist() == [-3e4, 0.0]
    assert out.sum.item() == 3e4


def test_the_grad_output_scales_both_gradients():
    case = make_case(num_tokens=21, hidden=6, vocab=11)
    _, hidden_1, weight_1 = case.run()
    _, hidden_3, weight_3 = case.run(grad=-3.0)
    torch.testing.assert_close(hidden_3, hidden_1 * -3.0, rtol=1e-6, atol=0)
    torch.testing.assert_close(weight_3, weight_1 * -3.0, rtol=1e-6, atol=0)


def test_a_second_backward_over_a_kept_graph_doubles_the_gradient():
    case = make_case(num_tokens=21, hidden=6, vocab=11)
    _, once_TD, once_VD = case.run()
    hidden_TD, weight_VD = case.hidden_TD.requires_grad_(), case.weight_VD.requires_grad_()
    out = linear_cross_entropy(hidden_TD, weight_VD, case.targets_T, case.weights_T)
    out.sum.backward(retain_graph=True)
    out.sum.backward()
    assert hidden_TD.grad is not None
    assert weight_VD.grad is not None
    assert torch.equal(hidden_TD.grad, once_TD * 2)
    assert torch.equal(weight_VD.grad, once_VD * 2)


def test_a_second_derivative_is_refused():
    case = make_case(num_tokens=5, hidden=3, vocab=4, live=1.0)
    hidden_TD = case.hidden_TD.requires_grad_()
    out = linear_cross_entropy(hidden_TD, case.weight_VD, case.targets_T, case.weights_T)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        torch.autograd.grad(out.sum, hidden_TD, create_graph=True)


class Allocations(TorchDispatchMode):
    """Largest tensor that any operation returned, and the shape of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.max_numel = 0
        self.products: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        tensors = [tensor for tensor in results if isinstance(tensor, Tensor)]
        self.max_numel = max([self.max_numel, *(tensor.numel() for tensor in tensors)])
        if func in (torch.ops.aten.mm.out, torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.products.append(tuple(tensors[0].shape))
        return result


@pytest.mark.parametrize("chunk_tokens", [8, 16, 32])
def test_the_largest_tensor_is_one_chunk_of_logits(chunk_tokens):
    case = make_case(num_tokens=400, hidden=4, vocab=300, live=1.0)
    with Allocations() as seen:
        case.run(chunk_tokens)
    assert seen.max_numel == chunk_tokens * 300


def test_without_gradients_only_the_logits_are_multiplied():
    case = make_case(num_tokens=64, hidden=4, vocab=30, live=1.0)
    hidden_TD, weight_VD = case.hidden_TD.requires_grad_(), case.weight_VD.requires_grad_()
    with torch.no_grad(), Allocations() as seen:
        out = linear_cross_entropy(hidden_TD, weight_VD, case.targets_T, case.weights_T, chunk_tokens=32)
    assert seen.products == [(32, 30)] * 2
    assert not out.sum.requires_grad


def test_a_frozen_head_gets_no_gradient_work():
    case = make_case(num_tokens=32, hidden=4, vocab=30, live=1.0)
    with Allocations() as seen:
        out = linear_cross_entropy(case.hidden_TD.requires_grad_(), case.weight_VD, case.targets_T, case.weights_T)
        out.sum.backward()
    assert seen.products == [(32, 30), (32, 4)]
    assert not out.log_probs_T.requires_grad


def test_dead_tokens_are_not_multiplied():
    case = make_case(num_tokens=1000, hidden=4, vocab=30, live=0.2)
    num_live = int(((case.targets_T >= 0) & (case.weights_T != 0)).sum())
    with Allocations() as seen:
        case.run(chunk_tokens=1000)
    assert seen.products == [(num_live, 30), (num_live, 4), (30, 4)]
    assert num_live < 100


def test_bfloat16_inputs_are_summed_in_float32():
    """2,000 tokens of the same kind: a bfloat16 accumulator of 8 bits would stop growing at 256 chunks."""
    case = make_case(num_tokens=2000, hidden=8, vocab=5, live=1.0).to(torch.bfloat16)
    total, grad_hidden_TD, grad_weight_VD = case.run(chunk_tokens=2)
    expected = case.run_reference()
    assert grad_hidden_TD.dtype is grad_weight_VD.dtype is torch.bfloat16
    assert total.dtype is torch.float32
    torch.testing.assert_close(total.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_hidden_TD.double(), expected[1], rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(grad_weight_VD.double(), expected[2], rtol=2**-8, atol=1e-3)


def test_autocast_changes_nothing():
    case = make_case(num_tokens=20, hidden=6, vocab=11)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = case.run()
    for got, expected in zip(inside, case.run(), strict=True):
        assert torch.equal(got, expected)


def test_repeated_calls_are_bit_identical_on_one_thread():
    case = make_case(num_tokens=300, hidden=16, vocab=120)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first, second = case.run(chunk_tokens=32), case.run(chunk_tokens=32)
    finally:
        torch.set_num_threads(num_threads)
    for got, expected in zip(second, first, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("target", [7, -100])
def test_a_target_outside_the_vocabulary_is_named(target):
    case = make_case(num_tokens=4, hidden=3, vocab=7, live=1.0)
    case.targets_T[2] = target
    case.weights_T[2] = 1.0
    with pytest.raises(DataError, match=rf"target {target} at token 2: valid are 0 to 6, and -1"):
        case.run()


def test_shapes_and_arguments_that_do_not_fit_are_refused():
    case = make_case(num_tokens=4, hidden=3, vocab=7)
    with pytest.raises(ValueError, match=r"weight \(7, 2\)"):
        linear_cross_entropy(case.hidden_TD, case.weight_VD[:, :2], case.targets_T, case.weights_T)
    with pytest.raises(ValueError, match=r"weights \(3,\)"):
        linear_cross_entropy(case.hidden_TD, case.weight_VD, case.targets_T, case.weights_T[:3])
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        case.run(chunk_tokens=0)
    with pytest.raises(ValueError, match="detach"):
        linear_cross_entropy(case.hidden_TD, case.weight_VD, case.targets_T, case.weights_T.clone().requires_grad_())

"""The tiled indexer loss against whole float64 matrices and autograd, for any visibility and selection."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from yunque.ops.blockwise import key_tiles
from yunque.ops.blockwise.index_kl import index_kl
from yunque.ops.reference import index_kl as reference
from yunque.ops.reference.index_kl import AttentionTarget, IndexKl
from yunque.ops.visibility import Block, Selection, Visibility

# Shapes: T queries, P pool rows, H attention heads of width R, J index heads of width d, K kept keys.


@dataclass(frozen=True)
class Case:
    """Inputs of one call."""

    query_TJd: Tensor
    key_Pd: Tensor
    head_weight_TJ: Tensor
    targets: tuple[AttentionTarget, ...]
    visibility: Visibility
    weights_T: Tensor
    selection: Selection | None = None

    def to(self, dtype: torch.dtype) -> "Case":
        return replace(
            self,
            query_TJd=self.query_TJd.to(dtype),
            key_Pd=self.key_Pd.to(dtype),
            head_weight_TJ=self.head_weight_TJ.to(dtype),
            targets=tuple(AttentionTarget(t.query_THR.to(dtype), t.pool_PR.to(dtype), t.scale) for t in self.targets),
        )

    def call(self, function: Callable[..., IndexKl] = index_kl) -> IndexKl:
        return function(
            self.query_TJd,
            self.key_Pd,
            self.head_weight_TJ,
            self.targets,
            self.visibility,
            weights_T=self.weights_T,
            selection=self.selection,
        )

    def run(self, function: Callable[..., IndexKl] = index_kl) -> dict[str, Tensor]:
        """Sum, entropy and the three gradients."""
        inputs = [t.detach().requires_grad_() for t in (self.query_TJd, self.key_Pd, self.head_weight_TJ)]
        query_TJd, key_Pd, head_weight_TJ = inputs
        case = replace(self, query_TJd=query_TJd, key_Pd=key_Pd, head_weight_TJ=head_weight_TJ)
        out = case.call(function)
        query, key, head_weight = torch.autograd.grad(out.sum, inputs)
        return {
            "sum": out.sum.detach(),
            "entropy": out.entropy_sum,
            "weight": out.weight_sum,
            "query": query,
            "key": key,
            "head_weight": head_weight,
        }

    def run_reference(self) -> dict[str, Tensor]:
        """The same from the specification in float64."""
        return self.to(torch.float64).run(reference.index_kl)


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float) -> None:
    for name in expected:
        scale = max(1.0, expected[name].abs().max().item() if expected[name].numel() else 1.0)
        error = (got[name].double() - expected[name].double()).abs().max().item() if got[name].numel() else 0.0
        assert error <= tolerance * scale, f"{name}: {error} on a scale of {scale}"


def packed(lengths: Sequence[int], *, earlier: int = 0) -> Visibility:
    """Documents end to end; the first also sees ``earlier`` pool rows before its own."""
    starts = [sum(lengths[:d]) for d in range(len(lengths))]
    first = [start + earlier * (start > 0) for start, n in zip(starts, lengths, strict=True) for _ in range(n)]
    total = sum(lengths)
    block = Block(0, total, total, 0, total + earlier, total + earlier, 1, causal=len(lengths) == 1)
    last_T = torch.arange(total) + earlier
    return Visibility.of(torch.tensor(first, dtype=torch.int64), last_T, (block,))


def strided(num_sequences: int, num_queries: int, num_keys: int, key_stride: int) -> Visibility:
    """Sequences alike, each with its own stretch of the pool and gaps between them."""
    start_N1 = torch.arange(num_sequences)[:, None] * key_stride
    first_NQ = start_N1.expand(num_sequences, num_queries)
    last_NQ = start_N1 + num_keys - num_queries + torch.arange(num_queries)
    block = Block(0, num_queries, num_queries, 0, num_keys, key_stride, num_sequences, causal=True)
    return Visibility.of(first_NQ.flatten(), last_NQ.flatten(), (block,))


def kept(visibility: Visibility, k: int, g: torch.Generator, *, holes: bool) -> Selection:
    """``k`` drawn keys of each query, all where it sees no more; with ``holes``, sometimes fewer or none."""
    positions_TK = torch.full((len(visibility.first_T), k), -1, dtype=torch.int32)
    for t, (first, last) in enumerate(zip(visibility.first_T.tolist(), visibility.last_T.tolist(), strict=True)):
        seen = max(last - first + 1, 0)
        count = min(k, seen)
        if holes and torch.rand((), generator=g) < 0.4:
            count = int(torch.randint(count + 1, (), generator=g))
        positions_TK[t, :count] = torch.randperm(seen, generator=g)[:count].sort().values.int()
    return Selection(positions_TK)


def make_case(visibility: Visibility, *, seed: int = 0, layers: int = 1) -> Case:
    g = torch.Generator().manual_seed(seed)
    num_queries, num_rows = len(visibility.first_T), visibility.num_rows

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    weights_T = torch.rand(num_queries, generator=g) + 0.1
    weights_T[torch.rand(num_queries, generator=g) < 0.2] = 0.0
    return Case(
        draw(num_queries, 2, 4),
        draw(num_rows, 4),
        draw(num_queries, 2),
        tuple(AttentionTarget(draw(num_queries, 3, 5), draw(num_rows, 5), 0.3 + n) for n in range(layers)),
        visibility,
        weights_T,
    )


visibilities = st.one_of(
    st.builds(packed, st.lists(st.integers(1, 40), min_size=1, max_size=6), earlier=st.sampled_from([0, 1, 30])),
    st.builds(packed, st.lists(st.just(1), min_size=1, max_size=30)),
    st.builds(
        lambda n, q, more, gap: strided(n, q, q + more, q + more + gap),
        st.integers(1, 5),
        st.integers(1, 9),
        st.integers(0, 20),
        st.integers(0, 50),
    ),
)


@given(visibility=visibilities, seed=st.integers(0, 10**6), layers=st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_dense_loss_and_gradients_equal_whole_float64_matrices(visibility, seed, layers):
    case = make_case(visibility, seed=seed, layers=layers)
    expected = case.run_reference()
    assert_equal(case.run(), expected, tolerance=3e-5)
    assert_equal(case.to(torch.float64).run(), expected, tolerance=1e-12)


@given(
    visibility=visibilities,
    k=st.sampled_from([1, 2, 3, 7, 64]),
    seed=st.integers(0, 10**6),
    holes=st.booleans(),
    gather_above=st.sampled_from([0, 2, 1000]),
)
@settings(max_examples=80, deadline=None)
def test_sparse_loss_and_gradients_equal_whole_float64_matrices(visibility, k, seed, holes, gather_above):
    g = torch.Generator().manual_seed(seed)
    case = replace(make_case(visibility, seed=seed), selection=kept(visibility, k, g, holes=holes))
    expected = case.run_reference()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_tiles, "GATHER_ABOVE", gather_above)
        assert_equal(case.run(), expected, tolerance=3e-5)
        assert_equal(case.to(torch.float64).run(), expected, tolerance=1e-12)


def one_query(head_weight: float, *, weight: float = 1.0) -> Case:
    """One query, two keys. Attention logits 0, ln 3: p = [1/4, 3/4]. Index scores 0 and ``head_weight``."""
    return Case(
        torch.ones(1, 1, 1),
        torch.tensor([[-5.0], [1.0]]),
        torch.tensor([[head_weight]]),
        (AttentionTarget(torch.ones(1, 1, 1), torch.tensor([[0.0], [math.log(3.0)]]), 1.0),),
        strided(1, 1, 2, 2),
        torch.tensor([weight]),
    )


def test_one_query_worked_by_hand():
    """relu drops key 0, so I = [0, 0] with head weight 0: q = [1/2, 1/2], KL = ln 2 - H(1/4)."""
    entropy = math.log(4) - 0.75 * math.log(3)
    got = one_query(0.0, weight=2.0).run()
    assert got["sum"].item() == pytest.approx(2 * (math.log(2) - entropy), rel=1e-6)
    assert got["entropy"].item() == pytest.approx(2 * entropy, rel=1e-6)
    assert got["weight"].item() == 2.0
    # d KL / d I[1] = 1/2 - 3/4, and I[1] = head_weight * query * key
    assert got["head_weight"].item() == pytest.approx(2 * -0.25, rel=1e-6)
    assert got["query"].item() == 0.0


def test_an_indexer_that_matches_the_attention_has_no_loss_and_no_gradient():
    got = one_query(math.log(3.0)).run()
    assert got["sum"].item() == pytest.approx(0.0, abs=1e-6)
    for name in ("query", "key", "head_weight"):
        assert got[name].abs().max().item() < 1e-6


def test_a_query_that_sees_one_key_has_exactly_no_loss():
    got = make_case(packed([1] * 50)).run()
    assert got["sum"].item() == 0.0
    assert got["entropy"].item() == 0.0
    for name in ("query", "key", "head_weight"):
        assert not got[name].any()


@pytest.mark.parametrize("lengths", [[], [5, 3]])
def test_no_weight_gives_exact_zero_and_zero_gradients(lengths):
    case = make_case(packed(lengths))
    got = replace(case, weights_T=torch.zeros_like(case.weights_T)).run()
    assert got["sum"].item() == got["entropy"].item() == got["weight"].item() == 0.0
    assert got["query"].shape == case.query_TJd.shape
    for name in ("query", "key", "head_weight"):
        assert not got[name].any()


def test_queries_without_weight_or_without_keys_may_hold_nan():
    case = make_case(packed([20, 13]))
    last_T = case.visibility.last_T.clone()
    last_T[7] = case.visibility.first_T[7] - 1
    case = replace(case, visibility=replace(case.visibility, last_T=last_T))
    dead_T = (case.weights_T == 0) | (torch.arange(33) == 7)
    spoiled = replace(
        case,
        query_TJd=case.query_TJd.masked_fill(dead_T[:, None, None], torch.nan),
        targets=(
            replace(
                case.targets[0],
                query_THR=case.targets[0].query_THR.masked_fill(dead_T[:, None, None], torch.nan),
            ),
        ),
    )
    clean = case.run()
    assert_equal(clean, case.run_reference(), tolerance=3e-5)
    for name, expected in clean.items():
        assert torch.equal(spoiled.run()[name], expected)
    assert not clean["query"][dead_T].any()


def test_keeping_every_key_is_the_dense_loss():
    case = make_case(packed([30, 7]))
    everything = torch.arange(40, dtype=torch.int32).expand(37, -1)
    seen_T1 = case.visibility.last_T[:, None] - case.visibility.first_T[:, None] + 1
    sparse = replace(case, selection=Selection(torch.where(everything < seen_T1, everything, -1)))
    for name, expected in case.run().items():
        assert torch.equal(sparse.run()[name], expected)


def test_averaging_targets_has_the_mean_of_their_gradients():
    """IndexShare: the loss of an indexer that serves several layers (IndexCache, arXiv 2603.12201)."""
    case = make_case(packed([25, 10]), layers=3).to(torch.float64)
    together = case.run()
    apart = [replace(case, targets=(target,)).run() for target in case.targets]
    for name in ("query", "key", "head_weight"):
        mean = torch.stack([one[name] for one in apart]).mean(0)
        torch.testing.assert_close(together[name], mean, rtol=1e-12, atol=1e-12)
    # The mean target has at least the mean entropy, and exactly so much less divergence.
    cross = [one["sum"] + one["entropy"] for one in apart]
    torch.testing.assert_close(together["sum"] + together["entropy"], sum(cross) / 3, rtol=1e-12, atol=0)
    assert together["entropy"] > sum(one["entropy"] for one in apart) / 3


def test_no_gradient_reaches_the_attention():
    case = make_case(packed([12]))
    target = AttentionTarget(case.targets[0].query_THR.requires_grad_(), case.targets[0].pool_PR.requires_grad_(), 0.3)
    inputs = (case.query_TJd, case.key_Pd, case.head_weight_TJ)
    for tensor in inputs:
        tensor.requires_grad_()
    out = replace(case, targets=(target,)).call()
    out.sum.backward()
    assert target.query_THR.grad is None
    assert target.pool_PR.grad is None
    assert all(t.grad is not None and t.grad.any() for t in inputs)
    assert not out.entropy_sum.requires_grad
    assert not out.weight_sum.requires_grad


def test_without_gradients_the_value_is_the_same_and_has_no_graph():
    case = make_case(packed([12, 30]))
    case.key_Pd.requires_grad_()
    with torch.no_grad():
        out = case.call()
    assert not out.sum.requires_grad
    assert torch.equal(out.sum, case.run()["sum"])


def test_bfloat16_inputs_are_computed_in_float32():
    visibility = packed([200, 57])
    g = torch.Generator().manual_seed(3)
    for selection in (None, kept(visibility, 8, g, holes=False)):
        case = replace(make_case(visibility), selection=selection).to(torch.bfloat16)
        got, expected = case.run(), case.run_reference()
        assert got["query"].dtype is got["key"].dtype is got["head_weight"].dtype is torch.bfloat16
        assert got["sum"].dtype is torch.float32
        assert got["sum"].item() == pytest.approx(expected["sum"].item(), rel=1e-5)
        for name in ("query", "key", "head_weight"):
            torch.testing.assert_close(got[name].double(), expected[name], rtol=2**-8, atol=1e-5)


def test_large_scores_and_logits_stay_finite():
    case = make_case(packed([60]))
    case = replace(
        case,
        head_weight_TJ=case.head_weight_TJ * 1e4,
        targets=(replace(case.targets[0], scale=1e3),),
        weights_T=torch.ones(60),
    )
    got, expected = case.run(), case.run_reference()
    assert all(bool(value.isfinite().all()) for value in got.values())
    assert got["sum"].item() == pytest.approx(expected["sum"].item(), rel=1e-4)


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        self.numel = max([self.numel, *(t.numel() for t in results if isinstance(t, Tensor))])
        return result


@pytest.mark.parametrize("k", [None, 4])
def test_the_largest_tensor_grows_linearly_with_the_document(monkeypatch, k):
    """With a budget below one row of scores a tile is 8 queries of 3 heads wide, whatever the length."""
    small = key_tiles.TileSize(64, numbers_per_score=3, numbers_per_gathered_key=5)
    monkeypatch.setattr(key_tiles.TileSize, "on", lambda *_, **__: small)
    for length in (100, 200, 400):
        case = make_case(packed([length]))
        if k is not None:
            positions_TK = torch.arange(k, dtype=torch.int32).expand(length, k)
            case = replace(
                case,
                selection=Selection(positions_TK.where(positions_TK <= case.visibility.last_T[:, None], -1)),
            )
        with Largest() as seen:
            case.run()
        assert seen.numel <= 24 * length


def test_repeated_calls_are_bit_identical_on_one_thread_with_or_without_autocast():
    visibility = packed([150, 80])
    g = torch.Generator().manual_seed(5)
    case = replace(make_case(visibility), selection=kept(visibility, 9, g, holes=True))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first = case.run()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            second = case.run()
    finally:
        torch.set_num_threads(num_threads)
    for name, expected in first.items():
        assert torch.equal(second[name], expected)


def test_a_second_derivative_is_refused():
    case = make_case(packed([5]))
    key_Pd = case.key_Pd.requires_grad_()
    out = case.call()
    with pytest.raises(RuntimeError, match="index_kl has no second derivative"):
        torch.autograd.grad(out.sum, key_Pd, create_graph=True)


def test_arguments_that_do_not_fit_are_refused():
    case = make_case(packed([6]))
    target = case.targets[0]
    wrong: list[tuple[Case, str]] = [
        (replace(case, head_weight_TJ=case.head_weight_TJ[:, :1]), r"head weight \(6, 1\)"),
        (replace(case, weights_T=case.weights_T[:4]), r"weights \(4,\)"),
        (replace(case, weights_T=case.weights_T.clone().requires_grad_()), "detach"),
        (replace(case, targets=()), "no attention target"),
        (replace(case, targets=(replace(target, pool_PR=target.pool_PR[:5]),)), r"pool \(5, 5\)"),
        (replace(case, selection=Selection(torch.zeros(5, 2, dtype=torch.int32))), r"selection \(5, 2\)"),
    ]
    for bad, message in wrong:
        with pytest.raises(ValueError, match=message):
            bad.run()

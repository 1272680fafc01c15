"""Invariant selection and attention: the specification's result, and the same bits beside any neighbours."""

import pytest
import torch
from drawn import draw_selection, draw_visibility, masked, normal, packed, select_everything, stepped

from yunque.ops.blockwise.invariant_attention import attend_invariant, select_invariant
from yunque.ops.reference import attention, selection

HEADS, WIDTH, VALUE = 3, 10, 6
SHAPE = {"scale": 0.37, "value_dim": VALUE}


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("k", [None, 6, 100])
def test_attention_and_gradients_equal_the_specification(seed, k):
    drawn = draw_visibility(seed)
    chosen = None if k is None else draw_selection(drawn, k, seed)
    q, pool = normal(drawn.num_queries, HEADS, WIDTH, seed=seed), normal(drawn.num_rows, WIDTH, seed=seed + 1)
    upstream = normal(drawn.num_queries, HEADS, VALUE, seed=seed + 2)
    results = []
    for function in (attend_invariant, attention.attend):
        leaves = [q.clone().requires_grad_(), pool.clone().requires_grad_()]
        out = function(*leaves, drawn.visibility, selection=chosen, **SHAPE)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(15))
def test_selection_equals_the_specification(seed):
    drawn = draw_visibility(seed)
    inputs = [
        normal(*shape, seed=seed + i)
        for i, shape in enumerate(
            ((drawn.num_queries, HEADS, WIDTH), (drawn.num_rows, WIDTH), (drawn.num_queries, HEADS))
        )
    ]
    for k in (1, 5, 40):
        expected = selection.select(*inputs, drawn.visibility, k).positions_TK
        assert torch.equal(select_invariant(*inputs, drawn.visibility, k).positions_TK, expected)


def test_a_query_gives_the_same_bits_in_every_view():
    """Rows 200..229 of a document, in one pass, as a chunk over a cache and beside another document."""
    q, pool = normal(230, HEADS, WIDTH, seed=0).float(), normal(230, WIDTH, seed=1).float()
    index_q, index_k = normal(230, 2, 8, seed=2).float(), normal(230, 8, seed=3).float()
    weights = normal(230, 2, seed=4).float()

    def both(rows: slice, pool_rows: list[torch.Tensor], visibility) -> list[torch.Tensor]:
        """Dense output, selection, output over the selection."""
        latent, keys = pool_rows
        chosen = select_invariant(index_q[rows], keys, weights[rows], visibility, 9)
        dense, sparse = (
            attend_invariant(q[rows], latent, visibility, selection=choice, **SHAPE) for choice in (None, chosen)
        )
        return [dense, chosen.positions_TK, sparse]

    whole = [x[200:] for x in both(slice(0, 230), [pool, index_k], packed([230]))]
    chunk = both(slice(200, 230), [pool, index_k], stepped([200], [30], 230))
    pad = [torch.cat((torch.full((50, x.shape[1]), 3.0), x)) for x in (pool, index_k)]
    beside = both(slice(200, 230), pad, masked([50] * 30, list(range(250, 280)), 280))
    single = [both(slice(t, t + 1), [pool, index_k], stepped([t], [1], 230)) for t in range(200, 230)]
    for i, expected in enumerate(whole):
        assert torch.equal(chunk[i], expected)
        assert torch.equal(beside[i], expected)
        assert torch.equal(torch.cat([part[i] for part in single]), expected)


def test_selecting_everything_equals_dense_to_the_bit():
    for seed in range(5):
        drawn = draw_visibility(seed)
        q = normal(drawn.num_queries, HEADS, WIDTH, seed=seed).float()
        pool = normal(drawn.num_rows, WIDTH, seed=1).float()
        dense, everything = (
            attend_invariant(q, pool, drawn.visibility, selection=choice, **SHAPE)
            for choice in (None, select_everything(drawn.visibility))
        )
        assert torch.equal(dense, everything)


def test_queries_that_see_nothing_get_zeros_and_send_no_gradient():
    """sglang#31123: rows of length 0 gave NaN."""
    visibility = masked([4, 2, 0], [3, 9, -1], 10)
    for chosen in (None, select_everything(visibility)):
        q = normal(3, HEADS, WIDTH, seed=0).requires_grad_()
        out = attend_invariant(q, normal(10, WIDTH, seed=1), visibility, selection=chosen, **SHAPE)
        (gradient,) = torch.autograd.grad(out.sum(), q)
        assert (out[[0, 2]] == 0).all()
        assert gradient.isfinite().all()
        assert (gradient[[0, 2]] == 0).all()

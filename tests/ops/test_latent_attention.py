"""Absorbed attention in tiles against the specification: output and gradients, for any visibility."""

import pytest
import torch
from drawn import (
    Drawn,
    LargestTensor,
    draw_selection,
    draw_visibility,
    kept_for_backward,
    masked,
    normal,
    packed,
    select_everything,
)

from yunque.ops.blockwise import latent_attention
from yunque.ops.blockwise.latent_attention import attend_latent
from yunque.ops.reference import attention as reference

HEADS, WIDTH, VALUE = 3, 10, 6
SHAPE = {"scale": 0.37, "value_dim": VALUE}


def compare(got_fn, expected_fn, num_queries: int, num_rows: int, seed: int) -> None:
    """Outputs and both gradients agree in float64."""
    q, pool = normal(num_queries, HEADS, WIDTH, seed=seed), normal(num_rows, WIDTH, seed=seed + 1)
    upstream = normal(num_queries, HEADS, VALUE, seed=seed + 2)
    results = []
    for function in (got_fn, expected_fn):
        inputs = [q.clone().requires_grad_(), pool.clone().requires_grad_()]
        out = function(*inputs)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, upstream)])
    for name, got, expected in zip(("out", "d_q", "d_pool"), *results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("k", [None, 1, 6, 300])
def test_output_and_gradients_equal_the_specification(seed, k, monkeypatch):
    monkeypatch.setattr(latent_attention, "GATHER_CELLS", 1000)
    monkeypatch.setattr(latent_attention, "LOGIT_CELLS", 1000)
    drawn = draw_visibility(seed)
    selection = None if k is None else draw_selection(drawn, k, seed)
    compare(
        lambda q, pool: attend_latent(q, pool, drawn.visibility, selection=selection, **SHAPE),
        lambda q, pool: reference.attend(q, pool, drawn.visibility, selection=selection, **SHAPE),
        drawn.num_queries,
        drawn.num_rows,
        seed,
    )


@pytest.mark.parametrize("seed", range(5))
def test_selecting_everything_equals_dense(seed):
    drawn = draw_visibility(seed)
    q, pool = normal(drawn.num_queries, HEADS, WIDTH, seed=seed), normal(drawn.num_rows, WIDTH, seed=seed + 1)
    everything = select_everything(drawn.visibility)
    got = attend_latent(q, pool, drawn.visibility, selection=everything, **SHAPE)
    dense = attend_latent(q, pool, drawn.visibility, selection=None, **SHAPE)
    torch.testing.assert_close(got, dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_selected", [False, True])
def test_queries_that_see_nothing_get_zeros_and_send_no_gradient(is_selected):
    """sglang#31123: rows of length 0 gave NaN."""
    visibility = masked([4, 2, 0], [3, 9, -1], 10)
    selection = select_everything(visibility) if is_selected else None
    q = normal(3, HEADS, WIDTH, seed=0).requires_grad_()
    out = attend_latent(q, normal(10, WIDTH, seed=1), visibility, selection=selection, **SHAPE)
    out.sum().backward()
    assert q.grad is not None
    for row in (0, 2):
        assert (out[row] == 0).all()
        assert (q.grad[row] == 0).all()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("k", [None, 7])
def test_twenty_runs_give_the_same_bits(k):
    drawn = draw_visibility(2)
    selection = None if k is None else draw_selection(drawn, k, 0)
    q = normal(drawn.num_queries, HEADS, WIDTH, seed=0, dtype=torch.float32)
    pool = normal(drawn.num_rows, WIDTH, seed=1, dtype=torch.float32)
    runs = []
    for _ in range(20):
        inputs = [q.clone().requires_grad_(), pool.clone().requires_grad_()]
        out = attend_latent(*inputs, drawn.visibility, selection=selection, **SHAPE)
        runs.append([out.detach(), *torch.autograd.grad(out.sum(), inputs)])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("k", [None, 7])
def test_gradient_mode_does_not_change_a_bit(k):
    """flashinfer#2584: training must see the numbers that sampling saw."""
    drawn = draw_visibility(1)
    selection = None if k is None else draw_selection(drawn, k, 0)
    q = normal(drawn.num_queries, HEADS, WIDTH, seed=0, dtype=torch.float32).requires_grad_()
    pool = normal(drawn.num_rows, WIDTH, seed=1, dtype=torch.float32)
    with_grad = attend_latent(q, pool, drawn.visibility, selection=selection, **SHAPE)
    with torch.no_grad():
        without = attend_latent(q, pool, drawn.visibility, selection=selection, **SHAPE)
    assert torch.equal(with_grad, without)


def test_bf16_probabilities_are_formed_in_fp32():
    drawn = draw_visibility(0)
    q, pool = normal(drawn.num_queries, HEADS, WIDTH, seed=0), normal(drawn.num_rows, WIDTH, seed=1)
    q, pool = q.bfloat16(), pool.bfloat16()
    expected = reference.attend(q.float(), pool.float(), drawn.visibility, selection=None, **SHAPE)
    got = attend_latent(q, pool, drawn.visibility, selection=None, **SHAPE)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=3e-2)


@pytest.mark.parametrize("k", [None, 4])
def test_memory_grows_linearly_with_length(k, monkeypatch):
    """Forward and backward: no tensor of queries x keys, and nothing of that size kept for the backward pass."""
    monkeypatch.setattr(latent_attention, "GATHER_CELLS", 1 << 14)
    monkeypatch.setattr(latent_attention, "LOGIT_CELLS", 1 << 14)
    largest, kept = [], []
    for length in (256, 512):
        visibility = packed([length])
        drawn = Drawn(visibility, length, "one document")
        selection = None if k is None else draw_selection(drawn, k, 0)
        q = normal(length, HEADS, WIDTH, seed=0).requires_grad_()
        pool = normal(length, WIDTH, seed=1).requires_grad_()

        def attend(q=q, pool=pool, visibility=visibility, selection=selection):
            return attend_latent(q, pool, visibility, selection=selection, **SHAPE)

        kept.append(kept_for_backward(attend))
        with LargestTensor() as meter:
            attend().sum().backward()
        largest.append(meter.numel)
    assert largest[1] <= 2 * largest[0]
    assert kept[1] <= 2.1 * kept[0]

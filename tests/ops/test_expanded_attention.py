"""Attention with keys and values per head against the specification, for any visibility and any widths."""

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
from torch import Tensor

from yunque.ops.blockwise import expanded_attention
from yunque.ops.blockwise.expanded_attention import attend_expanded
from yunque.ops.reference.attention import allowed
from yunque.ops.visibility import Selection, Visibility

HEADS, SCALE = 3, 0.37


def whole(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, selection: Selection | None) -> Tensor:
    """softmax(scale q k^T) v over the allowed rows; zeros for a query that sees nothing."""
    hidden = ~allowed(visibility, k.shape[0], selection)[:, None]
    logits = torch.einsum("the,phe->thp", q, k) * SCALE
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
    return torch.einsum("thp,phv->thv", weights, v)


def inputs(drawn: Drawn, key: int, value: int, seed: int, dtype=torch.float64) -> list[Tensor]:
    return [
        normal(rows, HEADS, width, seed=seed + i, dtype=dtype).requires_grad_()
        for i, (rows, width) in enumerate(((drawn.num_queries, key), (drawn.num_rows, key), (drawn.num_rows, value)))
    ]


def compare(drawn: Drawn, selection: Selection | None, key: int, value: int, seed: int) -> None:
    """Outputs and all three gradients agree in float64."""
    leaves = inputs(drawn, key, value, seed)
    upstream = normal(drawn.num_queries, HEADS, value, seed=seed + 9)
    got = attend_expanded(*leaves, drawn.visibility, scale=SCALE, selection=selection)
    expected = whole(*leaves, drawn.visibility, selection)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12, msg=lambda m: f"{drawn.label}: {m}")
    pairs = zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    )
    for name, (one, other) in zip(("d_q", "d_k", "d_v"), pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("k", [None, 1, 6, 300])
def test_output_and_gradients_equal_the_specification(seed, k):
    drawn = draw_visibility(seed)
    key, value = ((8, 8), (6, 10), (10, 6))[seed % 3]
    compare(drawn, None if k is None else draw_selection(drawn, k, seed), key, value, seed)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("k", [None, 6])
def test_masks_made_again_in_the_backward_pass_change_nothing(seed, k, monkeypatch):
    monkeypatch.setattr(expanded_attention, "KEPT_MASK_KEYS", 0)
    drawn = draw_visibility(seed)
    compare(drawn, None if k is None else draw_selection(drawn, k, seed), 8, 6, seed)


@pytest.mark.parametrize("kept_keys", [0, 1024])
def test_equal_documents_longer_than_a_tile_keep_their_rows_apart(kept_keys, monkeypatch):
    """Documents of one length share a block, and each needs several tiles of queries."""
    monkeypatch.setattr(expanded_attention, "MASKED_QUERIES", 16)
    monkeypatch.setattr(expanded_attention, "KEPT_MASK_KEYS", kept_keys)
    drawn = Drawn(packed([40, 40, 40]), 120, "three documents of 40")
    compare(drawn, draw_selection(drawn, 5, 0), 8, 8, 0)


@pytest.mark.parametrize("is_selected", [False, True])
def test_queries_that_see_nothing_get_zeros_and_send_no_gradient(is_selected):
    """sglang#31123: rows of length 0 gave NaN."""
    visibility = masked([4, 2, 0], [3, 9, -1], 10)
    drawn = Drawn(visibility, 10, "two empty rows")
    leaves = inputs(drawn, 8, 8, 0)
    selection = select_everything(visibility) if is_selected else None
    out = attend_expanded(*leaves, visibility, scale=SCALE, selection=selection)
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert (out[[0, 2]] == 0).all()
    assert (gradients[0][[0, 2]] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("k", [None, 7])
def test_twenty_runs_and_gradient_mode_give_the_same_bits(k):
    """flashinfer#2584: training must see the numbers that sampling saw."""
    drawn = draw_visibility(1)
    selection = None if k is None else draw_selection(drawn, k, 0)
    leaves = inputs(drawn, 8, 6, 0, torch.float32)
    with torch.no_grad():
        plain = attend_expanded(*leaves, drawn.visibility, scale=SCALE, selection=selection)
    first = None
    for _ in range(20):
        out = attend_expanded(*leaves, drawn.visibility, scale=SCALE, selection=selection)
        assert torch.equal(out, plain)
        gradients = torch.autograd.grad(out.sum(), leaves)
        first = first or gradients
        assert all(torch.equal(a, b) for a, b in zip(gradients, first, strict=True))


@pytest.mark.parametrize("k", [None, 4])
def test_memory_grows_linearly_with_length(k, monkeypatch):
    """Forward and backward: no tensor of queries x keys, and nothing of that size kept for the backward pass."""
    monkeypatch.setattr(expanded_attention, "KEPT_MASK_KEYS", 64)
    monkeypatch.setattr(expanded_attention, "MASKED_QUERIES", 4)
    largest, kept = [], []
    for length in (256, 512):
        drawn = Drawn(packed([length]), length, "one document")
        selection = None if k is None else draw_selection(drawn, k, 0)
        leaves = inputs(drawn, 8, 8, 0, torch.float32)

        def attend(leaves=leaves, drawn=drawn, selection=selection):
            return attend_expanded(*leaves, drawn.visibility, scale=SCALE, selection=selection)

        kept.append(kept_for_backward(attend))
        with LargestTensor() as meter:
            attend().sum().backward()
        largest.append(meter.numel)
    assert largest[1] <= 2 * largest[0] < 2 * 256 * 256
    assert kept[1] <= 2.1 * kept[0]

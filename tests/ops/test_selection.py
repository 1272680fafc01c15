"""The tiled indexer against whole-matrix scores, for any visibility."""

import pytest
import torch
from drawn import LargestTensor, draw_visibility, masked, normal, packed, stepped

from yunque.ops.blockwise import selection as blockwise
from yunque.ops.blockwise.selection import select, tile_scores
from yunque.ops.reference import selection as reference

HEADS, WIDTH = 3, 8


def indexer(num_queries: int, num_rows: int, seed: int, dtype=torch.float64):
    """Index queries, keys and head weights."""
    q = normal(num_queries, HEADS, WIDTH, seed=seed, dtype=dtype)
    return (
        q,
        normal(num_rows, WIDTH, seed=seed + 1, dtype=dtype),
        normal(num_queries, HEADS, seed=seed + 2, dtype=dtype),
    )


@pytest.mark.parametrize("seed", range(25))
def test_selection_equals_whole_matrix_scores(seed, monkeypatch):
    """mlx-lm#1454: at large shapes a head reduction came out zero. vllm#47827: wrong past a block's end."""
    monkeypatch.setattr(blockwise, "TILE_CELLS", 300)
    monkeypatch.setattr(blockwise, "PRODUCT_CELLS", 200)
    drawn = draw_visibility(seed)
    inputs = indexer(drawn.num_queries, drawn.num_rows, seed)
    for k in (1, 5, 40):
        expected = reference.select(*inputs, drawn.visibility, k).positions_TK
        for always in (False, True):
            got = select(*inputs, drawn.visibility, k, always_score=always).positions_TK
            assert torch.equal(got, expected), f"{drawn.label}, k={k}, always_score={always}"


@pytest.mark.parametrize("limits", [(1 << 19, 1 << 19), (2000, 700)])
def test_tile_scores_equal_whole_matrix_scores_and_are_not_all_zero(limits, monkeypatch):
    """mlx-lm#1454: scores of large shapes were zero, so that the trailing keys were kept."""
    monkeypatch.setattr(blockwise, "PRODUCT_CELLS", limits[1])
    visibility = packed([150, 150, 40])
    inputs = indexer(340, 340, 0)
    whole = reference.index_scores(*inputs)
    for tile in visibility.tiles(max_cells=limits[0]):
        rows = tile.queries(torch.arange(340))
        keys = tile.keys(torch.arange(340))
        expected = torch.stack([whole[r][:, k] for r, k in zip(rows, keys, strict=True)])
        got = tile_scores(tile, *inputs)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        assert (got > 0).any()


def test_narrow_inputs_are_scored_in_fp32():
    q, k, w = indexer(40, 40, 3, torch.bfloat16)
    visibility = packed([40])
    expected = reference.index_scores(q, k, w)
    (tile,) = visibility.tiles(max_cells=1 << 19)
    got = tile_scores(tile, q, k, w)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-5)


def test_scores_with_tied_keys_keep_the_lowest_positions_twenty_times():
    """sglang#31115: keys with equal scores changed places from run to run."""
    visibility = stepped([90, 20], [30, 10], 128)
    q, w = normal(40, HEADS, WIDTH, seed=0), normal(40, HEADS, seed=1).abs()
    keys = torch.zeros(256, WIDTH, dtype=torch.float64)
    for _ in range(20):
        kept = select(q, keys, w, visibility, 8).positions_TK
        assert (kept == torch.arange(8)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_selection_survives_non_finite_keys(bad):
    """sglang#30698: infinite or NaN scores gave indices outside the pool."""
    visibility = packed([30, 3])
    q, k, w = indexer(33, 33, 5)
    k[4], k[31] = bad, bad
    kept = select(q, k, w, visibility, 6).positions_TK
    count = (visibility.last_T - visibility.first_T + 1).clamp(max=6)
    assert ((kept >= 0).sum(1) == count).all()
    assert (kept <= (visibility.last_T - visibility.first_T)[:, None]).all()


def test_queries_that_see_nothing_keep_nothing():
    """sglang#31123: rows of length 0 must be all -1."""
    kept = select(*indexer(3, 10, 0), masked([4, 2, 0], [3, 9, -1], 10), 2).positions_TK
    assert kept[0].tolist() == kept[2].tolist() == [-1, -1]
    assert (kept[1] >= 0).all()


def test_no_queries_give_an_empty_selection():
    kept = select(*indexer(0, 10, 0), stepped([5], [0], 10), 4).positions_TK
    assert kept.shape == (0, 4)


def test_no_tensor_grows_with_queries_times_keys():
    largest = []
    for length in (1024, 2048):
        inputs = indexer(length, length, 0, torch.float32)
        visibility = packed([length])
        with LargestTensor() as meter:
            select(*inputs, visibility, 16)
        largest.append(meter.numel)
        assert meter.numel < length * length
    assert largest[1] <= 2 * largest[0]

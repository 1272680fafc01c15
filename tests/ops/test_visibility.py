"""Blocks and tiles cover every query once and show it exactly the keys of its range."""

import pytest
import torch
from drawn import draw_selection, draw_visibility, packed, stepped

from yunque.ops.reference.attention import allowed


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("limits", [(1 << 19, 128), (500, 16), (1, 1)])
def test_tiles_show_each_query_its_visible_keys_once(seed, limits):
    drawn = draw_visibility(seed)
    visibility = drawn.visibility
    seen = torch.zeros(drawn.num_queries, drawn.num_rows, dtype=torch.int64)
    covered = torch.zeros(drawn.num_queries, dtype=torch.int64)
    selection = draw_selection(drawn, 4, seed)
    kept = torch.zeros_like(seen)
    for tile in visibility.tiles(max_cells=limits[0], max_queries=limits[1]):
        rows, keys = tile.queries(torch.arange(drawn.num_queries)), tile.keys(torch.arange(drawn.num_rows))
        covered.index_add_(0, rows.flatten(), torch.ones_like(rows.flatten()))
        for n, (row, key) in enumerate(zip(rows, keys, strict=True)):
            seen[row[:, None], key] += tile.visible()[n].long()
            kept[row[:, None], key] += tile.selected(selection)[n].long()
            if tile.sees_everything:
                assert tile.visible()[n].all()
        assert tile.max_visible == int((visibility.last_T - visibility.first_T)[rows].max()) + 1
    assert (covered == 1).all()
    assert torch.equal(seen.bool(), allowed(visibility, drawn.num_rows, None))
    assert torch.equal(kept.bool(), allowed(visibility, drawn.num_rows, selection))
    assert seen.max() <= 1


@pytest.mark.parametrize("seed", range(10))
def test_counts_of_visible_keys(seed):
    drawn = draw_visibility(seed)
    mask = allowed(drawn.visibility, drawn.num_rows, None)
    assert drawn.visibility.max_visible == mask.sum(1).max()
    assert drawn.visibility.mean_visible == pytest.approx(mask.sum(1).float().mean().item())
    rows = mask.any(0).nonzero()
    assert not len(rows) or drawn.visibility.num_rows > int(rows.max())


def test_equal_documents_form_one_block_and_short_neighbours_share_one():
    assert [(b.num_sequences, b.num_queries) for b in packed([50, 50, 50]).blocks] == [(3, 50)]
    (block,) = packed([3, 5, 1, 9]).blocks
    assert (block.num_sequences, block.num_queries, block.causal) == (1, 18, False)


def test_decode_of_neighbouring_sequences_is_one_block():
    (block,) = stepped([4, 9, 2], [1, 1, 1], 16).blocks
    assert (block.num_sequences, block.num_queries, block.num_keys, block.key_stride) == (3, 1, 10, 16)


def test_selection_rows_point_into_the_document():
    visibility = packed([3, 4])
    selection = draw_selection(draw_visibility(0), 2, 0)
    assert selection.rows(draw_visibility(0).visibility.first_T).min() >= 0
    assert visibility.first_T.tolist() == [0, 0, 0, 3, 3, 3, 3]

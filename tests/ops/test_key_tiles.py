"""Which queries gather, which share a range, and that nobody is left out."""

import torch

from yunque.ops.blockwise.key_tiles import GATHER_ABOVE, TileSize, _OwnKeys, _SharedKeys, key_tiles
from yunque.ops.visibility import Block, Selection, Visibility

SIZE = TileSize(numbers=4096, numbers_per_score=4, numbers_per_gathered_key=8)


def one_document(length: int) -> Visibility:
    first_T, last_T = torch.zeros(length, dtype=torch.int64), torch.arange(length)
    return Visibility.of(first_T, last_T, (Block(0, length, length, 0, length, length, 1, True),))


def newest(visibility: Visibility, k: int) -> Selection:
    """The ``k`` keys nearest to each query."""
    last_T1 = visibility.last_T[:, None].int()
    positions_TK = (last_T1 - k + 1).clamp(min=0) + torch.arange(k, dtype=torch.int32)
    return Selection(torch.where(positions_TK <= last_T1, positions_TK, -1))


def test_queries_far_from_their_first_key_gather_and_the_others_share_a_range():
    visibility, k = one_document(200), 16
    tiles = list(key_tiles(visibility, torch.ones(200), newest(visibility, k), SIZE))
    near = torch.cat([tile.rows_B for tile in tiles if isinstance(tile, _SharedKeys)])
    far = torch.cat([tile.rows_B for tile in tiles if isinstance(tile, _OwnKeys)])
    assert near.tolist() == list(range(GATHER_ABOVE * k))
    assert far.tolist() == list(range(GATHER_ABOVE * k, 200))


def test_dense_tiles_cover_every_live_query_once_and_stay_in_budget():
    weights_T = (torch.arange(500) % 3 > 0).float()
    tiles = list(key_tiles(one_document(500), weights_T, None, SIZE))
    assert torch.cat([tile.rows_B for tile in tiles]).tolist() == weights_T.nonzero().flatten().tolist()
    for tile in tiles:
        assert isinstance(tile, _SharedKeys)
        assert len(tile.rows_B) == 8 or len(tile.rows_B) * (tile.end - tile.begin) * 4 <= 4096 or tile is tiles[-1]


def test_hidden_keys_are_those_after_the_query():
    (tile,) = key_tiles(one_document(5), torch.ones(5), None, SIZE)
    logits_BXW = tile.hide_(torch.zeros(5, 1, 5)).squeeze(1)
    assert torch.equal(logits_BXW < -1e29, torch.ones(5, 5).triu(1).bool())


def test_gathered_products_equal_those_of_the_range():
    visibility, g = one_document(40), torch.Generator().manual_seed(0)
    pool_PR, query_TXR = torch.randn(40, 3, generator=g), torch.randn(40, 2, 3, generator=g)
    whole_TXP = torch.einsum("txr,pr->txp", query_TXR, pool_PR)
    for tile in key_tiles(visibility, torch.ones(40), newest(visibility, 2), SIZE):
        if isinstance(tile, _OwnKeys):
            got_BXW = tile.multiply(query_TXR[tile.rows_B], tile.take(pool_PR))
            expected_BXW = whole_TXP[tile.rows_B].gather(2, tile.keys_BW[:, None].expand(-1, 2, -1))
            torch.testing.assert_close(got_BXW, expected_BXW, rtol=1e-6, atol=1e-6)

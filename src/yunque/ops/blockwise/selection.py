"""Lightning indexer in tiles: score a few queries against the keys they see, keep the best, forget the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from yunque.ops.blockwise.topk import all_visible, top_positions
from yunque.ops.paged_rows import Rows
from yunque.ops.visibility import Selection, Tile, Visibility

# Shapes: T queries, P pool rows, J index heads, d index width, K kept; n sequences, q queries, k keys of a tile.

#: Scores held at once, in cells of one head (4 bytes each): the tile and its per-head products stay in cache.
TILE_CELLS = 1 << 19
#: Products [q, J, k] formed at once: they stay in the second-level cache.
PRODUCT_CELLS = 1 << 19


@torch.no_grad()
def select(
    q_TJd: Tensor, k_Pd: Rows, w_TJ: Tensor, visibility: Visibility, k: int, *, always_score: bool = False
) -> Selection:
    """As ``reference.selection.select``. Tiles whose queries see at most ``k`` keys are not scored unless
    ``always_score`` (the result is the same: every visible key). Memory grows with the tile, not with T x P."""
    tiles = visibility.tiles(max_cells=TILE_CELLS)
    positions_TK = torch.empty((q_TJd.shape[0], k), dtype=torch.int32, device=q_TJd.device)
    for tile in tiles:
        first_nq, last_nq = tile.bounds
        first_Q, last_Q = first_nq.reshape(-1), last_nq.reshape(-1)
        if tile.max_visible <= k and not always_score:
            kept_QK = all_visible(first_Q, last_Q, k)
        else:
            scores_QN = tile_scores(tile, q_TJd, k_Pd, w_TJ).flatten(0, 1)
            kept_QK = top_positions(scores_QN, first_Q, last_Q, k, all_seen=tile.sees_everything)
        if len(tiles) == 1:
            return Selection(kept_QK, is_full=tile.sees_everything and tile.num_keys >= k)
        tile.queries(positions_TK).copy_(kept_QK.view(*first_nq.shape, k))
    return Selection(positions_TK)


def tile_scores(tile: Tile, q_TJd: Tensor, k_Pd: Rows, w_TJ: Tensor) -> Tensor:
    """Index scores of one tile, fp32 (float64 for float64 queries) [n, q, num_keys]."""
    wide = torch.promote_types(q_TJd.dtype, torch.float32)
    q_nqJd, keys_nkd, w_nqJ = tile.queries(q_TJd).to(wide), tile.keys(k_Pd), tile.queries(w_TJ).to(wide)
    n, q, heads, _ = q_nqJd.shape
    q_nxd = q_nqJd.flatten(1, 2)
    if tile.num_keys * q_nxd[:, :, 0].numel() <= PRODUCT_CELLS:
        products = torch.matmul(q_nxd, keys_nkd.to(wide).transpose(1, 2)).relu_()
        return torch.matmul(w_nqJ.unsqueeze(2), products.view(n, q, heads, -1)).squeeze(2)
    out_nqk = torch.empty((n, q, tile.num_keys), dtype=wide, device=q_TJd.device)
    key_step = max(64, PRODUCT_CELLS // q_nxd[:, :, 0].numel())
    for start in range(0, tile.num_keys, key_step):
        part_nkd = keys_nkd[:, start : start + key_step].to(wide)
        products = torch.matmul(q_nxd, part_nkd.transpose(1, 2)).relu_()
        head_sum = torch.matmul(w_nqJ.unsqueeze(2), products.view(n, q, heads, -1))
        out_nqk[:, :, start : start + key_step] = head_sum.squeeze(2)
    return out_nqk

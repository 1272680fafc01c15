"""The indexer's loss in tiles of queries, with its gradients formed during the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from yunque.ops.blockwise.formed_gradients import wants_gradient, with_gradients
from yunque.ops.blockwise.key_tiles import KeyTile, TileSize, key_tiles
from yunque.ops.reference.index_kl import AttentionTarget, IndexKl
from yunque.ops.visibility import Selection, Visibility

# Shapes: T queries, P pool rows, H attention heads, R latent width, J index heads, d index width;
# B queries of a tile, W keys of it.


def index_kl(
    query_TJd: Tensor,
    key_Pd: Tensor,
    head_weight_TJ: Tensor,
    targets: Sequence[AttentionTarget],
    visibility: Visibility,
    *,
    weights_T: Tensor,
    selection: Selection | None = None,
) -> IndexKl:
    """As ``reference.index_kl``, with memory for one tile of scores instead of [T, P].

    Gradients reach ``query_TJd``, ``key_Pd`` and ``head_weight_TJ`` only. Queries of weight 0, and queries
    that see or kept nothing, are skipped before any work. Arithmetic is float32 (float64 for float64 index
    queries). ``weights_T`` is a constant, and a second derivative is refused. Where few keys are kept of many,
    the keys' gradient is added up by ``index_add_``: its order, hence its last bits, is fixed on a CPU, and
    elsewhere under ``torch.use_deterministic_algorithms``.

    With u = weight * (softmax(I) - p) and g[t, j, s] = u[t, s] * [query[t, j] . key[s] > 0]:
    d query = head_weight * (g @ key), d head_weight = query . (g @ key), d key = g.T @ (head_weight * query).
    """
    _check_indexer(query_TJd, key_Pd, head_weight_TJ, weights_T)
    _check_targets(targets, query_TJd.shape[0], key_Pd.shape[0], selection)
    wide = torch.promote_types(query_TJd.dtype, torch.float32)
    inputs = (query_TJd, key_Pd, head_weight_TJ)
    gradients = None
    if any(wants_gradient(tensor) for tensor in inputs):
        gradients = _Gradients(
            torch.zeros_like(query_TJd),
            torch.zeros_like(key_Pd, dtype=wide),
            torch.zeros_like(head_weight_TJ),
        )
    with torch.no_grad(), torch.autocast(query_TJd.device.type, enabled=False):
        wide_targets = [AttentionTarget(t.query_THR, t.pool_PR.to(wide), t.scale) for t in targets]
        indexer = _Indexer(query_TJd, key_Pd.to(wide), head_weight_TJ)
        sums_3 = torch.zeros(3, dtype=wide, device=query_TJd.device)
        for tile in key_tiles(visibility, weights_T, selection, _tile_size(indexer, wide_targets)):
            target_BW = _target(tile, wide_targets, wide)
            sums_3 += _tile_loss(tile, target_BW, indexer, weights_T, gradients)
    formed = (None, None, None)
    if gradients is not None:
        formed = (gradients.query_TJd, gradients.key_Pd.to(key_Pd.dtype), gradients.head_weight_TJ)
    total = with_gradients(sums_3[0], inputs, formed, name="index_kl")
    return IndexKl(total, sums_3[1], sums_3[2])


@dataclass(frozen=True)
class _Indexer:
    """The indexer's side; the keys are wide already, the rest is widened tile by tile."""

    query_TJd: Tensor
    key_Pd: Tensor
    head_weight_TJ: Tensor


@dataclass(frozen=True)
class _Gradients:
    """Filled tile by tile; the one of the keys accumulates and is wide."""

    query_TJd: Tensor
    key_Pd: Tensor
    head_weight_TJ: Tensor


def _tile_size(indexer: _Indexer, targets: Sequence[AttentionTarget]) -> TileSize:
    _, index_heads, index_dim = indexer.query_TJd.shape
    heads = max(index_heads, *(target.query_THR.shape[1] for target in targets))
    widest = max(heads, index_dim, *(target.pool_PR.shape[1] for target in targets))
    return TileSize.on(indexer.query_TJd.device, numbers_per_score=heads, numbers_per_gathered_key=widest)


def _target(tile: KeyTile, targets: Sequence[AttentionTarget], wide: torch.dtype) -> Tensor:
    """Attention over the tile's keys, averaged over heads and targets [B, W]."""
    target_BW = None
    for target in targets:
        query_BHR = target.query_THR.index_select(0, tile.rows_B).to(wide).mul_(target.scale)
        logits_BHW = tile.hide_(tile.multiply(query_BHR, tile.take(target.pool_PR)))
        heads_BHW = torch.softmax(logits_BHW, -1, out=logits_BHW)
        num_rows, num_heads, _ = heads_BHW.shape
        share_B1H = heads_BHW.new_full((num_rows, 1, num_heads), 1 / (num_heads * len(targets)))
        part_BW = torch.bmm(share_B1H, heads_BHW).squeeze(1)
        target_BW = part_BW if target_BW is None else target_BW.add_(part_BW)
    assert target_BW is not None
    return target_BW


def _tile_loss(
    tile: KeyTile, target_BW: Tensor, indexer: _Indexer, weights_T: Tensor, gradients: _Gradients | None
) -> Tensor:
    """Weighted KL, weighted entropy and weight of one tile [3]; adds to ``gradients``."""
    wide = target_BW.dtype
    weights_B = weights_T.index_select(0, tile.rows_B).to(wide)
    query_BJd = indexer.query_TJd.index_select(0, tile.rows_B).to(wide)
    head_weight_BJ = indexer.head_weight_TJ.index_select(0, tile.rows_B).to(wide)
    keys = tile.take(indexer.key_Pd)
    products_BJW = tile.multiply(query_BJd, keys).relu_()
    scores_BW = tile.hide_(torch.bmm(head_weight_BJ[:, None], products_BJW)).squeeze(1)
    log_probs_BW = torch.log_softmax(scores_BW, -1, out=scores_BW)

    # Batched dot products instead of sums of temporaries. A hidden key counts 0 * (large) and 0 * log(tiny).
    log_target_BW = target_BW.clamp_min(torch.finfo(wide).tiny).log_()
    cross_B = -torch.bmm(target_BW[:, None], log_probs_BW[:, :, None]).flatten()
    entropy_B = -torch.bmm(target_BW[:, None], log_target_BW[:, :, None]).flatten()
    if gradients is not None:
        # exp() of hidden keys would be 30 times slower than softmax, which is the same on log-probabilities.
        errors_BW = torch.softmax(log_probs_BW, -1, out=log_probs_BW).sub_(target_BW).mul_(weights_B[:, None])
        passed_BJW = products_BJW.sign_().mul_(errors_BW[:, None])
        pulled_BJd = tile.pull(passed_BJW, keys)
        tile.push_(gradients.key_Pd, passed_BJW, head_weight_BJ[:, :, None] * query_BJd)
        # relu(q . k) = [q . k > 0] q . k, so a head's weight needs no second look at the tile.
        grad_BJ = (query_BJd * pulled_BJd).sum(-1)
        grad_BJd = pulled_BJd.mul_(head_weight_BJ[:, :, None])
        gradients.head_weight_TJ.index_copy_(0, tile.rows_B, grad_BJ.to(gradients.head_weight_TJ.dtype))
        gradients.query_TJd.index_copy_(0, tile.rows_B, grad_BJd.to(gradients.query_TJd.dtype))
    return torch.stack([weights_B @ (cross_B - entropy_B), weights_B @ entropy_B, weights_B.sum()])


def _check_indexer(query_TJd: Tensor, key_Pd: Tensor, head_weight_TJ: Tensor, weights_T: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in (query_TJd, key_Pd, head_weight_TJ, weights_T)]
    num_queries, num_heads, dim = shapes[0] if query_TJd.ndim == 3 else (-1, -1, -1)
    if shapes[1:] != [(key_Pd.shape[0], dim), (num_queries, num_heads), (num_queries,)]:
        raise ValueError(
            f"query {shapes[0]}, key {shapes[1]}, head weight {shapes[2]}, weights {shapes[3]} are not "
            "[T, J, d], [P, d], [T, J], [T]"
        )
    if weights_T.requires_grad:
        raise ValueError("weights_T requires a gradient, but it is a constant here: detach it")


def _check_targets(
    targets: Sequence[AttentionTarget], num_queries: int, num_rows: int, selection: Selection | None
) -> None:
    if not targets:
        raise ValueError("no attention target: the indexer needs at least one layer to imitate")
    for target in targets:
        query, pool = tuple(target.query_THR.shape), tuple(target.pool_PR.shape)
        if len(query) != 3 or query[0] != num_queries or pool != (num_rows, query[2]):
            raise ValueError(
                f"target query {query} and pool {pool} are not [T, H, R] and [P, R] "
                f"for {num_queries} queries and {num_rows} pool rows"
            )
    if selection is not None:
        shape = tuple(selection.positions_TK.shape)
        if len(shape) != 2 or shape[0] != num_queries or shape[1] < 1:
            raise ValueError(f"selection {shape} is not [T, K] with K >= 1 for {num_queries} queries")

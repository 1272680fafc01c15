"""Absorbed attention over latent rows: all visible rows, or the gathered rows of a selection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from yunque.ops.paged_rows import Rows, require_plain, row_width, take_rows
from yunque.ops.visibility import Selection, Tile, Visibility

# Shapes: T queries, P pool rows, H heads, R latent + rope width, C latent width (values), K kept;
# n sequences, q queries and k keys of a tile; G gathered queries.

#: Gathered values held at once (4 bytes each in fp32).
GATHER_CELLS = 1 << 19
#: Logits held at once in the dense form.
LOGIT_CELLS = 1 << 21


def attend_latent(
    q_THR: Tensor,
    pool_PR: Rows,
    visibility: Visibility,
    *,
    scale: float,
    value_dim: int,
    selection: Selection | None,
) -> Tensor:
    """As ``reference.attention.attend``, [T, H, C], in tiles; memory does not grow with T x P. Differentiable."""
    if selection is None:
        if not torch.is_grad_enabled():
            return _attend_visible(q_THR, pool_PR, visibility, scale, value_dim)
        out = _Visible.apply(q_THR, require_plain(pool_PR), visibility, scale, value_dim)
        assert isinstance(out, Tensor)
        return out
    index = (selection.positions_TK, visibility.first_T)
    if not torch.is_grad_enabled():
        parts = _parts(q_THR, pool_PR, *index, is_full=selection.is_full)
        return _attend_gathered(q_THR, parts, scale, value_dim)
    out = _Gathered.apply(q_THR, require_plain(pool_PR), *index, scale, value_dim)
    assert isinstance(out, Tensor)
    return out


def _attend_gathered(q_THR: Tensor, parts: Iterator[_Part], scale: float, value_dim: int) -> Tensor:
    outs = []
    for part in parts:
        weights = part.weights(q_THR, scale).to(q_THR.dtype)
        outs.append(torch.bmm(weights, part.rows_GKR[..., :value_dim]))
    return outs[0] if len(outs) == 1 else torch.cat(outs) if outs else q_THR[..., :value_dim]


def _attend_visible(q_THR: Tensor, pool_PR: Rows, visibility: Visibility, scale: float, value_dim: int) -> Tensor:
    out_THC = q_THR.new_empty((*q_THR.shape[:2], value_dim))
    tiles = _visible_tiles(visibility, q_THR.shape[1])
    for tile in tiles:
        weights, rows_nkR = _visible_weights(tile, q_THR, pool_PR, scale)
        values = torch.matmul(weights.to(q_THR.dtype).flatten(1, 2), rows_nkR[..., :value_dim])
        if len(tiles) == 1:
            return values.view(out_THC.shape)
        tile.queries(out_THC).copy_(values.unflatten(1, weights.shape[1:3]))
    return out_THC


def _visible_tiles(visibility: Visibility, heads: int) -> tuple[Tile, ...]:
    return visibility.tiles(max_cells=LOGIT_CELLS // heads)


def _visible_weights(tile: Tile, q_THR: Tensor, pool_PR: Rows, scale: float) -> tuple[Tensor, Tensor]:
    """Attention probabilities fp32 (or wider) [n, q, H, k] of a tile and the pool rows [n, k, R] they belong to."""
    q_nqHR, rows_nkR = tile.queries(q_THR), tile.keys(pool_PR)
    n, q, heads, _ = q_nqHR.shape
    logits = torch.matmul(q_nqHR.flatten(1, 2), rows_nkR.transpose(1, 2)).view(n, q, heads, -1)
    logits = logits.to(_wide(q_THR)).mul_(scale)
    if tile.sees_everything:
        return torch.softmax(logits, dim=-1), rows_nkR
    return _softmax(logits.masked_fill_(~tile.visible()[:, :, None], -torch.inf)), rows_nkR


class _Visible(torch.autograd.Function):
    """Attention over all visible rows; the backward pass makes each tile's probabilities again."""

    @staticmethod
    def forward(
        ctx: Any, q_THR: Tensor, pool_PR: Tensor, visibility: Visibility, scale: float, value_dim: int
    ) -> Tensor:
        ctx.save_for_backward(q_THR, pool_PR)
        ctx.visibility, ctx.scale, ctx.value_dim = visibility, scale, value_dim
        return _attend_visible(q_THR, pool_PR, visibility, scale, value_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        q_THR, pool_PR = ctx.saved_tensors
        grad_THC = grads[0].contiguous()
        d_q, d_pool = torch.zeros_like(q_THR), torch.zeros_like(pool_PR)
        for tile in _visible_tiles(ctx.visibility, q_THR.shape[1]):
            weights, rows_nkR = _visible_weights(tile, q_THR, pool_PR, ctx.scale)
            shape, weights = weights.shape[1:3], weights.flatten(1, 2)
            grad, queries = tile.queries(grad_THC).flatten(1, 2), tile.queries(q_THR).flatten(1, 2)
            d_logits = _logit_gradient(weights, grad, rows_nkR[..., : ctx.value_dim], ctx.scale)
            tile.queries(d_q).copy_(torch.matmul(d_logits, rows_nkR).unflatten(1, shape))
            d_rows = torch.matmul(d_logits.transpose(1, 2), queries)
            d_rows[..., : ctx.value_dim] += torch.matmul(weights.to(q_THR.dtype).transpose(1, 2), grad)
            tile.keys(d_pool).add_(d_rows)
        return d_q, d_pool, None, None, None


def _logit_gradient(weights: Tensor, grad: Tensor, values: Tensor, scale: float) -> Tensor:
    """Gradient of q . k from the output's gradient [B, X, C], probabilities [B, X, W] and values [B, W, C]."""
    d_weights = torch.matmul(grad, values.transpose(1, 2)).to(weights.dtype)
    mean = (d_weights * weights).sum(dim=-1, keepdim=True)
    return ((d_weights - mean) * weights * scale).to(grad.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis; a row without any key gives zeros, not NaN."""
    return torch.softmax(logits, dim=-1).nan_to_num_()


class _Gathered(torch.autograd.Function):
    """Attention over gathered rows; the backward pass gathers again, so nothing of size T x K x R is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THR: Tensor,
        pool_PR: Tensor,
        positions_TK: Tensor,
        first_T: Tensor,
        scale: float,
        value_dim: int,
    ) -> Tensor:
        ctx.save_for_backward(q_THR, pool_PR, positions_TK, first_T)
        ctx.scale, ctx.value_dim = scale, value_dim
        parts = _parts(q_THR, pool_PR, positions_TK, first_T)
        return _attend_gathered(q_THR, parts, scale, value_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        q_THR, pool_PR, positions_TK, first_T = ctx.saved_tensors
        grad_THC = grads[0].contiguous()
        d_q, d_pool = torch.empty_like(q_THR), torch.zeros_like(pool_PR)
        value_dim = ctx.value_dim
        for part in _parts(q_THR, pool_PR, positions_TK, first_T):
            weights, grad_GHC = part.weights(q_THR, ctx.scale), grad_THC[part.span]
            d_logits = _logit_gradient(weights, grad_GHC, part.rows_GKR[..., :value_dim], ctx.scale)
            torch.bmm(d_logits, part.rows_GKR, out=d_q[part.span])
            d_rows = torch.bmm(d_logits.transpose(1, 2), q_THR[part.span])
            d_rows[..., :value_dim] += torch.bmm(weights.to(q_THR.dtype).transpose(1, 2), grad_GHC)
            d_pool.index_add_(0, part.index, d_rows.flatten(0, 1))
        return d_q, d_pool, None, None, None, None


class _Part:
    """Some queries with the pool rows they kept."""

    def __init__(self, span: slice, pool_PR: Rows, positions_GK: Tensor, first_G: Tensor, *, is_full: bool) -> None:
        self.span = span
        # Positions ascend and padding comes last, so the last column tells whether there is any.
        is_full = is_full or int(positions_GK[:, -1].amin()) >= 0
        self.hidden_GK = None if is_full else positions_GK < 0
        kept_GK = positions_GK if self.hidden_GK is None else positions_GK.clamp(min=0)
        self.index = (kept_GK + first_G[:, None]).flatten()
        self.rows_GKR = take_rows(pool_PR, self.index).view(*positions_GK.shape, -1)

    def weights(self, q_THR: Tensor, scale: float) -> Tensor:
        """Attention probabilities fp32 (or wider) [G, H, K]; padding gets 0, and so does a query that kept nothing."""
        logits = torch.bmm(q_THR[self.span], self.rows_GKR.transpose(1, 2)).to(_wide(q_THR)).mul_(scale)
        if self.hidden_GK is None:
            return torch.softmax(logits, dim=-1)
        return _softmax(logits.masked_fill_(self.hidden_GK[:, None], -torch.inf))


def _parts(
    q_THR: Tensor, pool_PR: Rows, positions_TK: Tensor, first_T: Tensor, *, is_full: bool = False
) -> Iterator[_Part]:
    step = max(1, GATHER_CELLS // (positions_TK.shape[1] * row_width(pool_PR)))
    for start in range(0, q_THR.shape[0], step):
        span = slice(start, min(start + step, q_THR.shape[0]))
        yield _Part(span, pool_PR, positions_TK[span], first_T[span], is_full=is_full)

"""Absorbed attention over latent rows: all visible rows, or the gathered rows of a selection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from yunque.ops.visibility import Selection, Visibility

# Shapes: T queries, P pool rows, H heads, R latent + rope width, C latent width (values), K kept;
# n sequences, q queries and k keys of a tile; G gathered queries.

#: Gathered values held at once (4 bytes each in fp32).
GATHER_CELLS = 1 << 19
#: Logits held at once in the dense form.
LOGIT_CELLS = 1 << 21


def attend_latent(
    q_THR: Tensor, pool_PR: Tensor, visibility: Visibility, *, scale: float, value_dim: int, selection: Selection | None
) -> Tensor:
    """As ``reference.attention.attend``, [T, H, C], in tiles; memory does not grow with T x P. Differentiable."""
    if selection is None:
        return _attend_visible(q_THR, pool_PR, visibility, scale, value_dim)
    inputs = (q_THR, pool_PR, selection.positions_TK, visibility.first_T, scale, value_dim)
    if not torch.is_grad_enabled():
        return _attend_gathered(*inputs)
    out = _Gathered.apply(*inputs)
    assert isinstance(out, Tensor)
    return out


def _attend_gathered(
    q_THR: Tensor, pool_PR: Tensor, positions_TK: Tensor, first_T: Tensor, scale: float, value_dim: int
) -> Tensor:
    outs = []
    for part in _parts(q_THR, pool_PR, positions_TK, first_T):
        weights = part.weights(q_THR, scale).to(q_THR.dtype)
        outs.append(torch.bmm(weights, part.rows_GKR[..., :value_dim]))
    return outs[0] if len(outs) == 1 else torch.cat(outs) if outs else q_THR[..., :value_dim]


def _attend_visible(q_THR: Tensor, pool_PR: Tensor, visibility: Visibility, scale: float, value_dim: int) -> Tensor:
    out_THC = q_THR.new_empty((*q_THR.shape[:2], value_dim))
    heads = q_THR.shape[1]
    for tile in visibility.tiles(max_cells=LOGIT_CELLS // heads):
        q_nqHR, rows_nkR = tile.queries(q_THR), tile.keys(pool_PR)
        n, q = q_nqHR.shape[:2]
        logits = torch.matmul(q_nqHR.flatten(1, 2), rows_nkR.transpose(1, 2)).view(n, q, heads, -1).float() * scale
        if not tile.sees_everything:
            logits = logits.masked_fill(~tile.visible()[:, :, None], -torch.inf)
        weights = _softmax(logits).to(q_THR.dtype)
        values = torch.matmul(weights.view(n, q * heads, -1), rows_nkR[..., :value_dim])
        tile.queries(out_THC).copy_(values.view(n, q, heads, value_dim))
    return out_THC


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis; a row without any key gives zeros, not NaN."""
    weights = torch.softmax(logits, dim=-1)
    return weights.nan_to_num_() if not weights.requires_grad else weights.nan_to_num()


class _Gathered(torch.autograd.Function):
    """Attention over gathered rows; the backward pass gathers again, so nothing of size T x K x R is kept."""

    @staticmethod
    def forward(
        ctx: Any, q_THR: Tensor, pool_PR: Tensor, positions_TK: Tensor, first_T: Tensor, scale: float, value_dim: int
    ) -> Tensor:
        ctx.save_for_backward(q_THR, pool_PR, positions_TK, first_T)
        ctx.scale, ctx.value_dim = scale, value_dim
        return _attend_gathered(q_THR, pool_PR, positions_TK, first_T, scale, value_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        q_THR, pool_PR, positions_TK, first_T = ctx.saved_tensors
        grad_THC = grads[0].contiguous()
        d_q, d_pool = torch.empty_like(q_THR), torch.zeros_like(pool_PR)
        value_dim = ctx.value_dim
        for part in _parts(q_THR, pool_PR, positions_TK, first_T):
            weights, grad_GHC = part.weights(q_THR, ctx.scale), grad_THC[part.span]
            d_weights = torch.bmm(grad_GHC, part.rows_GKR[..., :value_dim].transpose(1, 2)).float()
            mean = (d_weights * weights).sum(dim=-1, keepdim=True)
            d_logits = ((d_weights - mean) * weights * ctx.scale).to(q_THR.dtype)
            torch.bmm(d_logits, part.rows_GKR, out=d_q[part.span])
            d_rows = torch.bmm(d_logits.transpose(1, 2), q_THR[part.span])
            d_rows[..., :value_dim] += torch.bmm(weights.to(q_THR.dtype).transpose(1, 2), grad_GHC)
            d_pool.index_add_(0, part.index, d_rows.flatten(0, 1))
        return d_q, d_pool, None, None, None, None


class _Part:
    """Some queries with the pool rows they kept."""

    def __init__(self, span: slice, pool_PR: Tensor, positions_GK: Tensor, first_G: Tensor) -> None:
        self.span = span
        self.index = (positions_GK.clamp(min=0).long() + first_G[:, None]).flatten()
        self.rows_GKR = pool_PR.index_select(0, self.index).view(*positions_GK.shape, -1)
        self.hidden_GK = positions_GK < 0 if bool((positions_GK[:, -1] < 0).any()) else None

    def weights(self, q_THR: Tensor, scale: float) -> Tensor:
        """Attention probabilities fp32 [G, H, K]; padding gets 0, and so does a query that kept nothing."""
        logits = torch.bmm(q_THR[self.span], self.rows_GKR.transpose(1, 2)).float().mul_(scale)
        if self.hidden_GK is None:
            return torch.softmax(logits, dim=-1)
        return _softmax(logits.masked_fill_(self.hidden_GK[:, None], -torch.inf))


def _parts(q_THR: Tensor, pool_PR: Tensor, positions_TK: Tensor, first_T: Tensor):  # noqa: ANN202
    step = max(1, GATHER_CELLS // (positions_TK.shape[1] * pool_PR.shape[1]))
    for start in range(0, q_THR.shape[0], step):
        span = slice(start, min(start + step, q_THR.shape[0]))
        yield _Part(span, pool_PR, positions_TK[span], first_T[span])

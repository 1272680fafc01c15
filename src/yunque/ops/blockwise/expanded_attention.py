"""Attention with keys and values expanded per head: fused kernels, with masks built one tile at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from yunque.ops.visibility import Block, Selection, Tile, Visibility

# Shapes: T queries, P pool rows, H heads, E key width, V value width; n sequences, q queries, k keys of a tile.

#: Up to this many visible keys the masks are kept for the backward pass (4 bytes a key and query: linear in T).
KEPT_MASK_KEYS = 1024
#: Queries of a masked tile: enough rows for full GEMM speed, few enough that the mask stays small.
MASKED_QUERIES = 256


def attend_expanded(
    q_THE: Tensor,
    k_PHE: Tensor,
    v_PHV: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    selection: Selection | None,
) -> Tensor:
    """softmax(scale q k^T) v over the allowed rows, [T, H, V]; same contract as ``reference.attention.attend`` with
    per-head keys and values. Differentiable; memory is linear in T and P."""
    value_dim = v_PHV.shape[-1]
    if value_dim < q_THE.shape[-1]:
        v_PHV = F.pad(v_PHV, (0, q_THE.shape[-1] - value_dim))
    elif value_dim > q_THE.shape[-1]:
        # The fused kernels want equal widths; zeros in q and k change no product.
        q_THE, k_PHE = (F.pad(x, (0, value_dim - x.shape[-1])) for x in (q_THE, k_PHE))
    if selection is None and visibility.blocks and all(map(_is_plain_causal, visibility.blocks)):
        return _attend_causal(q_THE, k_PHE, v_PHV, visibility, scale)[..., :value_dim]
    if visibility.max_visible <= KEPT_MASK_KEYS:
        return _attend_masked(q_THE, k_PHE, v_PHV, visibility, scale, selection)[..., :value_dim]
    positions = None if selection is None else selection.positions_TK
    out = _Recomputed.apply(q_THE, k_PHE, v_PHV, visibility, positions, scale)
    assert isinstance(out, Tensor)
    return out[..., :value_dim]


def _is_plain_causal(block: Block) -> bool:
    return block.causal and block.num_keys == block.num_queries


def _attend_causal(q_THE: Tensor, k_PHE: Tensor, v_PHV: Tensor, visibility: Visibility, scale: float) -> Tensor:
    parts: list[Tensor] = []
    for block in visibility.blocks:
        q, k, v = (x.transpose(1, 2) for x in (block.queries(q_THE), block.keys(k_PHE), block.keys(v_PHV)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_masked(
    q_THE: Tensor,
    k_PHE: Tensor,
    v_PHV: Tensor,
    visibility: Visibility,
    scale: float,
    selection: Selection | None,
) -> Tensor:
    parts: list[Tensor] = []
    for _, tiles in groupby(_tiles(visibility), key=lambda tile: (id(tile.block), tile.n0)):
        rows = [_attend_tile(tile, (q_THE, k_PHE, v_PHV), selection, scale) for tile in tiles]
        parts.append((rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)).flatten(0, 1))
    return torch.cat(parts) if parts else torch.zeros_like(q_THE)


class _Recomputed(torch.autograd.Function):
    """Masked attention tile by tile; the backward pass makes each tile's mask and probabilities again."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THE: Tensor,
        k_PHE: Tensor,
        v_PHV: Tensor,
        visibility: Visibility,
        positions: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q_THE, k_PHE, v_PHV, positions)
        ctx.visibility, ctx.scale = visibility, scale
        return _attend_masked(q_THE, k_PHE, v_PHV, visibility, scale, _selection(positions))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THE, k_PHE, v_PHV, positions = ctx.saved_tensors
        d_q, d_k, d_v = torch.zeros_like(q_THE), torch.zeros_like(k_PHE), torch.zeros_like(v_PHV)
        grad_THV = grads[0].contiguous()
        for tile in _tiles(ctx.visibility):
            inputs = [x.detach().requires_grad_() for x in _heads_first(tile, (q_THE, k_PHE, v_PHV))]
            with torch.enable_grad():
                part = _attend(inputs, _bias(tile, _selection(positions), q_THE.dtype), ctx.scale)
            d_q_part, d_k_part, d_v_part = torch.autograd.grad(part, inputs, tile.queries(grad_THV))
            tile.queries(d_q).copy_(d_q_part.transpose(1, 2))
            tile.keys(d_k).add_(d_k_part.transpose(1, 2))
            tile.keys(d_v).add_(d_v_part.transpose(1, 2))
        return d_q, d_k, d_v, None, None, None


def _tiles(visibility: Visibility) -> tuple[Tile, ...]:
    return visibility.tiles(max_cells=MASKED_QUERIES * 4096, max_queries=MASKED_QUERIES)


def _selection(positions: Tensor | None) -> Selection | None:
    return None if positions is None else Selection(positions)


def _bias(tile: Tile, selection: Selection | None, dtype: torch.dtype) -> Tensor | None:
    """Additive mask [n, 1, q, k], or ``None`` where every key counts."""
    if selection is None and tile.sees_everything:
        return None
    mask_nqk = tile.visible() if selection is None else tile.selected(selection)
    bias = torch.zeros(mask_nqk.shape, dtype=dtype, device=mask_nqk.device)
    return bias.masked_fill_(~mask_nqk, -torch.inf)[:, None]


def _heads_first(tile: Tile, qkv: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """The tile's queries [n, H, q, E], keys [n, H, k, E] and values [n, H, k, V]."""
    return [x.transpose(1, 2) for x in (tile.queries(qkv[0]), tile.keys(qkv[1]), tile.keys(qkv[2]))]


def _attend(qkv: Sequence[Tensor], bias: Tensor | None, scale: float) -> Tensor:
    """Attention of heads-first tensors under an additive mask, [n, q, H, V]."""
    q, k, v = qkv
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).transpose(1, 2)


def _attend_tile(tile: Tile, qkv: tuple[Tensor, Tensor, Tensor], selection: Selection | None, scale: float) -> Tensor:
    return _attend(_heads_first(tile, qkv), _bias(tile, selection, qkv[0].dtype), scale)

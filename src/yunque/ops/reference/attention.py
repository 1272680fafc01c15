"""Latent attention over all pool rows at once: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from yunque.ops.visibility import Selection, Visibility

# Shapes: T queries, P pool rows, H heads, R latent + rope width, C latent width (values), K kept.


def allowed(visibility: Visibility, num_rows: int, selection: Selection | None) -> Tensor:
    """Bool [T, P]: the query sees the row, and kept it where there is a selection."""
    rows = torch.arange(num_rows, device=visibility.first_T.device)
    mask = (rows >= visibility.first_T[:, None]) & (rows <= visibility.last_T[:, None])
    if selection is None:
        return mask
    chosen = torch.zeros_like(mask, dtype=torch.int32)
    chosen.scatter_add_(1, selection.rows(visibility.first_T), (selection.positions_TK >= 0).int())
    return mask & (chosen > 0)


def attend(
    q_THR: Tensor,
    pool_PR: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    value_dim: int,
    selection: Selection | None,
) -> Tensor:
    """Absorbed MLA: out[t, h] = sum_s softmax_s(scale * q[t, h] . pool[s]) pool[s, :C] over the allowed rows.

    Returns [T, H, C]; a query that sees nothing gets zeros (DeepSeek-V2 report, section 2.1; softmax in fp32).
    """
    mask_TP = allowed(visibility, pool_PR.shape[0], selection)
    wide = torch.promote_types(q_THR.dtype, torch.float32)
    logits = torch.einsum("thr,pr->thp", q_THR.to(wide), pool_PR.to(wide)) * scale
    weights = torch.softmax(logits.masked_fill(~mask_TP[:, None], -torch.inf), dim=-1).nan_to_num()
    return torch.einsum("thp,pc->thc", weights, pool_PR[:, :value_dim].to(wide)).to(q_THR.dtype)

"""Row-wise primitives: linear maps and norms whose result for a row may be made independent of its neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Shapes: N rows (all leading axes), X in, Y out.

#: Rows of one product in batch-invariant mode: every product has this many, padded with zeros.
INVARIANT_ROWS = 32


def linear(x_NX: Tensor, weight_YX: Tensor, *, invariant: bool = False) -> Tensor:
    """x @ weight.T. With ``invariant`` rows go through products of a fixed shape (``INVARIANT_ROWS`` rows, padded),
    so that the same row gives the same bits in any batch; a library may pick another kernel for another shape."""
    if not invariant:
        return F.linear(x_NX, weight_YX)
    rows = x_NX.reshape(-1, x_NX.shape[-1])
    count = rows.shape[0]
    padded = F.pad(rows, (0, 0, 0, -count % INVARIANT_ROWS))
    parts = [F.linear(part, weight_YX) for part in padded.split(INVARIANT_ROWS)]
    return torch.cat(parts)[:count].view(*x_NX.shape[:-1], -1) if count else F.linear(x_NX, weight_YX)


def per_head(x_THX: Tensor, weight_HXY: Tensor, *, invariant: bool = False) -> Tensor:
    """x[t, h] @ weight[h] for every head, [T, H, Y]; ``invariant`` as in ``linear``."""
    if not invariant:
        return torch.bmm(x_THX.transpose(0, 1), weight_HXY).transpose(0, 1)
    parts = [torch.bmm(part.transpose(0, 1), weight_HXY) for part in pad_rows(x_THX).split(INVARIANT_ROWS)]
    return torch.cat(parts, dim=1).transpose(0, 1)[: x_THX.shape[0]]


def rms_norm(x_NX: Tensor, weight_X: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; fp32 inside, result in the type of ``x``."""
    return F.rms_norm(x_NX, (x_NX.shape[-1],), weight_X, eps)


def layer_norm(x_NX: Tensor, weight_X: Tensor, bias_X: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis, in fp32 or wider; the type of ``x``."""
    wide = torch.promote_types(x_NX.dtype, torch.float32)
    out = F.layer_norm(x_NX.to(wide), (x_NX.shape[-1],), weight_X.to(wide), bias_X.to(wide), eps)
    return out.to(x_NX.dtype)


def pad_rows(x_NX: Tensor) -> Tensor:
    """Zero rows at the end up to a multiple of ``INVARIANT_ROWS``: element-wise kernels then have no remainder,
    which they may compute by other instructions than the rest."""
    return F.pad(x_NX, (*[0, 0] * (x_NX.dim() - 1), 0, -x_NX.shape[0] % INVARIANT_ROWS))

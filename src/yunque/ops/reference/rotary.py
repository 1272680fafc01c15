"""Rotary position embedding in both pair layouts."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: T tokens, F pairs (half the rotary width); x is [T, ..., 2F].


def rotary_table(positions_T: Tensor, *, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / width) for the pairs i, each fp32 [T, width / 2] (RoFormer, eq. 15)."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=positions_T.device) / width
    angles_TF = positions_T.float()[:, None] * (1.0 / theta**exponent)
    return angles_TF.cos(), angles_TF.sin()


def rotate(x: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the pairs of the last axis by their angles: (a, b) -> (a cos - b sin, b cos + a sin).

    ``interleaved`` pairs are the neighbours (2i, 2i + 1), otherwise (i, i + F). The order of the axis stays.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    shape = (cos_TF.shape[0], *[1] * (x.dim() - 2), cos_TF.shape[1])
    cos, sin = cos_TF.view(shape).to(wide), sin_TF.view(shape).to(wide)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return (torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)).to(x.dtype)

"""Rotary position embedding with few operations: a pair is a complex number, a rotation is one product."""

from __future__ import annotations

import torch
from torch import Tensor

from yunque.ops.reference.rotary import rotary_table

# Shapes: T tokens, F pairs (half the rotary width); x is [T, ..., 2F].


def rotary_phases(positions_T: Tensor, *, width: int, theta: float, dtype: torch.dtype) -> Tensor:
    """cos + i sin of every pair's angle, complex [T, F]; ``dtype`` float64 gives complex128, others complex64."""
    cos_TF, sin_TF = rotary_table(positions_T, width=width, theta=theta)
    wide = torch.promote_types(dtype, torch.float32)
    return torch.complex(cos_TF.to(wide), sin_TF.to(wide))


def rotate(x: Tensor, phase_TF: Tensor, *, interleaved: bool) -> Tensor:
    """As ``reference.rotary.rotate`` with the phases of ``rotary_phases``; arithmetic in fp32 or wider."""
    dtype = torch.float64 if phase_TF.dtype == torch.complex128 else torch.float32
    wide = x if x.dtype == dtype else x.to(dtype)
    phase = phase_TF.view(phase_TF.shape[0], *[1] * (x.dim() - 2), phase_TF.shape[1])
    if interleaved:
        if not wide.is_contiguous() or wide.storage_offset() % 2:
            # A slice at an odd place is no view of complex numbers.
            wide = wide.clone(memory_format=torch.contiguous_format)
        pairs = torch.view_as_complex(wide.view(*wide.shape[:-1], wide.shape[-1] // 2, 2))
        out = torch.view_as_real(pairs * phase).view(wide.shape)
    else:
        first, second = wide.chunk(2, dim=-1)
        cos, sin = phase.real, phase.imag
        out = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return out if x.dtype == dtype else out.to(x.dtype)

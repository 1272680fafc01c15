"""Linear, norm and gated MLP: the small layers that everything is made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yunque.ops.rows import linear, rms_norm


class Linear(nn.Module):
    """x @ weight.T without bias; ``weight`` is [out, in]."""

    def __init__(self, in_features: int, out_features: int, *, invariant: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.invariant = invariant

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, invariant=self.invariant)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32 (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, width: int, *, invariant: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width, invariant=invariant)
        self.up_proj = Linear(hidden, width, invariant=invariant)
        self.down_proj = Linear(width, hidden, invariant=invariant)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

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


class JoinedWeights:
    """The weights of several linear maps of one input, side by side in one tensor [sum of out, in].

    The maps' parameters become views of it, so that one product serves all of them and training or loading goes on
    in place. Whatever gives a parameter new storage (a cast, a copy of the model) undoes this; ``of`` says so.
    """

    def __init__(self, *maps: Linear) -> None:
        self._maps = maps
        self.sizes = tuple(m.weight.shape[0] for m in maps)
        self.weight = torch.cat([m.weight.detach() for m in maps])
        for linear_map, part in zip(maps, self.weight.split_with_sizes(self.sizes), strict=True):
            linear_map.weight.data = part

    @property
    def is_current(self) -> bool:
        """Whether the parameters still are views of ``weight``."""
        return self._maps[0].weight.data_ptr() == self.weight.data_ptr()


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
        self._joined: JoinedWeights | None = None

    def join(self) -> None:
        """Lay the weights that read the input side by side; see ``JoinedWeights``."""
        self._joined = JoinedWeights(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        joined = self._joined
        if joined is not None and joined.is_current and not torch.is_grad_enabled():
            gate, up = F.linear(x, joined.weight).chunk(2, dim=-1)
            return F.linear(F.silu(gate) * up, self.down_proj.weight)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

"""Routed experts one token at a time: the specification."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Shapes: T tokens, D model, E experts, I expert width, k experts per token.


def routed_experts(x_TD: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, gate_up_EXD: Tensor, down_EDI: Tensor) -> Tensor:
    """y[t] = sum_i weight[t, i] * down_e(silu(gate_e x) * up_e x), e = expert[t, i]; gate rows come first."""
    out = torch.zeros_like(x_TD)
    width = down_EDI.shape[-1]
    for token in range(x_TD.shape[0]):
        for slot in range(expert_Tk.shape[1]):
            expert = int(expert_Tk[token, slot])
            gate, up = (gate_up_EXD[expert] @ x_TD[token]).split(width)
            out[token] += weight_Tk[token, slot] * (down_EDI[expert] @ (F.silu(gate) * up))
    return out

"""Mixture of experts: sigmoid router with a selection-only bias, grouped experts, one shared expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yunque.model.config import ModelConfig
from yunque.model.layers import GatedMLP
from yunque.ops.blockwise.experts import routed_experts
from yunque.ops.routing import choose_experts
from yunque.ops.rows import linear

# Shapes: T tokens, D model, E experts, I expert width, k experts per token.


@dataclass(frozen=True)
class Routing:
    """What the router decided: ``expert_Tk`` int64, ``weight_Tk`` fp32, and all ``scores_TE`` (sigmoid, fp32)."""

    expert_Tk: Tensor
    weight_Tk: Tensor
    scores_TE: Tensor


class Router(nn.Module):
    """Scores every expert in fp32. Its tensors never go below fp32, whatever type the model is cast to: the
    correction bias sits at a large offset with a spread that bf16 cannot resolve."""

    def __init__(self, config: ModelConfig, *, invariant: bool) -> None:
        super().__init__()
        self.config = config
        self.invariant = invariant
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, dtype=torch.float32))
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def keep_precision(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            return out if out.dtype.itemsize >= 4 else tensor.to(out.device, torch.float32)

        return super()._apply(keep_precision, recurse)

    def forward(self, x_TD: Tensor, num_tokens: int, imposed_Tk: Tensor | None = None) -> Routing:
        """Route by ``sigmoid(x W^T)``; ``imposed_Tk`` replays a recorded choice (the weights stay the model's own)."""
        config = self.config
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        scores_TE = linear(x_TD.to(wide), self.weight, invariant=self.invariant).sigmoid()[:num_tokens]
        if imposed_Tk is None:
            choice_TE = scores_TE.detach() + self.e_score_correction_bias
            imposed_Tk = choose_experts(
                choice_TE,
                count=config.num_experts_per_tok,
                groups=config.n_group,
                kept_groups=config.topk_group,
            )
        weight_Tk = scores_TE.gather(1, imposed_Tk)
        if config.norm_topk_prob:
            weight_Tk = weight_Tk / (weight_Tk.sum(dim=-1, keepdim=True) + 1e-20)
        return Routing(imposed_Tk, weight_Tk * config.routed_scaling_factor, scores_TE)


class Experts(nn.Module):
    """The routed experts' weights, stacked: gate and up rows [E, 2I, D], down [E, D, I]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E, I, D = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size  # noqa: E741
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * I, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, I))


class MoE(nn.Module):
    """Routed experts plus the shared expert (DeepSeek-V3 report, eq. 12-16)."""

    def __init__(self, config: ModelConfig, *, invariant: bool) -> None:
        super().__init__()
        self.gate = Router(config, invariant=invariant)
        self.experts = Experts(config)
        width = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = GatedMLP(config.hidden_size, width, invariant=invariant)
        self.invariant = invariant

    def forward(self, x_TD: Tensor, num_tokens: int, imposed_Tk: Tensor | None = None) -> tuple[Tensor, Routing]:
        """Output [T, D] and the routing of the first ``num_tokens`` rows (rows behind them are padding)."""
        routing = self.gate(x_TD, num_tokens, imposed_Tk)
        experts = self.experts
        out_TD = routed_experts(
            x_TD[:num_tokens],
            routing.expert_Tk,
            routing.weight_Tk,
            experts.gate_up_proj,
            experts.down_proj,
            invariant=self.invariant,
        )
        if num_tokens < x_TD.shape[0]:
            out_TD = F.pad(out_TD, (0, 0, 0, x_TD.shape[0] - num_tokens))
        return out_TD + self.shared_experts(x_TD), routing

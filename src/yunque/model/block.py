"""One decoder layer: pre-norm attention and pre-norm MLP or experts, each added to the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from yunque.model.attention import Attention
from yunque.model.config import ModelConfig
from yunque.model.forward import LayerOutput, Step
from yunque.model.layers import GatedMLP, Linear, RMSNorm
from yunque.model.moe import MoE, Routing
from yunque.ops.routing import sequence_balance
from yunque.ops.visibility import Selection

# Shapes: T tokens, D model.


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, *, invariant: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, invariant=invariant)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: MoE | GatedMLP
        if config.is_dense(layer):
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, invariant=invariant)
        else:
            self.mlp = MoE(config, invariant=invariant)

    def forward(self, x_TD: Tensor, step: Step, below: Selection | None, *, reuse: bool = False) -> LayerOutput:
        """One layer over [T, D]; ``below`` and ``reuse`` as in ``Attention.forward``."""
        attention = self.self_attn(self.input_layernorm(x_TD), step, below, reuse=reuse)
        x_TD = x_TD + attention.out_TD
        normed_TD = self.post_attention_layernorm(x_TD)
        if isinstance(self.mlp, GatedMLP):
            return LayerOutput(x_TD + self.mlp(normed_TD), attention.selection, attention.index_kl, None, None)
        out_TD, routing = self.mlp(normed_TD, step.num_tokens, step.mode.imposed_experts(self.layer))
        balance = _balance(routing, step)
        return LayerOutput(x_TD + out_TD, attention.selection, attention.index_kl, balance, routing.expert_Tk)


def _balance(routing: Routing, step: Step) -> Tensor | None:
    mode = step.mode
    if mode.balance_document_T is None or mode.balance_weight_N is None:
        return None
    return sequence_balance(routing.scores_TE, routing.expert_Tk, mode.balance_document_T, mode.balance_weight_N)


class MTPLayer(DecoderLayer):
    """The multi-token-prediction layer: joins a hidden state with the embedding of the next token, then a decoder
    layer, then a norm of its own (DeepSeek-V3 report, 2.2; one set of parameters for all steps in GLM-5)."""

    def __init__(self, config: ModelConfig, *, invariant: bool = False) -> None:
        super().__init__(config, config.num_hidden_layers, invariant=invariant)
        D = config.hidden_size
        self.enorm = RMSNorm(D, config.rms_norm_eps)
        self.hnorm = RMSNorm(D, config.rms_norm_eps)
        self.eh_proj = Linear(2 * D, D, invariant=invariant)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(D, config.rms_norm_eps)})

    def join(self, embedded_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        """eh_proj([enorm(embedding of the next token) ; hnorm(hidden)]), embedding first."""
        return self.eh_proj(torch.cat((self.enorm(embedded_TD), self.hnorm(hidden_TD)), dim=-1))

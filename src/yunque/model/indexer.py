"""The lightning indexer: cheap scores that decide which keys a query attends to (DeepSeek sparse attention)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from yunque.model.config import ModelConfig
from yunque.model.layers import Linear
from yunque.ops.rotary import rotate
from yunque.ops.rows import layer_norm, linear

# Shapes: T tokens, D model, Q query latent, J index heads, d index width, F rotary pairs.

#: Epsilon of the key norm in every released implementation, independent of ``rms_norm_eps``.
KEY_NORM_EPS = 1e-6


@dataclass(frozen=True)
class IndexQuery:
    """``q_TJd`` rotated index queries; ``w_TJ`` fp32 head weights with both scales folded in."""

    q_TJd: Tensor
    w_TJ: Tensor

    def first(self, count: int) -> IndexQuery:
        """The first ``count`` tokens' queries."""
        return IndexQuery(self.q_TJd[:count], self.w_TJ[:count])


class KeyNorm(nn.Module):
    """LayerNorm with weight and bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, KEY_NORM_EPS)


class Indexer(nn.Module):
    """score(t, s) = sum_j w_tj relu(q_tj . k_s), with w = W_w x * J^-1/2 * d^-1/2 (DeepSeek-V3.2 report, eq. 1).

    The rotary slice is the first ``qk_rope_head_dim`` of the ``index_head_dim`` dimensions (in MLA it is the last).
    Inputs are detached: the indexer never sends a gradient into the backbone.
    """

    def __init__(self, config: ModelConfig, *, invariant: bool) -> None:
        super().__init__()
        self.config = config
        self.invariant = invariant
        heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, heads * width, invariant=invariant)
        self.wk = Linear(config.hidden_size, width, invariant=invariant)
        self.k_norm = KeyNorm(width)
        self.weights_proj = Linear(config.hidden_size, heads, invariant=invariant)
        self.weight_scale = heads**-0.5 * width**-0.5

    def queries(self, x_TD: Tensor, latent_TQ: Tensor, phase_TF: Tensor) -> IndexQuery:
        """Index queries from the normed query latent, head weights from the layer's normed input."""
        config = self.config
        heads, width = config.index_n_heads, config.index_head_dim
        q_TJd = self._rotate_first(self.wq_b(latent_TQ.detach()).view(x_TD.shape[0], heads, width), phase_TF)
        return IndexQuery(q_TJd, self.head_weights(x_TD.detach()))

    def head_weights(self, x_TD: Tensor) -> Tensor:
        """Weights of the index heads [T, J]. The product itself is fp32: rounding it to bf16 flips near-ties
        between keys."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        w_TJ = linear(x_TD.to(wide), self.weights_proj.weight.to(wide), invariant=self.invariant)
        return w_TJ * self.weight_scale

    def keys(self, x_TD: Tensor, phase_TF: Tensor) -> Tensor:
        """Rotated, normed index keys [T, d] from the layer's normed input."""
        return self._rotate_first(self.k_norm(self.wk(x_TD.detach())), phase_TF)

    def _rotate_first(self, x: Tensor, phase_TF: Tensor) -> Tensor:
        rope = self.config.qk_rope_head_dim
        turned = rotate(x[..., :rope], phase_TF, interleaved=self.config.indexer_rope_interleave)
        return torch.cat((turned, x[..., rope:]), dim=-1)

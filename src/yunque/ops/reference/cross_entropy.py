"""Cross-entropy of a linear head from whole logits: the specification of the blockwise one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Shapes: T tokens, D hidden, V vocabulary, L live tokens (a target and a weight other than 0).

#: Target of a token that has nothing to predict.
NO_TARGET = -1


@dataclass(frozen=True)
class CrossEntropy:
    """Weighted cross-entropy of T tokens.

    ``sum`` is the scalar -sum_t weight_t * log p(target_t), differentiable. ``log_probs_T`` (log p(target_t),
    no gradient) and ``correct_T`` (bool: no other token has a higher logit) are 0 and False where a token has
    no target or weight 0. Both are per token so that one call over concatenated inputs can be read apart.
    """

    sum: Tensor
    log_probs_T: Tensor
    correct_T: Tensor


def linear_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, weights_T: Tensor) -> CrossEntropy:
    """-sum_t weights_t * log softmax(hidden_t @ weight.T)[targets_t], over the tokens with a target.

    Logits and softmax are float32, or float64 for float64 inputs.
    """
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    live_L = ((targets_T != NO_TARGET) & (weights_T != 0)).nonzero().squeeze(1)
    targets_L = targets_T[live_L]
    logits_LV = hidden_TD[live_L].to(wide) @ weight_VD.to(wide).T
    log_probs_L = logits_LV.log_softmax(-1).gather(1, targets_L[:, None]).squeeze(1)
    correct_L = logits_LV.gather(1, targets_L[:, None]) >= logits_LV.amax(-1, keepdim=True)

    log_probs_T = log_probs_L.new_zeros(targets_T.shape).index_copy(0, live_L, log_probs_L.detach())
    correct_T = torch.zeros_like(targets_T, dtype=torch.bool).index_copy(0, live_L, correct_L.squeeze(1))
    return CrossEntropy(-(weights_T[live_L].to(wide) * log_probs_L).sum(), log_probs_T, correct_T)

"""Choice of experts from router scores, and the loss that keeps their load even."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Shapes: T tokens, E experts, G groups, k chosen experts, N documents.


def choose_experts(choice_TE: Tensor, *, count: int, groups: int, kept_groups: int) -> Tensor:
    """The ``count`` experts of highest score for each token, int64 [T, k], best first; ties go to the lowest index.

    With more than one group only the experts of the ``kept_groups`` best groups can be chosen; a group's score is
    the sum of its two best experts (of its one expert, where groups have one). Source: DeepSeek-V3 report, 2.1.2.
    """
    if groups > 1:
        grouped_TGe = choice_TE.unflatten(1, (groups, -1))
        best = grouped_TGe.topk(min(2, grouped_TGe.shape[-1]), dim=-1).values.sum(dim=-1)
        kept_TG = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best(best, kept_groups), True)
        choice_TE = grouped_TGe.masked_fill(~kept_TG[..., None], -torch.inf).flatten(1)
    return _best(choice_TE, count)


#: Up to this many scores NumPy's sort, which takes a few microseconds to call, beats torch's: decode.
FEW_SCORES = 2048


def _best(scores: Tensor, count: int) -> Tensor:
    if scores.numel() <= FEW_SCORES and scores.device.type == "cpu" and scores.dtype == torch.float32:
        return torch.from_numpy(np.argsort(-scores.detach().numpy(), axis=1, kind="stable")[:, :count])
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def sequence_balance(scores_TE: Tensor, expert_Tk: Tensor, document_T: Tensor, weight_N: Tensor) -> Tensor:
    """sum_n weight[n] * sum_e f[n, e] P[n, e]: the sequence-wise balance loss (DeepSeek-V3 report, eq. 17-20).

    For the T_n tokens of document n: f[n, e] = E / (k T_n) * (times expert e was chosen), P[n, e] = mean share of
    e in the scores. A perfectly even document gives 1. ``document_T`` int64 numbers the documents; gradients flow
    through P only. Returns a scalar.
    """
    num_documents, (num_tokens, num_experts) = weight_N.shape[0], scores_TE.shape
    size_N = scores_TE.new_zeros(num_documents).index_add_(0, document_T, torch.ones_like(scores_TE[:, 0]))
    chosen_TE = torch.zeros_like(scores_TE).scatter_(1, expert_Tk, 1.0)
    zeros_NE = scores_TE.new_zeros((num_documents, num_experts))
    used_NE = zeros_NE.index_add(0, document_T, chosen_TE)
    share_NE = zeros_NE.index_add(0, document_T, scores_TE / scores_TE.sum(dim=1, keepdim=True))
    scale_N = weight_N.to(scores_TE.dtype) * num_experts / (expert_Tk.shape[1] * size_N.clamp(min=1) ** 2)
    assert num_tokens == document_T.shape[0]
    return (used_NE * share_NE).sum(dim=1) @ scale_N

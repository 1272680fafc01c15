"""The indexer's loss from whole [T, P] matrices: the specification of the blockwise one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from yunque.ops.reference.attention import allowed
from yunque.ops.visibility import Selection, Visibility

# Shapes: T queries, L live ones, P pool rows; H attention heads of width R, J index heads of width d.


@dataclass(frozen=True)
class AttentionTarget:
    """A layer that the indexer imitates: absorbed queries, pool rows, and the scale of their logits.

    They are constants of the loss: no gradient reaches them.
    """

    query_THR: Tensor
    pool_PR: Tensor
    scale: float


@dataclass(frozen=True)
class IndexKl:
    """``sum`` is the scalar sum_t weight_t * KL(p_t || softmax(I_t)), differentiable.

    ``entropy_sum`` = sum_t weight_t * H(p_t) is how much of the cross-entropy no indexer can remove, and
    ``weight_sum`` the weight of the queries that counted; neither carries a gradient.
    """

    sum: Tensor
    entropy_sum: Tensor
    weight_sum: Tensor


def index_kl(
    query_TJd: Tensor,
    key_Pd: Tensor,
    head_weight_TJ: Tensor,
    targets: Sequence[AttentionTarget],
    visibility: Visibility,
    *,
    weights_T: Tensor,
    selection: Selection | None = None,
) -> IndexKl:
    """sum_t weights_t * KL(p_t || softmax(I_t)) over the keys that query t sees, or kept.

    I[t, s] = sum_j head_weight[t, j] * relu(query[t, j] . key[s]), scales inside head_weight; p_t is the
    attention of every target summed over heads, L1-normalised, and averaged over targets (DeepSeek-V3.2
    report; averaging has the gradient of IndexCache's loss for a layer whose selection other layers share).
    A query that sees or kept nothing adds nothing.
    """
    wide = torch.promote_types(query_TJd.dtype, torch.float32)
    mask_TP = allowed(visibility, key_Pd.shape[0], selection)
    live_L = ((weights_T != 0) & mask_TP.any(1)).nonzero().squeeze(1)
    hidden_LP, weights_L = ~mask_TP[live_L], weights_T[live_L].to(wide)

    with torch.no_grad():
        target_LP = torch.zeros_like(hidden_LP, dtype=wide)
        for target in targets:
            queries_LHR = target.query_THR[live_L].to(wide)
            logits_LHP = torch.einsum("lhr,pr->lhp", queries_LHR, target.pool_PR.to(wide)) * target.scale
            heads_LHP = logits_LHP.masked_fill(hidden_LP[:, None], -torch.inf).softmax(-1)
            target_LP += heads_LHP.mean(1) / len(targets)
    products_LJP = torch.einsum("ljd,pd->ljp", query_TJd[live_L].to(wide), key_Pd.to(wide)).relu()
    scores_LP = torch.einsum("lj,ljp->lp", head_weight_TJ[live_L].to(wide), products_LJP)
    log_probs_LP = scores_LP.masked_fill(hidden_LP, -torch.inf).log_softmax(-1).masked_fill(hidden_LP, 0)

    entropy_L = -torch.xlogy(target_LP, target_LP).sum(1)
    cross_L = -(target_LP * log_probs_LP).sum(1)
    return IndexKl(weights_L @ (cross_L - entropy_L), weights_L @ entropy_L, weights_L.sum())

"""Lightning indexer: scores of all keys at once, then the best of each query. The specification."""

from __future__ import annotations

import torch
from torch import Tensor

from yunque.ops.reference.topk import top_positions
from yunque.ops.visibility import Selection, Visibility

# Shapes: T queries, P pool rows, J index heads, d index width, K kept.


def index_scores(q_TJd: Tensor, k_Pd: Tensor, w_TJ: Tensor) -> Tensor:
    """I[t, s] = sum_j w[t, j] * relu(q[t, j] . k[s]) in fp32 or wider (DeepSeek-V3.2 report, eq. 1).

    The scales are inside w.
    """
    wide = torch.promote_types(q_TJd.dtype, torch.float32)
    products = torch.einsum("tjd,pd->tjp", q_TJd.to(wide), k_Pd.to(wide)).relu()
    return torch.einsum("tj,tjp->tp", w_TJ.to(wide), products)


def select(q_TJd: Tensor, k_Pd: Tensor, w_TJ: Tensor, visibility: Visibility, k: int) -> Selection:
    """The ``k`` visible keys of highest index score of each query; ties go to the lowest position."""
    scores_TP = index_scores(q_TJd, k_Pd, w_TJ)
    return Selection(top_positions(scores_TP, visibility.first_T, visibility.last_T, k))

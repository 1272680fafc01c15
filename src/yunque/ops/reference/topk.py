"""Deterministic top-k: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: Q query rows, N keys, K kept.


def top_positions(scores_QN: Tensor, first_Q: Tensor, last_Q: Tensor, k: int) -> Tensor:
    """Positions of the ``k`` best visible keys of each row.

    The order is by score, then by position, lowest first; NaN counts as minus infinity. Row ``i`` sees the keys
    ``[first_Q[i], last_Q[i]]``. Returns int32 [Q, k], relative to ``first_Q``, ascending, padded with -1.
    """
    out = torch.full((scores_QN.shape[0], k), -1, dtype=torch.int32, device=scores_QN.device)
    for row, (first, last) in enumerate(zip(first_Q.tolist(), last_Q.tolist(), strict=True)):
        if last < first:
            continue
        scores = scores_QN[row, first : last + 1]
        scores = torch.where(scores.isnan(), -torch.inf, scores)
        kept = torch.sort(scores, descending=True, stable=True).indices[:k].sort().values
        out[row, : kept.numel()] = kept.int()
    return out

"""Deterministic top-k by partition, with the ties at the boundary repaired."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Shapes: Q query rows, N keys, K kept.


def top_positions(scores_QN: Tensor, first_Q: Tensor, last_Q: Tensor, k: int, *, all_seen: bool = False) -> Tensor:
    """As ``reference.topk.top_positions``; ``scores_QN`` is overwritten outside the visible range.

    ``all_seen`` promises that every row sees all N keys.
    """
    if all_seen and k < scores_QN.shape[1]:
        if scores_QN.shape[0] == 1 and scores_QN.device.type == "cpu":
            kept_1K = _one_row(scores_QN, k)
            if kept_1K is not None:
                return kept_1K
        return _repair(scores_QN, _partition(scores_QN, k), first_Q, last_Q).int().sort(dim=1).values
    if k >= scores_QN.shape[1]:
        return all_visible(first_Q, last_Q, k)
    keys = torch.arange(scores_QN.shape[1], device=scores_QN.device)
    hidden_QN = keys > last_Q[:, None]
    if bool((first_Q > 0).any()):
        hidden_QN |= keys < first_Q[:, None]
    scores_QN.masked_fill_(hidden_QN, -torch.inf)
    kept_QK = _repair(scores_QN, _partition(scores_QN, k), first_Q, last_Q).sort(dim=1).values - first_Q[:, None]
    few_Q1 = (last_Q - first_Q < k)[:, None]
    return torch.where(few_Q1, all_visible(first_Q, last_Q, k), kept_QK.int()) if bool(few_Q1.any()) else kept_QK.int()


def all_visible(first_Q: Tensor, last_Q: Tensor, k: int) -> Tensor:
    """The selection of rows that see at most ``k`` keys: every one. Same result as ``top_positions``."""
    order = torch.arange(k, device=first_Q.device)
    return torch.where(order < (last_Q - first_Q + 1)[:, None], order, -1).int()


def _one_row(scores_1N: Tensor, k: int) -> Tensor | None:
    """Decode: one row that sees all N keys, in the fewest calls; ``None`` when a tie or NaN needs ``_repair``."""
    scores = scores_1N[0].numpy()
    kept = np.argpartition(scores, scores.shape[0] - k)[scores.shape[0] - k :]
    if np.count_nonzero(scores >= scores[kept].min()) != k:
        return None
    kept.sort()
    return torch.from_numpy(kept.astype(np.int32))[None]


def _partition(scores_QN: Tensor, k: int) -> Tensor:
    """Any ``k`` largest of each row (int64 [Q, k], unordered). NumPy's partition is several times faster on a CPU."""
    if scores_QN.device.type != "cpu":
        return torch.topk(torch.nan_to_num(scores_QN, nan=-torch.inf), k, dim=1, sorted=False).indices
    split = scores_QN.shape[1] - k
    return torch.from_numpy(np.ascontiguousarray(np.argpartition(scores_QN.numpy(), split, axis=1)[:, split:]))


def _repair(scores_QN: Tensor, kept_QK: Tensor, first_Q: Tensor, last_Q: Tensor) -> Tensor:
    """Give the lowest positions the places that are tied with the k-th score (and NaN the rank of minus infinity)."""
    k = kept_QK.shape[1]
    least_Q = scores_QN.gather(1, kept_QK).amin(dim=1)
    at_least_Q = (scores_QN >= least_Q[:, None]).sum(dim=1)
    if bool((at_least_Q == k).all()):
        return kept_QK
    if bool(least_Q.isnan().any()):
        scores_QN.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        return _repair(scores_QN, _partition(scores_QN, k), first_Q, last_Q)
    tied = (at_least_Q > k).nonzero()[:, 0]
    if tied.numel() == 0:
        return kept_QK
    scores, least = scores_QN[tied], least_Q[tied, None]
    keys = torch.arange(scores.shape[1], device=scores.device)
    above = scores > least
    equal = (scores == least) & (keys >= first_Q[tied, None]) & (keys <= last_Q[tied, None])
    free = k - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1) <= free))
    # Rows that see fewer than k keys come out short; the caller replaces them, so any filler serves.
    short = k - chosen.sum(dim=1, keepdim=True)
    spare = ~chosen & ((~chosen).cumsum(dim=1) <= short)
    kept_QK = kept_QK.clone()
    kept_QK[tied] = (chosen | spare).nonzero()[:, 1].view(-1, k)
    return kept_QK

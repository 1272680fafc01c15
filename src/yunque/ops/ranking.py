"""Order among the values of a row, ties going to the lowest index."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Shapes: B rows, V values of a row.


def best(values_BV: Tensor) -> Tensor:
    """The index of each row's largest value [B], int64; the lowest index on a tie."""
    if values_BV.is_cpu:  # NumPy's search is several times as fast as torch's there
        return torch.from_numpy(values_BV.numpy().argmax(-1))
    return values_BV.argmax(-1)


def descending(values_BV: Tensor) -> Tensor:
    """Each row's values from the largest to the smallest."""
    if values_BV.is_cpu:  # NumPy's sort of plain values is vectorised, torch's carries indices along
        return torch.from_numpy(np.sort(values_BV.numpy(), axis=-1)).flip(-1)
    return values_BV.sort(dim=-1, descending=True).values


def best_ids(values_V: Tensor, count: int) -> Tensor:
    """The indices of the ``count`` largest values, best first; equal values in the order of their indices."""
    threshold = values_V.topk(min(count, values_V.shape[0])).values[-1]
    candidates = (values_V >= threshold).nonzero()[:, 0]
    order = values_V[candidates].sort(stable=True, descending=True).indices
    return candidates[order[:count]]

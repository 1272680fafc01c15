"""Which tokens ``top_k``, ``top_p`` and ``min_p`` keep, for many rows at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from yunque.ops.ranking import descending
from yunque.protocol.generation import SamplingParams

# Shapes: N rows, V vocabulary.


def truncates(params: SamplingParams) -> bool:
    """Whether ``params`` remove tokens by rank or probability."""
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def truncated(scaled_NV: Tensor, params_N: Sequence[SamplingParams]) -> Tensor:
    """``scaled_NV`` (logits by temperature) with -inf for what is not kept: the rule of ``distribution``.

    Only values are sorted. What is kept is what reaches the last kept value; only rows in which several tokens
    share that value look at ids.
    """
    size, device = scaled_NV.shape[1], scaled_NV.device
    top_k_N = torch.tensor([min(params.top_k or size, size) for params in params_N], device=device)
    # A mass of 1 may be reached early by rounding: top_p = 1 is a mass that never is.
    top_p_N = torch.tensor([params.top_p if params.top_p < 1 else math.inf for params in params_N], device=device)
    log_min_p_N = torch.tensor(
        [math.log(params.min_p) if params.min_p > 0 else -math.inf for params in params_N],
        dtype=torch.float32,
        device=device,
    )
    sorted_NV = descending(scaled_NV)
    is_best_k_NV = torch.arange(size, device=device) < top_k_N[:, None]
    mass_NV = sorted_NV.masked_fill(~is_best_k_NV, -math.inf).softmax(-1).cumsum(-1, dtype=torch.float64)
    # Every token but the last one needed leaves the mass short of top_p.
    count_N = torch.minimum((mass_NV < top_p_N.double()[:, None]).sum(-1) + 1, top_k_N)
    count_N = torch.minimum(count_N, (sorted_NV >= sorted_NV[:, :1] + log_min_p_N[:, None]).sum(-1)).clamp(min=1)
    last_N1 = sorted_NV.gather(1, count_N[:, None] - 1)
    is_dropped_NV = scaled_NV < last_N1
    is_tied_N = size - is_dropped_NV.sum(-1) > count_N
    if bool(is_tied_N.any()):
        is_last_NV = scaled_NV == last_N1
        room_N1 = count_N[:, None] - (scaled_NV > last_N1).sum(-1, keepdim=True)
        is_dropped_NV |= is_last_NV & (is_last_NV.cumsum(-1) > room_N1)
    return scaled_NV.masked_fill(is_dropped_NV, -math.inf)

"""The distribution that a token is drawn from, in its plainest form: what the sampler is tested against."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yunque.protocol.generation import SamplingParams

# Shapes: V vocabulary.

#: A lower temperature than this is this one: fp32 logits divided by less would overflow.
TEMPERATURE_MIN = 1e-5


def distribution(
    logits_V: Tensor,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    reply: Sequence[int] = (),
    allowed_V: NDArray[np.bool_] | None = None,
) -> Tensor:
    """Log-probabilities [V] of the next token after ``prompt`` and ``reply``; -inf for one that cannot come.

    In order: repetition, presence and frequency penalties, ``logit_bias``, the ids of ``allowed_V`` (what a
    constraint leaves), temperature, ``top_k`` best, of these the fewest whose probabilities reach ``top_p``, and
    of these the ones with at least ``min_p`` times the best one's probability. The best one always stays and a
    tie goes to the lowest id. Temperature 0 is the point mass on the best token.
    """
    logits = [
        _penalised(logit, token, params, prompt, Counter(reply)[token]) for token, logit in enumerate(logits_V.tolist())
    ]
    if allowed_V is not None:
        logits = [logit if allowed_V[token] else -math.inf for token, logit in enumerate(logits)]
    values_V = torch.tensor(logits, dtype=torch.float32)
    order = sorted(range(len(logits)), key=lambda token: (-values_V[token].item(), token))
    if params.temperature == 0:
        return _normalised(values_V, order[:1])
    values_V = values_V / max(params.temperature, TEMPERATURE_MIN)
    kept = order[: params.top_k or len(order)]
    if params.top_p < 1:
        kept = kept[: _nucleus(torch.softmax(values_V[kept], 0).tolist(), params.top_p)]
    if params.min_p > 0:
        threshold = values_V[kept[0]] + torch.tensor(math.log(params.min_p), dtype=torch.float32)
        kept = [token for token in kept if values_V[token] >= threshold]
    return _normalised(values_V, kept or order[:1])


def _penalised(logit: float, token: int, params: SamplingParams, prompt: Sequence[int], count: int) -> float:
    if count or token in prompt:
        logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
    if count:
        logit -= params.presence_penalty + params.frequency_penalty * count
    return logit + params.logit_bias.get(token, 0.0)


def _nucleus(probabilities: Sequence[float], top_p: float) -> int:
    """How many of ``probabilities``, in descending order, it takes to reach ``top_p``."""
    mass = 0.0
    for count, probability in enumerate(probabilities, start=1):
        mass += probability
        if mass >= top_p:
            return count
    return len(probabilities)


def _normalised(values_V: Tensor, kept: Sequence[int]) -> Tensor:
    kept_V = torch.full_like(values_V, -math.inf)
    kept_V[list(kept)] = values_V[list(kept)]
    return torch.log_softmax(kept_V, 0)

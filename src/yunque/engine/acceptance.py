"""How many drafted tokens stand, and the token after them: two exact rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yunque.engine.noise import NoiseSource, Purpose
from yunque.ops.ranking import best

# Shapes: K drafts, V vocabulary.


@dataclass(frozen=True)
class Accepted:
    """The tokens that one verification adds: ``num_drafts`` of the drafts, then one token of the target's own."""

    tokens: tuple[int, ...]
    num_drafts: int


def coupled(drafts: Sequence[int], drawn: Sequence[int]) -> Accepted:
    """Drafts stand while they equal what the target draws; the outcome is that of no speculation.

    ``drawn`` are the target's K + 1 tokens after the prompt and each draft, drawn with the noise of their own
    positions. Row i is what would be drawn after drafts[:i], so it counts as long as these equal what was drawn.
    """
    assert len(drawn) == len(drafts) + 1, f"{len(drawn)} drawn tokens for {len(drafts)} drafts"
    count = 0
    while count < len(drafts) and drafts[count] == drawn[count]:
        count += 1
    return Accepted(tuple(drawn[: count + 1]), count)


def rejection(
    drafts: Sequence[int],
    draft_logprobs_KV: Tensor,
    target_logprobs_KV: Tensor,
    *,
    seed: int,
    position: int,
    noise: NoiseSource,
) -> Accepted:
    """Speculative sampling (Leviathan et al. 2023; Chen et al. 2023): the tokens are distributed as the target's.

    Draft x of q stands with probability min(1, p(x) / q(x)); the first that falls is replaced by a token of
    norm(max(p - q, 0)); if none falls, one more comes from p. ``draft_logprobs_KV`` has K rows,
    ``target_logprobs_KV`` one more; both are the distributions drawn from (temperature and kept sets included).
    ``position`` is that of the first draft. Drafts must come from q by ``Purpose.DRAFT`` noise: the target's own
    noise (``Purpose.TOKEN``), which draws the last token, must not have taken part in them.
    """
    assert target_logprobs_KV.shape[0] == len(drafts) + 1, "the target has one row more than there are drafts"
    size = target_logprobs_KV.shape[1]
    for index, draft in enumerate(drafts):
        log_ratio = float(target_logprobs_KV[index, draft]) - float(draft_logprobs_KV[index, draft])
        if math.log(noise.uniform(seed, position + index, Purpose.ACCEPT)) < log_ratio:
            continue
        residual_V = _residual(target_logprobs_KV[index], draft_logprobs_KV[index])
        noise_V = noise.gumbel(seed, position + index, size, Purpose.RESIDUAL)
        return Accepted((*drafts[:index], _draw(residual_V, noise_V)), index)
    noise_V = noise.gumbel(seed, position + len(drafts), size, Purpose.TOKEN)
    return Accepted((*drafts, _draw(target_logprobs_KV[-1], noise_V)), len(drafts))


def _residual(target_logprobs_V: Tensor, draft_logprobs_V: Tensor) -> Tensor:
    """log max(p - q, 0); p itself where rounding leaves nothing of it (p = q, so a rejection was rounding too)."""
    excess_V = (target_logprobs_V.double().exp() - draft_logprobs_V.double().exp()).clamp(min=0)
    return excess_V.log() if bool(excess_V.any()) else target_logprobs_V.double()


def _draw(logprobs_V: Tensor, noise_V: NDArray[np.float32]) -> int:
    return int(best((logprobs_V + torch.from_numpy(noise_V).to(logprobs_V.device))[None])[0])

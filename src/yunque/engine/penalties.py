"""What penalties and logit bias do to one request's logits, kept up to date token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from yunque.protocol.errors import RequestError
from yunque.protocol.generation import SamplingParams

# Shapes: V vocabulary.


class Penalties:
    """Repetition, presence and frequency penalties and ``logit_bias`` of one request.

    ``observe`` and ``forget`` touch one entry, so a token costs the same however long the reply is; two vectors
    over the vocabulary stand for everything seen. The presence and frequency penalties and the bias of a token
    are one number, worked out from its count: observing and forgetting leaves nothing behind.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        """Raises ``RequestError`` if ``logit_bias`` names an id outside the vocabulary."""
        outside = [token for token in params.logit_bias if not 0 <= token < vocab_size]
        if outside:
            raise RequestError(
                f"logit_bias names token id {outside[0]}; valid: 0 to {vocab_size - 1}", param="logit_bias"
            )
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._bias = params.logit_bias
        self._counts: Counter[int] = Counter()
        self._shift_V = np.zeros(vocab_size, np.float32)
        for token, bias in self._bias.items():
            self._shift_V[token] = bias
        self._in_prompt_V = np.zeros(vocab_size, np.bool_)
        self._in_prompt_V[list(prompt)] = True
        self._seen_V = self._in_prompt_V.copy()

    @staticmethod
    def are_needed(params: SamplingParams) -> bool:
        """Whether ``params`` change any logit before the temperature."""
        return (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
            or bool(params.logit_bias)
        )

    def observe(self, token: int) -> None:
        """The reply grew by ``token``."""
        self._counts[token] += 1
        self._update(token)

    def forget(self, token: int) -> None:
        """Undo one ``observe(token)``."""
        self._counts[token] -= 1
        self._update(token)

    def apply_(self, logits_V: Tensor) -> None:
        """Change ``logits_V`` in place.

        A seen token's positive logit is divided by the repetition penalty and a negative one multiplied (Keskar
        et al. 2019); then logit - presence * [count > 0] - frequency * count + bias.
        """
        device = logits_V.device
        if self._repetition != 1:
            penalised_V = torch.where(logits_V > 0, logits_V / self._repetition, logits_V * self._repetition)
            torch.where(torch.from_numpy(self._seen_V).to(device), penalised_V, logits_V, out=logits_V)
        logits_V += torch.from_numpy(self._shift_V).to(device)

    def _update(self, token: int) -> None:
        count = self._counts[token]
        assert count >= 0, f"token {token} was forgotten more often than observed"
        shift = self._bias.get(token, 0.0)
        if count:
            shift -= self._presence + self._frequency * count
        self._shift_V[token] = shift
        self._seen_V[token] = count > 0 or self._in_prompt_V[token]

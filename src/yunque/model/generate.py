"""Plain generation with one model and one sequence: prefill in chunks, then a token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from yunque.model.cache import SequenceCache
from yunque.model.transformer import Transformer

# Shapes: V vocabulary.

#: Prompt tokens in one forward pass: memory does not grow with the prompt beyond its cache.
PREFILL_CHUNK = 2048


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: temperature 0 takes the best one; ``top_p`` keeps the smallest set of tokens
    whose probabilities reach it. Generation ends after a token of ``stop_ids`` or ``max_new_tokens`` tokens."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or self.temperature >= 1e-4):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or at least 0.0001")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")


def generate(
    model: Transformer, prompt: Sequence[int], sampling: Sampling, generator: torch.Generator | None = None
) -> Iterator[int]:
    """Yield new token ids, the stop token included. ``generator`` (on the CPU) decides the draws.

    Raises ``ValueError`` for an empty prompt, an id outside the vocabulary, or a prompt that with
    ``max_new_tokens`` exceeds the model's ``max_position_embeddings``.
    """
    config = model.config
    total = len(prompt) + sampling.max_new_tokens
    if not prompt:
        raise ValueError("the prompt has no tokens; a model needs at least one")
    if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
        raise ValueError(f"prompt ids run from {min(prompt)} to {max(prompt)}; valid: 0..{config.vocab_size - 1}")
    if total > config.max_position_embeddings:
        raise ValueError(
            f"{len(prompt)} prompt tokens and max_new_tokens {sampling.max_new_tokens} exceed the model's context "
            f"of {config.max_position_embeddings}"
        )
    return _generate(model, prompt, sampling, generator)


def _generate(
    model: Transformer, prompt: Sequence[int], sampling: Sampling, generator: torch.Generator | None
) -> Iterator[int]:
    weight = model.lm_head.weight
    capacity = len(prompt) + sampling.max_new_tokens
    cache = SequenceCache(model.config, num_sequences=1, capacity=capacity, dtype=weight.dtype, device=weight.device)
    pending = torch.tensor(prompt, dtype=torch.int64, device=weight.device)
    for _ in range(sampling.max_new_tokens):
        with torch.inference_mode():
            logits_V = _extend(model, cache, pending)
        token = sample(logits_V, sampling, generator)
        yield token
        if token in sampling.stop_ids:
            return
        pending = torch.tensor([token], dtype=torch.int64, device=weight.device)


def _extend(model: Transformer, cache: SequenceCache, tokens: Tensor) -> Tensor:
    """Add ``tokens`` to the only sequence of ``cache``; logits [V] after the last of them."""
    hidden = None
    for chunk in tokens.split(PREFILL_CHUNK):
        hidden = model(chunk, cache.step([chunk.shape[0]])).hidden_TD[-1:]
    assert hidden is not None
    return model.logits(hidden)[0]


def sample(logits_V: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> int:
    """One token id from fp32 logits; the lowest id wins a tie at temperature 0."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    probabilities_V = torch.softmax(logits_V.cpu() / sampling.temperature, dim=0)
    if sampling.top_p < 1:
        ordered, order = probabilities_V.sort(descending=True, stable=True)
        # A token is kept while the mass before it is short of top_p, so the best one always is.
        kept = ordered.cumsum(0) - ordered < sampling.top_p
        kept[0] = True  # a tiny top_p is 0 in fp32
        probabilities_V = torch.zeros_like(probabilities_V).index_put_((order[kept],), ordered[kept])
    return int(torch.multinomial(probabilities_V, 1, generator=generator))

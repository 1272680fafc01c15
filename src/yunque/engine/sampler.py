"""Tokens drawn from logits: each row by its own settings, seed and position, whatever stands beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yunque.engine.distribution import TEMPERATURE_MIN
from yunque.engine.noise import NoiseSource, Purpose
from yunque.engine.penalties import Penalties
from yunque.engine.truncation import truncated, truncates
from yunque.ops.ranking import best, best_ids
from yunque.protocol.generation import SamplingParams, TopToken

# Shapes: B rows of a batch, N those of them that are drawn by chance, T tokens of a sequence, V vocabulary.


@dataclass(slots=True)
class RowSampling:
    """How one row of logits becomes a token; an engine keeps one per request and moves ``position`` on.

    ``position`` is the index of the token to be drawn in prompt and reply together, so a reply that is continued
    elsewhere from its tokens draws the same ones. ``penalties`` where ``Penalties.are_needed``. ``allowed_V`` is
    what a constraint leaves (ids past its end are barred). ``barred_ids`` are stop ids that may not come yet; a
    constraint that leaves nothing else overrides them. ``drafts`` are tokens between those that ``penalties`` has
    observed and this row: a draft's row counts the drafts before it.
    """

    params: SamplingParams
    seed: int
    position: int
    penalties: Penalties | None = None
    allowed_V: NDArray[np.bool_] | None = None
    barred_ids: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    is_greedy: bool = field(init=False)
    truncates: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_greedy = self.params.temperature == 0
        self.truncates = truncates(self.params)

    @property
    def reshapes(self) -> bool:
        """Whether logits change before the temperature."""
        return self.penalties is not None or self.allowed_V is not None or bool(self.barred_ids)


@dataclass(frozen=True)
class Drawn:
    """The drawn tokens and what is told about them, row by row.

    ``logprobs_B`` is under the distribution drawn from (the model's own at temperature 0), ``model_logprobs_B``
    under the raw logits. ``top`` and ``kept`` are empty if no row asks for them; a row's kept set is None where
    every token could come.
    """

    tokens_B: Tensor
    logprobs_B: Tensor
    model_logprobs_B: Tensor
    top: tuple[tuple[TopToken, ...], ...] = ()
    kept: tuple[tuple[int, ...] | None, ...] = ()


class Sampler:
    """Draws tokens by the Gumbel-max rule: argmax(log-probability + noise(seed, position)).

    A row's result is a function of its logits, settings, seed and position. Draws that share the noise agree
    wherever their distributions do, which is how drafts are coupled with the tokens they foretell.
    """

    def __init__(self) -> None:
        self._noise = NoiseSource()

    def draw(self, logits_BV: Tensor, rows: Sequence[RowSampling]) -> Drawn:
        """One token per row of ``logits_BV`` (fp32). Raises ``ValueError`` if a row has no token left."""
        assert len(rows) == logits_BV.shape[0], f"{len(rows)} rows for {logits_BV.shape[0]} rows of logits"
        model_logprobs_BV = torch.log_softmax(logits_BV, -1)
        shaped_BV = _shaped(logits_BV, rows)
        chance = [index for index, row in enumerate(rows) if not row.is_greedy]
        law_NV = None
        if not chance:
            tokens_B = best(shaped_BV)
            logprobs_B = model_logprobs_B = _of(model_logprobs_BV, tokens_B)
        elif len(chance) == len(rows):
            law_NV = _law(shaped_BV, rows, model_logprobs_BV if shaped_BV is logits_BV else None)
            tokens_B = best(law_NV + self.noise(rows, law_NV))
            model_logprobs_B = _of(model_logprobs_BV, tokens_B)
            logprobs_B = model_logprobs_B if law_NV is model_logprobs_BV else _of(law_NV, tokens_B)
        else:
            drawn_rows = [rows[index] for index in chance]
            law_NV = _law(shaped_BV[chance], drawn_rows, None)
            tokens_B = best(shaped_BV)
            tokens_B[chance] = best(law_NV + self.noise(drawn_rows, law_NV))
            model_logprobs_B = _of(model_logprobs_BV, tokens_B)
            logprobs_B = model_logprobs_B.clone()
            logprobs_B[chance] = _of(law_NV, tokens_B[chance])
        return Drawn(
            tokens_B,
            logprobs_B,
            model_logprobs_B,
            top=_tops(model_logprobs_BV, rows) if any(row.params.num_top for row in rows) else (),
            kept=_kept_sets(law_NV, rows) if any(row.params.record_kept for row in rows) else (),
        )

    def laws(self, logits_BV: Tensor, rows: Sequence[RowSampling]) -> Tensor:
        """Log-probabilities [B, V] of what ``draw`` would draw; at temperature 0 a point mass."""
        shaped_BV = _shaped(logits_BV, rows)
        law_BV = _law(shaped_BV, rows, None)
        for index, row in enumerate(rows):
            if row.is_greedy:
                law_BV[index] = -math.inf
                law_BV[index, best(shaped_BV[index : index + 1])] = 0
        return law_BV

    def noise(self, rows: Sequence[RowSampling], like_NV: Tensor, purpose: Purpose = Purpose.TOKEN) -> Tensor:
        """The Gumbel noise [N, V] of the rows' seeds and positions, on the device of ``like_NV``."""
        size = like_NV.shape[1]
        noise_NV = np.empty((len(rows), size), np.float32)
        for index, row in enumerate(rows):
            noise_NV[index] = self._noise.gumbel(row.seed, row.position, size, purpose)
        return torch.from_numpy(noise_NV).to(like_NV.device)


def score(
    logits_TV: Tensor,
    tokens_T: Sequence[int],
    params: SamplingParams,
    *,
    penalties: Penalties | None = None,
    kept: Sequence[Sequence[int] | None] | None = None,
) -> Tensor:
    """Log-probability [T] that ``params`` give to each token after its row of logits; -inf for a removed one.

    At temperature 0 it is the model's own. ``penalties`` is the state before the first token, and is left so.
    ``kept`` are the sets recorded when the tokens were drawn: they are imposed instead of worked out again from
    logits that may differ a little (None: every token could come).
    """
    indices_T = torch.tensor(tokens_T, dtype=torch.int64, device=logits_TV.device)
    if params.temperature == 0:
        return _of(torch.log_softmax(logits_TV, -1), indices_T)
    scaled_TV = logits_TV.clone()
    if penalties is not None:
        for index, token in enumerate(tokens_T):
            penalties.apply_(scaled_TV[index])
            penalties.observe(token)
        for token in tokens_T:
            penalties.forget(token)
    scaled_TV /= max(params.temperature, TEMPERATURE_MIN)
    if kept is not None:
        for index, ids in enumerate(kept):
            if ids is not None:
                only_V = torch.full_like(scaled_TV[index], -math.inf)
                only_V[list(ids)] = scaled_TV[index, list(ids)]
                scaled_TV[index] = only_V
    elif truncates(params):
        scaled_TV = truncated(scaled_TV, [params] * len(tokens_T))
    return _of(torch.log_softmax(scaled_TV, -1), indices_T)


def _of(values_BV: Tensor, tokens_B: Tensor) -> Tensor:
    return values_BV.gather(1, tokens_B[:, None])[:, 0]


def _law(shaped_NV: Tensor, rows: Sequence[RowSampling], untempered_NV: Tensor | None) -> Tensor:
    """Log-probabilities [N, V] after temperature and truncation; ``untempered_NV`` if nothing of it is asked.

    A greedy row's are worked out as at temperature 1: whoever has such rows replaces them.
    """
    is_tempered = any(row.params.temperature != 1 for row in rows)
    cut = [index for index, row in enumerate(rows) if row.truncates]
    if untempered_NV is not None and not is_tempered and not cut:
        return untempered_NV
    if is_tempered:
        temperatures = [1.0 if row.is_greedy else max(row.params.temperature, TEMPERATURE_MIN) for row in rows]
        shaped_NV = shaped_NV / torch.tensor(temperatures, device=shaped_NV.device)[:, None]
    if len(cut) == len(rows):
        shaped_NV = truncated(shaped_NV, [row.params for row in rows])
    elif cut:
        shaped_NV = shaped_NV.clone()
        shaped_NV[cut] = truncated(shaped_NV[cut], [rows[index].params for index in cut])
    return torch.log_softmax(shaped_NV, -1)


def _shaped(logits_BV: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Logits after penalties, bias and barred tokens; ``logits_BV`` itself if no row has any."""
    if not any(row.reshapes for row in rows):
        return logits_BV
    logits_BV = logits_BV.clone()
    for logits_V, row in zip(logits_BV, rows, strict=True):
        if row.penalties is not None:
            for token in row.drafts:
                row.penalties.observe(token)
            row.penalties.apply_(logits_V)
            for token in row.drafts:
                row.penalties.forget(token)
        if row.allowed_V is not None or row.barred_ids:
            is_allowed_V = torch.from_numpy(_allowed(row, logits_V.shape[0])).to(logits_V.device)
            logits_V.masked_fill_(~is_allowed_V, -math.inf)
    return logits_BV


def _allowed(row: RowSampling, vocab_size: int) -> NDArray[np.bool_]:
    if row.allowed_V is None:
        is_allowed_V = np.ones(vocab_size, np.bool_)
    else:
        is_allowed_V = np.zeros(vocab_size, np.bool_)
        constrained = row.allowed_V[:vocab_size]
        is_allowed_V[: len(constrained)] = constrained
        if not constrained.any():
            raise ValueError(f"the constraint leaves no token at position {row.position}")
    barred = [token for token in row.barred_ids if token < vocab_size]
    without_barred_V = is_allowed_V.copy()
    without_barred_V[barred] = False
    return without_barred_V if without_barred_V.any() else is_allowed_V


def _tops(model_logprobs_BV: Tensor, rows: Sequence[RowSampling]) -> tuple[tuple[TopToken, ...], ...]:
    return tuple(
        _top(logprobs_V, row.params.num_top) if row.params.num_top else ()
        for logprobs_V, row in zip(model_logprobs_BV, rows, strict=True)
    )


def _top(logprobs_V: Tensor, count: int) -> tuple[TopToken, ...]:
    ids = best_ids(logprobs_V, count)
    return tuple(map(TopToken, ids.tolist(), logprobs_V[ids].tolist()))


def _kept_sets(law_NV: Tensor | None, rows: Sequence[RowSampling]) -> tuple[tuple[int, ...] | None, ...]:
    laws = iter(()) if law_NV is None else iter(law_NV)
    return tuple(None if row.is_greedy else _kept_set(next(laws), row) for row in rows)


def _kept_set(law_V: Tensor, row: RowSampling) -> tuple[int, ...] | None:
    if not row.params.record_kept or not (row.truncates or row.allowed_V is not None or row.barred_ids):
        return None
    return tuple((law_V > -math.inf).nonzero()[:, 0].tolist())

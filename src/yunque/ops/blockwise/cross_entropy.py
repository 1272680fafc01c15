"""Cross-entropy of a linear head in chunks of tokens, with the gradients formed during the forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from yunque.core.errors import DataError
from yunque.ops.blockwise.formed_gradients import wants_gradient, with_gradients
from yunque.ops.reference.cross_entropy import NO_TARGET, CrossEntropy

# Shapes: T tokens, L live ones (a target and a weight other than 0), C of a chunk; D hidden, V vocabulary.


def linear_cross_entropy(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, weights_T: Tensor, *, chunk_tokens: int = 256
) -> CrossEntropy:
    """-sum_t weights_t * log softmax(hidden_t @ weight.T)[targets_t], holding [chunk, V] logits at most.

    Tokens without a target (-1) or with weight 0 are skipped before any work: their hidden rows may hold
    anything. ``weights_T`` is a constant. Arithmetic is float32 (float64 for float64 inputs) whatever the
    inputs are; the gradients have the inputs' types. As d loss / d logits = weight * (softmax - onehot) is
    known once the chunk's logits are, the forward forms both gradients and the backward only scales them; a
    second derivative is refused. One call over concatenated tokens holds one weight gradient where several
    calls hold several.

    Raises DataError for a target outside the vocabulary and ValueError for shapes that do not fit.
    """
    _check_arguments(hidden_TD, weight_VD, targets_T, weights_T, chunk_tokens)
    rows_L = ((targets_T != NO_TARGET) & (weights_T != 0)).nonzero().squeeze(1)
    live = _Live(rows_L, targets_T.index_select(0, rows_L), weights_T.index_select(0, rows_L))
    _check_targets(live, weight_VD.shape[0])
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    found = _Found(
        log_probs_L=torch.empty_like(rows_L, dtype=wide),
        correct_L=torch.empty_like(rows_L, dtype=torch.bool),
        grad_hidden_TD=torch.zeros_like(hidden_TD) if wants_gradient(hidden_TD) else None,
        grad_weight_VD=torch.zeros_like(weight_VD, dtype=wide) if wants_gradient(weight_VD) else None,
    )
    with torch.no_grad(), torch.autocast(hidden_TD.device.type, enabled=False):
        _chunk_by_chunk(hidden_TD, weight_VD.to(wide), live, chunk_tokens, found)
        total = -torch.dot(live.weights_L.to(wide), found.log_probs_L)
    grad_weight_VD = None if found.grad_weight_VD is None else found.grad_weight_VD.to(weight_VD.dtype)
    total = with_gradients(
        total,
        (hidden_TD, weight_VD),
        (found.grad_hidden_TD, grad_weight_VD),
        name="linear_cross_entropy",
    )
    log_probs_T = found.log_probs_L.new_zeros(targets_T.shape).index_copy_(0, rows_L, found.log_probs_L)
    correct_T = found.correct_L.new_zeros(targets_T.shape).index_copy_(0, rows_L, found.correct_L)
    return CrossEntropy(total, log_probs_T, correct_T)


@dataclass(frozen=True)
class _Live:
    """The tokens that count: their rows, targets and weights."""

    rows_L: Tensor
    targets_L: Tensor
    weights_L: Tensor


@dataclass(frozen=True)
class _Found:
    """What one pass over the chunks fills in; a gradient that nobody wants is None."""

    log_probs_L: Tensor
    correct_L: Tensor
    grad_hidden_TD: Tensor | None
    grad_weight_VD: Tensor | None


def _chunk_by_chunk(hidden_TD: Tensor, weight_VD: Tensor, live: _Live, chunk_tokens: int, found: _Found) -> None:
    """Fill ``found``; ``weight_VD`` is wide already, each chunk of hidden rows is widened here."""
    num_live, wide = live.rows_L.shape[0], weight_VD.dtype
    tile_CV = weight_VD.new_empty((min(chunk_tokens, num_live), weight_VD.shape[0]))
    for begin in range(0, num_live, chunk_tokens):
        part = slice(begin, begin + chunk_tokens)
        rows_C, targets_C1 = live.rows_L[part], live.targets_L[part, None]
        hidden_CD = hidden_TD.index_select(0, rows_C).to(wide)
        logits_CV = torch.mm(hidden_CD, weight_VD.t(), out=tile_CV[: rows_C.shape[0]])
        # log p = logit - max - log(sum exp(logit - max)); the largest probability is 1 / that sum.
        highest_C = logits_CV.amax(1)
        logits_C = logits_CV.gather(1, targets_C1).squeeze(1)
        probs_CV = torch.softmax(logits_CV, 1, out=logits_CV)
        found.log_probs_L[part] = logits_C - highest_C + probs_CV.amax(1).log_()
        found.correct_L[part] = logits_C >= highest_C
        if found.grad_hidden_TD is None and found.grad_weight_VD is None:
            continue
        # The weight of a token scales the small factors, not the tile.
        errors_CV = probs_CV.scatter_add_(1, targets_C1, probs_CV.new_full((1, 1), -1.0).expand_as(targets_C1))
        weights_C1 = live.weights_L[part, None].to(wide)
        if found.grad_hidden_TD is not None:
            grad_CD = torch.mm(errors_CV, weight_VD).mul_(weights_C1)
            found.grad_hidden_TD.index_copy_(0, rows_C, grad_CD.to(hidden_TD.dtype))
        if found.grad_weight_VD is not None:
            found.grad_weight_VD.addmm_(errors_CV.t(), hidden_CD.mul_(weights_C1))


def _check_arguments(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, weights_T: Tensor, chunk_tokens: int
) -> None:
    shapes = [tuple(tensor.shape) for tensor in (hidden_TD, weight_VD, targets_T, weights_T)]
    num_tokens = hidden_TD.shape[0] if hidden_TD.ndim == 2 else -1
    fits = weight_VD.ndim == 2 and hidden_TD.shape[-1] == weight_VD.shape[1] and weight_VD.shape[0] > 0
    if not fits or shapes[2:] != [(num_tokens,)] * 2:
        raise ValueError(
            f"hidden {shapes[0]}, weight {shapes[1]}, targets {shapes[2]}, weights {shapes[3]} are not "
            "[T, D], [V, D], [T], [T]"
        )
    if weights_T.requires_grad:
        raise ValueError("weights_T requires a gradient, but it is a constant here: detach it")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")


def _check_targets(live: _Live, num_vocab: int) -> None:
    outside = (live.targets_L < 0) | (live.targets_L >= num_vocab)
    if outside.any():
        at = outside.nonzero()[0, 0]
        raise DataError(
            f"target {live.targets_L[at].item()} at token {live.rows_L[at].item()}: "
            f"valid are 0 to {num_vocab - 1}, and {NO_TARGET} for none"
        )

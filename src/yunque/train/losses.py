"""From a stage's settings to its loss and to the held-out losses it is judged by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from yunque.model.batch import PackedBatch
from yunque.model.objectives import IndexerWarmupLoss, LanguageModelLoss, LossConfig, LossFn, evaluate
from yunque.model.transformer import Transformer
from yunque.train.schedule import change_points
from yunque.train.stages import Attention, DsaSparse, DsaWarmup, LossWeights, Stage


@dataclass(frozen=True)
class Segment:
    """Part of a stage with constant loss weights: up to step ``end_step``."""

    end_step: int
    weights: LossWeights


def segments(stage: Stage) -> Iterator[Segment]:
    """The stage cut where a weight changes, each change at the first step that starts at or after it."""
    pace, start = stage.pace, 0
    for change in (*change_points(*stage.stepwise), stage.tokens):
        end = min(pace.steps(change), stage.steps)
        yield Segment(end, stage.weights_at(start))
        start = change


def stage_loss(stage: Stage, weights: LossWeights) -> LossFn:
    """The loss of ``stage`` while ``weights`` hold."""
    if isinstance(stage, DsaWarmup):
        return IndexerWarmupLoss()
    config = LossConfig(
        attention=stage.attends,
        mtp_weight=weights.mtp,
        mtp_steps=weights.mtp_steps,
        balance_weight=weights.balance,
        index_kl_weight=weights.index_kl,
        chunk_tokens=stage.loss_chunk,
        checkpoint=stage.checkpoint_activations,
    )
    return LanguageModelLoss(config)


def compared_attentions(stage: Stage) -> tuple[Attention, ...]:
    """The kinds of attention that a stage is measured with; the last one judges: what the stage works for."""
    return ("dense", "sparse") if isinstance(stage, DsaWarmup | DsaSparse) else (stage.attends,)


def held_out_losses(
    model: Transformer, batches: Iterable[PackedBatch], attentions: tuple[Attention, ...], *, chunk_tokens: int
) -> dict[str, float]:
    """Held-out next-token loss in nats per token, as ``heldout_<attention>``."""
    losses = {}
    for attention in attentions:
        config = LossConfig(attention=attention, mtp_weight=0.0, balance_weight=0.0, chunk_tokens=chunk_tokens)
        losses[f"heldout_{attention}"] = evaluate(model, batches, config).loss
    return losses

"""Losses of pre-training, sparse adaptation and fine-tuning: sums and counts over one packed batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from yunque.model.batch import NO_TARGET, PackedBatch
from yunque.model.cache import PackedView
from yunque.model.forward import ForwardMode, ForwardOutput, SideLosses
from yunque.model.transformer import MTPState, Transformer, shift_within_documents
from yunque.ops.blockwise.cross_entropy import linear_cross_entropy

# Shapes: T tokens, D model, N documents, L layers with experts, E experts.


@dataclass(frozen=True)
class Ratio:
    """A sum and its count, kept apart until everything is added up."""

    sum: Tensor
    count: Tensor


@dataclass(frozen=True)
class LossOutput:
    """``sum`` is differentiable; dividing by the global ``count`` is the caller's, once, over all microbatches."""

    sum: Tensor
    count: Tensor
    metrics: Mapping[str, Ratio] = field(default_factory=dict)
    expert_load_LE: Tensor | None = None


class LossFn(Protocol):
    """What a training step minimises."""

    def __call__(self, model: Transformer, batch: PackedBatch) -> LossOutput: ...


@dataclass(frozen=True)
class LossConfig:
    """Weights of the parts of the language-model loss.

    ``mtp_weight`` is shared evenly by ``mtp_steps`` predictions with one set of parameters (GLM-5: 3 steps; GLM-4.5
    weights: 0.3, later 0.1). ``balance_weight`` multiplies the sequence balance loss (1e-4). ``index_kl_weight``
    above 0 trains the indexer on its selected keys; the backbone never feels it. Cross-entropy holds
    ``chunk_tokens`` rows of logits at a time.
    """

    attention: Literal["sparse", "dense"] = "sparse"
    mtp_weight: float = 0.3
    mtp_steps: int = 3
    balance_weight: float = 1e-4
    index_kl_weight: float = 0.0
    chunk_tokens: int = 256
    checkpoint: bool = False

    def __post_init__(self) -> None:
        if self.index_kl_weight > 0 and self.attention == "dense":
            raise ValueError("index_kl_weight needs attention 'sparse': a dense pass has no selection to learn from")
        if self.mtp_steps < 1:
            raise ValueError(f"mtp_steps is {self.mtp_steps}; it must be at least 1 (mtp_weight 0 turns MTP off)")


@dataclass(frozen=True)
class LanguageModelLoss:
    """Next-token cross-entropy, MTP, sequence balance and the indexer's KL, each per loss-carrying token.

    sum = Σ_t m_t [ nll_t + mtp_weight / n Σ_k nll_t^(k) ] + balance_weight Σ_docs m_doc B_doc
    + index_kl_weight Σ_t m_t KL_t, where m is the loss mask; count = Σ_t m_t over tokens that have a target.
    """

    config: LossConfig = LossConfig()

    def __call__(self, model: Transformer, batch: PackedBatch) -> LossOutput:
        config = self.config
        weights_T = batch.loss_mask_T * (batch.targets_T != NO_TARGET)
        view = PackedView(batch)
        document_T, weight_N = _documents(batch, weights_T)
        mode = ForwardMode(
            attention=config.attention,
            index_loss_T=weights_T if config.index_kl_weight > 0 else None,
            balance_document_T=document_T if config.balance_weight > 0 else None,
            balance_weight_N=weight_N if config.balance_weight > 0 else None,
            checkpoint=config.checkpoint,
        )
        out = model(batch.tokens_T, view, mode)
        steps = config.mtp_steps if config.mtp_weight > 0 and model.config.num_nextn_predict_layers else 0
        rows = _Rows.collect(model, _Pass(batch, weights_T, view, mode, out), steps=steps)
        scale = config.mtp_weight / max(steps, 1)
        part_weights = torch.cat([w if k == 0 else w * scale for k, w in enumerate(rows.weights)])
        loss = linear_cross_entropy(
            torch.cat(rows.hidden),
            model.lm_head.weight,
            torch.cat(rows.targets),
            part_weights,
            chunk_tokens=config.chunk_tokens,
        )
        metrics = _part_metrics(loss.log_probs_T, loss.correct_T, rows)
        return _with_side(loss.sum, weights_T.sum(), metrics, out.side, config)


@dataclass(frozen=True)
class IndexerWarmupLoss:
    """DSA warm-up: KL(attention summed over heads || softmax of index scores) over all visible keys.

    Only the indexers learn, the MTP layer's included; the backbone runs dense and without gradient
    (DeepSeek-V3.2 report, eq. 3; GLM-5 report, 2.1.1).
    """

    def __call__(self, model: Transformer, batch: PackedBatch) -> LossOutput:
        # The last token of a document has no next one, so the MTP layer has nothing to join there.
        weights_T = (batch.targets_T != NO_TARGET).to(batch.loss_mask_T.dtype)
        view = PackedView(batch)
        mode = ForwardMode(attention="dense", index_loss_T=weights_T, indexer_only=True)
        out = model(batch.tokens_T, view, mode)
        if model.config.num_nextn_predict_layers:
            _Rows.collect(model, _Pass(batch, weights_T, view, mode, out), steps=1)
        total = out.side.index_kl
        assert total is not None
        count = weights_T.sum()
        return LossOutput(total, count, {"index_kl": Ratio(total.detach(), count)})


@dataclass(frozen=True)
class _Pass:
    """A finished main pass over a batch, with what the MTP steps need to go on from it."""

    batch: PackedBatch
    weights_T: Tensor
    view: PackedView
    mode: ForwardMode
    out: ForwardOutput


@dataclass(frozen=True)
class _Rows:
    """Hidden states, targets and weights of the next-token prediction (first) and of each MTP step."""

    hidden: list[Tensor]
    targets: list[Tensor]
    weights: list[Tensor]

    @classmethod
    def collect(cls, model: Transformer, main: _Pass, *, steps: int) -> _Rows:
        """Unroll ``steps`` MTP steps; their side losses join the main pass's."""
        batch, start = main.batch, main.batch.document_start_T
        rows = cls([main.out.hidden_TD], [batch.targets_T], [main.weights_T])
        state = MTPState(main.out.hidden_TD, None, 0)
        for ahead in range(1, steps + 1):
            # A row without a token ahead takes token 0: nothing looks at it, later rows of a document see earlier ones.
            next_tokens_T = shift_within_documents(batch.tokens_T, start, ahead, 0)
            state, layer_out = model.predict_next(state, next_tokens_T, main.view, main.mode)
            main.out.side.add(model.config.num_hidden_layers, layer_out)
            rows.hidden.append(state.hidden_TD)
            rows.targets.append(shift_within_documents(batch.targets_T, start, ahead, NO_TARGET))
            rows.weights.append(shift_within_documents(main.weights_T, start, ahead, 0.0))
        return rows


def _documents(batch: PackedBatch, weights_T: Tensor) -> tuple[Tensor, Tensor]:
    """Number of each token's document, int64 [T], and the loss weight of each document [N]."""
    starts = batch.document_start_T == torch.arange(batch.num_tokens, device=weights_T.device)
    document_T = starts.cumsum(0) - 1
    num_documents = int(document_T[-1]) + 1
    return document_T, weights_T.new_zeros(num_documents).index_add_(0, document_T, weights_T)


def _part_metrics(log_probs: Tensor, correct: Tensor, rows: _Rows) -> dict[str, Ratio]:
    size = rows.targets[0].shape[0]
    metrics: dict[str, Ratio] = {}
    for k, weights in enumerate(rows.weights):
        part = slice(k * size, (k + 1) * size)
        name = "loss" if k == 0 else f"mtp{k}_loss"
        metrics[name] = Ratio(-(log_probs[part] * weights).sum(), weights.sum())
        metrics[name.replace("loss", "accuracy")] = Ratio((correct[part] * weights).sum(), weights.sum())
    return metrics


def _with_side(
    total: Tensor, count: Tensor, metrics: dict[str, Ratio], side: SideLosses, config: LossConfig
) -> LossOutput:
    if side.balance is not None:
        total = total + config.balance_weight * side.balance
        metrics["balance"] = Ratio(side.balance.detach(), count)
    if side.index_kl is not None:
        total = total + config.index_kl_weight * side.index_kl
        metrics["index_kl"] = Ratio(side.index_kl.detach(), count)
    return LossOutput(total, count, metrics, side.expert_load_LE)


@dataclass(frozen=True)
class Evaluation:
    """Held-out result: nats per token, share of right next tokens, nats of each MTP step, tokens counted."""

    loss: float
    accuracy: float
    mtp_losses: tuple[float, ...]
    tokens: int


@torch.no_grad()
def evaluate(model: Transformer, batches: Iterable[PackedBatch], config: LossConfig) -> Evaluation:
    """Mean over all loss-carrying tokens of ``batches``. Raises ``ValueError`` when none carries any."""
    loss_fn = LanguageModelLoss(config)
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    device = model.lm_head.weight.device
    for batch in batches:
        for name, ratio in loss_fn(model, batch.to(device)).metrics.items():
            sums[name] = sums.get(name, 0.0) + float(ratio.sum)
            counts[name] = counts.get(name, 0.0) + float(ratio.count)
    if not counts.get("loss"):
        raise ValueError("no token of the evaluation batches carries a loss")
    # A prediction step that no document is long enough for counts nothing.
    mean = {name: sums[name] / (counts[name] or 1.0) for name in sums}
    mtp = tuple(mean[name] for k in range(1, config.mtp_steps + 1) if (name := f"mtp{k}_loss") in mean)
    return Evaluation(mean["loss"], mean["accuracy"], mtp, int(counts["loss"]))

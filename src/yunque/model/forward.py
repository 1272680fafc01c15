"""What a forward pass is asked to do, what it carries from layer to layer, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from yunque.model.cache import CacheView
from yunque.ops.visibility import Selection

# Shapes: T tokens, D model, F rotary pairs, L layers with experts, E experts, k experts per token, N documents.


@dataclass(frozen=True)
class Replay:
    """Choices to impose instead of making them: selections by layer, experts int64 [T, k] by layer.

    A sparse layer with an imposed selection writes its index keys but chooses nothing; its KL loss, where one is asked
    for, is over the imposed keys.
    """

    selections: Mapping[int, Selection] = field(default_factory=dict)
    experts: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ForwardMode:
    """How to run the model.

    ``attention``: "sparse" runs the indexer and attends to its selection; "dense" is plain MLA. With
    ``index_loss_T`` (weight of each query, fp32) the indexer's KL loss is formed; ``indexer_only`` runs the backbone
    dense and without gradient and takes that KL over all visible keys (DSA warm-up). ``balance_document_T`` and
    ``balance_weight_N`` ask for the sequence balance loss. ``always_score`` scores even where every visible key is
    kept anyway. ``checkpoint`` recomputes each layer's activations in the backward pass. ``trace`` records choices
    and layer outputs, ``replay`` imposes choices.
    """

    attention: Literal["sparse", "dense"] = "sparse"
    index_loss_T: Tensor | None = None
    indexer_only: bool = False
    balance_document_T: Tensor | None = None
    balance_weight_N: Tensor | None = None
    always_score: bool = False
    checkpoint: bool = False
    trace: bool = False
    replay: Replay | None = None

    def __post_init__(self) -> None:
        if self.indexer_only and self.index_loss_T is None:
            raise ValueError("indexer_only trains the indexer by its KL loss: index_loss_T is needed")

    def imposed_selection(self, layer: int) -> Selection | None:
        return None if self.replay is None else self.replay.selections.get(layer)

    def imposed_experts(self, layer: int) -> Tensor | None:
        return None if self.replay is None else self.replay.experts.get(layer)


@dataclass(frozen=True)
class Step:
    """What every layer of one pass shares: the view, the rotary phases (complex [T, F]), the mode."""

    view: CacheView
    phase_TF: Tensor
    mode: ForwardMode
    #: Rows that are tokens; with ``batch_invariant`` hidden states carry zero rows behind them.
    num_tokens: int
    #: Whether the indexer's loss carries a gradient (the caller's setting: warm-up runs the backbone without).
    index_grad: bool


@dataclass(frozen=True)
class LayerOutput:
    """Result of one layer: hidden states [T, D], the selection that shared layers above reuse, and its losses."""

    hidden_TD: Tensor
    selection: Selection | None
    index_kl: Tensor | None
    balance: Tensor | None
    expert_Tk: Tensor | None


@dataclass
class Trace:
    """Choices and outputs of a pass, by layer (the MTP layer is ``num_hidden_layers``)."""

    hidden: dict[int, Tensor] = field(default_factory=dict)
    selections: dict[int, Selection | None] = field(default_factory=dict)
    experts: dict[int, Tensor] = field(default_factory=dict)

    def add(self, layer: int, out: LayerOutput, num_tokens: int) -> None:
        """Record ``layer``, without the rows of padding behind its tokens."""
        self.hidden[layer] = out.hidden_TD[:num_tokens]
        self.selections[layer] = out.selection
        if out.expert_Tk is not None:
            self.experts[layer] = out.expert_Tk


class SideLosses:
    """What a pass leaves beside its hidden states, gathered layer by layer."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._index_kl: list[Tensor] = []
        self._balance: list[Tensor] = []
        self._experts: dict[int, list[Tensor]] = {}

    def add(self, layer: int, out: LayerOutput) -> None:
        """Take the losses and choices of ``layer``; a layer that runs several times (MTP) is added each time."""
        if out.index_kl is not None:
            self._index_kl.append(out.index_kl)
        if out.balance is not None:
            self._balance.append(out.balance)
        if out.expert_Tk is not None:
            self._experts.setdefault(layer, []).append(out.expert_Tk)

    @property
    def index_kl(self) -> Tensor | None:
        """Sum over queries (weighted), mean over the indexers."""
        return torch.stack(self._index_kl).mean() if self._index_kl else None

    @property
    def balance(self) -> Tensor | None:
        """Sequence balance loss, weighted by document, mean over layers."""
        return torch.stack(self._balance).mean() if self._balance else None

    @property
    def expert_load_LE(self) -> Tensor | None:
        """How many tokens chose each expert, int64, a row per layer with experts in order of layers."""
        rows = [self._count(self._experts[layer]) for layer in sorted(self._experts)]
        return torch.stack(rows) if rows else None

    def _count(self, choices: list[Tensor]) -> Tensor:
        return torch.bincount(torch.cat(choices).flatten(), minlength=self._num_experts)


@dataclass(frozen=True)
class ForwardOutput:
    """Hidden states after the final norm [T, D] and the pass's side losses; ``trace`` when it was asked for."""

    hidden_TD: Tensor
    side: SideLosses
    trace: Trace | None

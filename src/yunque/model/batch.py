"""A packed batch: documents laid end to end, each token knowing where its document starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

# Shapes: T tokens of all documents of the batch, in order.

#: Target of a token that has no next token inside its document.
NO_TARGET = -1


@dataclass(frozen=True)
class PackedBatch:
    """What every training stage consumes. There is no batch axis and no padding.

    ``tokens_T`` int64; ``targets_T`` int64, the next token of the same document or ``NO_TARGET``;
    ``loss_mask_T`` float32, the weight of predicting ``targets_T[t]``; ``document_start_T`` int64, the row where
    the token's document starts. ``columns`` holds further per-token tensors of leading size T.
    """

    tokens_T: Tensor
    targets_T: Tensor
    loss_mask_T: Tensor
    document_start_T: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, column in self._named():
            if column.shape[:1] != self.tokens_T.shape:
                raise ValueError(f"{name} has {tuple(column.shape)} rows for {self.num_tokens} tokens")

    def _named(self) -> list[tuple[str, Tensor]]:
        own = [(n, getattr(self, n)) for n in ("targets_T", "loss_mask_T", "document_start_T")]
        return own + [(f"columns[{n!r}]", column) for n, column in self.columns.items()]

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.shape[0]

    @property
    def positions_T(self) -> Tensor:
        """Position of each token inside its document, from 0."""
        return torch.arange(self.num_tokens, device=self.tokens_T.device) - self.document_start_T

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch on ``device``."""
        return replace(
            self,
            tokens_T=self.tokens_T.to(device),
            targets_T=self.targets_T.to(device),
            loss_mask_T=self.loss_mask_T.to(device),
            document_start_T=self.document_start_T.to(device),
            columns={name: column.to(device) for name, column in self.columns.items()},
        )

    @classmethod
    def from_documents(
        cls, documents: Sequence[Sequence[int]], masks: Sequence[Sequence[float]] | None = None
    ) -> PackedBatch:
        """Lay ``documents`` end to end.

        ``masks[d][i]`` is the loss weight of token ``i`` *being predicted* (its author is the model); it lands on
        the row of token ``i - 1``. Without masks every token that has a predecessor counts 1. Raises
        ``ValueError`` for an empty document or a mask of another length.
        """
        tokens: list[int] = []
        targets: list[int] = []
        weights: list[float] = []
        starts: list[int] = []
        for d, document in enumerate(documents):
            mask = [1.0] * len(document) if masks is None else masks[d]
            if not len(document) or len(mask) != len(document):
                raise ValueError(f"document {d} has {len(document)} tokens and a mask of {len(mask)}")
            starts += [len(tokens)] * len(document)
            tokens += list(document)
            targets += [*document[1:], NO_TARGET]
            weights += [*mask[1:], 0.0]
        return cls(
            tokens_T=torch.tensor(tokens, dtype=torch.int64),
            targets_T=torch.tensor(targets, dtype=torch.int64),
            loss_mask_T=torch.tensor(weights, dtype=torch.float32),
            document_start_T=torch.tensor(starts, dtype=torch.int64),
        )

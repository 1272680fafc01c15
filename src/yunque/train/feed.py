"""Batches on their way from the loader to the model: moved to the device, their origin remembered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from yunque.data.loader import Loader
from yunque.model.batch import PackedBatch

_SHOWN_PIECES = 4


class Feed:
    """An iterator over ``loader`` that can say where the latest ``remember`` batches came from."""

    def __init__(self, loader: Loader, device: torch.device, *, remember: int) -> None:
        self._loader = loader
        self._device = device
        self._places: deque[str] = deque(maxlen=remember)

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        batch = next(self._loader)
        self._places.append(self._describe())
        return batch.to(self._device)

    def place(self, back: int) -> str:
        """Where the batch ``back`` batches ago (1: the latest) came from: its number, and documents by
        source."""
        return self._places[-back] if 1 <= back <= len(self._places) else "an unknown place"

    def _describe(self) -> str:
        pieces = self._loader.last_pieces
        shown = [f"{p.source} document {p.document} [{p.start}:{p.stop}]" for p in pieces[:_SHOWN_PIECES]]
        more = f" and {len(pieces) - _SHOWN_PIECES} more" if len(pieces) > _SHOWN_PIECES else ""
        return f"batch {self._loader.report.batches} of the data ({', '.join(shown)}{more})"

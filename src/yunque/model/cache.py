"""Where attention reads and writes its rows: the packed batch itself, or preallocated sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Protocol

import torch
from torch import Tensor

from yunque.model.batch import PackedBatch
from yunque.model.config import ModelConfig
from yunque.ops.paged_rows import Rows
from yunque.ops.visibility import Block, Visibility

# Shapes: T tokens of this step, P pool rows, R row width, S sequences.


class CacheView(Protocol):
    """What a forward pass knows about the rows that exist already.

    ``positions_T`` int64: position of each token in its document. ``visibility``: which pool rows each token may
    see, once this step's rows are written.
    """

    @property
    def positions_T(self) -> Tensor: ...

    @property
    def visibility(self) -> Visibility: ...

    def write(self, layer: int, name: str, rows_TR: Tensor) -> Rows:
        """Store this step's rows of ``name`` ("latent" or "index") and return the pool [P, R] that holds them."""
        ...


class PackedView:
    """Training: the pool is the packed batch itself, every token sees its own document up to itself."""

    def __init__(self, batch: PackedBatch) -> None:
        device = batch.tokens_T.device
        first_T = batch.document_start_T.cpu()
        last_T = torch.arange(batch.num_tokens)
        self.positions_T = batch.positions_T
        self.visibility = Visibility.of(first_T, last_T, _document_blocks(first_T)).to(device)

    def write(self, layer: int, name: str, rows_TR: Tensor) -> Tensor:  # noqa: ARG002
        return rows_TR


#: Neighbouring documents shorter than this share one masked block: many tiny kernels cost more than a mask.
SHORT_DOCUMENT = 32
#: Rows of such a shared block.
SHARED_BLOCK = 256


def _document_blocks(first_T: Tensor) -> tuple[Block, ...]:
    """Blocks of a packed batch: runs of equally long documents as one batched block, short documents together."""
    starts = torch.unique_consecutive(first_T).tolist()
    spans = [(start, stop - start) for start, stop in pairwise([*starts, first_T.shape[0]])]
    blocks: list[Block] = []
    for length, run in groupby(spans, key=lambda span: span[1]):
        documents = list(run)
        blocks.append(_block(documents[0][0], length, len(documents), causal=True))
    return tuple(_merge_short(blocks))


def _merge_short(blocks: Sequence[Block]) -> list[Block]:
    merged: list[Block] = []
    for block in blocks:
        size = block.num_queries * block.num_sequences
        last = merged[-1] if merged else None
        if last is not None and max(block.num_queries, size) < SHORT_DOCUMENT and _is_shared_or_short(last):
            length = last.num_queries * last.num_sequences + size
            if length <= SHARED_BLOCK:
                merged[-1] = _block(last.query_start, length, 1, causal=False)
                continue
        merged.append(block)
    return merged


def _is_shared_or_short(block: Block) -> bool:
    return not block.causal or block.num_queries * block.num_sequences < SHORT_DOCUMENT


def _block(start: int, length: int, count: int, *, causal: bool) -> Block:
    return Block(
        query_start=start,
        num_queries=length,
        query_stride=length,
        key_start=start,
        num_keys=length,
        key_stride=length,
        num_sequences=count,
        causal=causal,
    )


class SequenceCache:
    """Preallocated rows for ``num_sequences`` sequences of at most ``capacity`` tokens each.

    The pool of a layer is the sequences laid end to end, ``capacity`` rows apart. ``step(counts)`` opens a view
    that adds ``counts[s]`` tokens to sequence ``s``: prefill, chunked prefill, decode and drafts are the same call.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_sequences: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity = capacity
        self.lengths = [0] * num_sequences
        self._device = torch.device(device)
        rows = num_sequences * capacity
        self._pools: dict[tuple[int, str], Tensor] = {}
        for layer in range(config.num_layers_with_mtp):
            self._pools[layer, "latent"] = torch.zeros((rows, config.latent_dim), dtype=dtype, device=device)
            if config.has_indexer(layer):
                self._pools[layer, "index"] = torch.zeros((rows, config.index_head_dim), dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.numel() * pool.element_size() for pool in self._pools.values())

    def step(self, counts: Sequence[int]) -> StepView:
        """A view whose T = sum(counts) tokens extend the sequences, in order of sequence; lengths grow at once.

        Raises ``ValueError`` when a sequence would outgrow ``capacity``.
        """
        if len(counts) != len(self.lengths):
            raise ValueError(f"{len(counts)} counts for {len(self.lengths)} sequences")
        for s, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            if length + count > self.capacity:
                raise ValueError(f"sequence {s} has {length} tokens; {count} more exceed its capacity {self.capacity}")
        view = StepView(self._pools, self.capacity, self.lengths, counts, self._device)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return view

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the rows of ``sequence`` from ``length`` on (rejected drafts, a shared prefix)."""
        if not 0 <= length <= self.lengths[sequence]:
            raise ValueError(f"length {length} is outside 0..{self.lengths[sequence]} of sequence {sequence}")
        self.lengths[sequence] = length


class StepView:
    """One step over preallocated sequences; see ``SequenceCache.step``."""

    def __init__(
        self,
        pools: dict[tuple[int, str], Tensor],
        capacity: int,
        lengths: Sequence[int],
        counts: Sequence[int],
        device: torch.device,
    ) -> None:
        self._pools = pools
        spans = [(s * capacity, length, count) for s, (length, count) in enumerate(zip(lengths, counts, strict=True))]
        spans = [span for span in spans if span[2] > 0]
        positions = [torch.arange(length, length + count) for _, length, count in spans]
        first_T = torch.cat(
            [torch.full((count,), start) for start, _, count in spans] or [torch.zeros(0, dtype=torch.int64)]
        )
        self.positions_T = torch.cat(positions or [torch.zeros(0, dtype=torch.int64)])
        self._rows_T = (first_T + self.positions_T).to(device)
        self._span = slice(int(self._rows_T[0]), int(self._rows_T[0]) + len(self._rows_T)) if len(spans) == 1 else None
        blocks = _step_blocks(spans, capacity)
        self.visibility = Visibility.of(first_T, first_T + self.positions_T, blocks).to(device)
        self.positions_T = self.positions_T.to(device)

    def write(self, layer: int, name: str, rows_TR: Tensor) -> Tensor:
        pool = self._pools[layer, name]
        if self._span is not None:
            pool[self._span] = rows_TR
        else:
            pool.index_copy_(0, self._rows_T, rows_TR.to(pool.dtype))
        return pool


def _step_blocks(spans: Sequence[tuple[int, int, int]], capacity: int) -> tuple[Block, ...]:
    """Decode (one token of every sequence) is one batched block; anything else a block per sequence."""
    if len(spans) > 1 and all(count == 1 for _, _, count in spans):
        starts = [start for start, _, _ in spans]
        if starts == list(range(starts[0], starts[0] + len(spans) * capacity, capacity)):
            longest = max(length for _, length, _ in spans) + 1
            causal = all(length + 1 == longest for _, length, _ in spans)
            return (Block(0, 1, 1, starts[0], longest, capacity, len(spans), causal),)
    blocks: list[Block] = []
    row = 0
    for start, length, count in spans:
        blocks.append(Block(row, count, count, start, length + count, capacity, 1, True))
        row += count
    return tuple(blocks)

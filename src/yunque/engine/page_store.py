"""The pages of every layer, and the view of one step on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from yunque.model.config import ModelConfig
from yunque.ops.paged_rows import PagedRows, Rows
from yunque.ops.visibility import Block, Visibility

# Shapes: T tokens of the step, R row width, N pages, g rows of a page, S sequences, p pages of a sequence.


@dataclass(frozen=True)
class Span:
    """``count`` new positions of one sequence, from ``start`` on.

    ``pages`` (int64) are the sequence's pages in order, enough for ``start + count`` positions. ``is_run`` says
    that they lie one after the other in the store.
    """

    pages: np.ndarray
    start: int
    count: int
    is_run: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.count


def pool_widths(config: ModelConfig, *, with_mtp: bool) -> dict[tuple[int, str], int]:
    """Row width of every pool by (layer, name): latents on every layer, index keys where a layer owns an indexer."""
    widths: dict[tuple[int, str], int] = {}
    for layer in range(config.num_layers_with_mtp if with_mtp else config.num_hidden_layers):
        widths[layer, "latent"] = config.latent_dim
        if config.has_indexer(layer):
            widths[layer, "index"] = config.index_head_dim
    return widths


def bytes_per_token(config: ModelConfig, dtype: torch.dtype, *, with_mtp: bool) -> int:
    """Cache bytes that one position takes in all pools."""
    return sum(pool_widths(config, with_mtp=with_mtp).values()) * dtype.itemsize


class PageStore:
    """Preallocated pools of ``num_pages`` pages of ``page_size`` rows. ``with_mtp`` keeps the MTP layer's rows too."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        with_mtp: bool = False,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = torch.device(device)
        self.pools = {
            key: torch.zeros((num_pages, page_size, width), dtype=dtype, device=device)
            for key, width in pool_widths(config, with_mtp=with_mtp).items()
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.numel() * pool.element_size() for pool in self.pools.values())

    def view(self, spans: Sequence[Span]) -> PagedView:
        """The view of a step that adds the tokens of ``spans``, in their order. There is at least one."""
        return PagedView(self, spans)


class PagedView:
    """Where one step's rows go and which rows each of its tokens may see; a ``CacheView`` over pages.

    One sequence whose pages lie in a row is addressed in place; otherwise each sequence has its own range of row
    numbers, and a table of pages translates (``ops.paged_rows``).
    """

    def __init__(self, store: PageStore, spans: Sequence[Span]) -> None:
        self._store = store
        size = store.page_size
        counts = [span.count for span in spans]
        starts = np.fromiter((span.start for span in spans), np.int64, len(spans))
        index_T, inside_T = _repeated(counts)
        positions_T = starts[index_T] + inside_T
        stops = [span.stop for span in spans]
        self._slice, self._table_Sp, self._rows_T = None, None, None
        if len(spans) == 1 and spans[0].is_run:
            base = int(spans[0].pages[0]) * size
            first_T = np.full(len(positions_T), base)
            self._slice = slice(base + spans[0].start, base + stops[0])
            blocks: tuple[Block, ...] = (Block(0, counts[0], counts[0], base, stops[0], 1, 1, True),)
        else:
            pages = -(-max(stops) // size)
            table_Sp = _table(spans, pages)
            first_T = index_T * (pages * size)
            self._table_Sp = torch.from_numpy(table_Sp).to(store.device)
            rows_T = table_Sp[index_T, positions_T // size] * size + positions_T % size
            self._rows_T = torch.from_numpy(rows_T).to(store.device)
            blocks = _blocks(counts, stops, pages * size)
        self.positions_T = torch.from_numpy(positions_T).to(store.device)
        mean = float(positions_T.mean()) + 1 if len(positions_T) else 0.0
        first, last = torch.from_numpy(first_T), torch.from_numpy(first_T + positions_T)
        self.visibility = Visibility(first.to(store.device), last.to(store.device), blocks, max(stops), mean)

    def write(self, layer: int, name: str, rows_TR: Tensor) -> Rows:
        pages_NgR = self._store.pools[layer, name]
        pool_PR = pages_NgR.view(-1, pages_NgR.shape[2])
        if self._slice is not None:
            pool_PR[self._slice] = rows_TR
            return pool_PR
        assert self._rows_T is not None
        assert self._table_Sp is not None
        pool_PR.index_copy_(0, self._rows_T, rows_TR.to(pool_PR.dtype))
        return PagedRows(pages_NgR, self._table_Sp)


def _repeated(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """For every token of the step: the number of its span, and its place in it."""
    if len(set(counts)) == 1:
        index = np.repeat(np.arange(len(counts)), counts[0])
        return index, np.tile(np.arange(counts[0]), len(counts))
    index = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts
    return index, np.arange(len(index)) - begins[index]


def _table(spans: Sequence[Span], pages: int) -> np.ndarray:
    """Pages of all sequences [S, p]; page 0 behind a shorter sequence's end, where nobody looks."""
    table = np.zeros((len(spans), pages), np.int64)
    for row, span in zip(table, spans, strict=True):
        held = span.pages[:pages]
        row[: len(held)] = held
    return table


def _blocks(counts: Sequence[int], stops: Sequence[int], stride: int) -> tuple[Block, ...]:
    """Equal counts make one batched block (decode, verification of drafts); else a block for each sequence."""
    if len(set(counts)) == 1:
        longest, causal = max(stops), len(set(stops)) == 1
        return (Block(0, counts[0], counts[0], 0, longest, stride, len(counts), causal),)
    begins = np.cumsum(counts) - counts
    return tuple(
        Block(int(begins[s]), count, count, s * stride, stop, stride, 1, True)
        for s, (count, stop) in enumerate(zip(counts, stops, strict=True))
    )

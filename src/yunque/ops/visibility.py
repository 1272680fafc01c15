"""Who may see whom: query rows, pool rows, and the keys that an indexer selected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from yunque.ops.paged_rows import PagedRows, Rows

# Shapes: T queries, P pool rows, K kept keys; n sequences, q queries and k keys of each.


#: Tiles of so few queries a sequence keep their mask for all layers: memory stays linear in the keys.
KEPT_MASK_QUERIES = 8


@dataclass(frozen=True)
class Block:
    """``num_sequences`` sequences alike.

    Sequence ``n`` owns the query rows ``query_start + n * query_stride + [0, num_queries)`` and may look at the
    pool rows ``key_start + n * key_stride + [0, num_keys)``. With ``causal`` every query ``i`` sees exactly the keys
    ``[0, num_keys - num_queries + i]``; without it ``Visibility.first_T`` and ``last_T`` decide.
    """

    query_start: int
    num_queries: int
    query_stride: int
    key_start: int
    num_keys: int
    key_stride: int
    num_sequences: int
    causal: bool

    def queries(self, rows_T: Tensor) -> Tensor:
        """The block's query rows of a tensor of leading size T, as a view [n, q, ...]."""
        return _rows(rows_T, self.query_start, self.query_stride, self.num_sequences, self.num_queries)

    def keys(self, pool_P: Rows) -> Tensor:
        """The block's pool rows [n, k, ...]: a view of a tensor of leading size P, a copy of paged rows."""
        return _pool_rows(pool_P, self.key_start, self.key_stride, self.num_sequences, self.num_keys)

    def key_offsets(self, device: torch.device) -> Tensor:
        """First pool row of each sequence, int64 [n, 1]."""
        return (self.key_start + self.key_stride * torch.arange(self.num_sequences, device=device))[:, None]


def _pool_rows(pool: Rows, start: int, stride: int, count: int, length: int) -> Tensor:
    if isinstance(pool, PagedRows):
        return pool.spans(start, stride, count, length)
    return _rows(pool, start, stride, count, length)


def _rows(rows: Tensor, start: int, stride: int, count: int, length: int) -> Tensor:
    if count == 1:
        return rows[start : start + length][None]
    step = rows.stride(0)
    shape, strides = (count, length, *rows.shape[1:]), (stride * step, *rows.stride())
    return rows.as_strided(shape, strides, rows.storage_offset() + start * step)


@dataclass(frozen=True, eq=False)
class Tile:
    """A part of a block that is small enough to score at once: sequences ``[n0, n1)``, queries ``[q0, q1)``.

    A view's tiles are made once and serve every layer, so what they know of their bounds is kept.
    """

    visibility: Visibility
    block: Block
    n0: int
    n1: int
    q0: int
    q1: int

    @property
    def num_keys(self) -> int:
        """Keys from the sequence's first pool row on that some query of the tile may see."""
        block = self.block
        return block.num_keys - block.num_queries + self.q1 if block.causal else block.num_keys

    def queries(self, rows_T: Tensor) -> Tensor:
        """View [n, q, ...] of the tile's query rows."""
        block = self.block
        start = block.query_start + self.n0 * block.query_stride + self.q0
        return _rows(rows_T, start, block.query_stride, self.n1 - self.n0, self.q1 - self.q0)

    def keys(self, pool_P: Rows) -> Tensor:
        """[n, num_keys, ...], the pool rows that the tile looks at: a view of a tensor, a copy of paged rows."""
        block = self.block
        start = block.key_start + self.n0 * block.key_stride
        return _pool_rows(pool_P, start, block.key_stride, self.n1 - self.n0, self.num_keys)

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """First and last visible key of each query, relative to the sequence's first pool row: two int64 [n, q]."""
        offset = self.block.key_offsets(self.visibility.first_T.device)[self.n0 : self.n1]
        return self.queries(self.visibility.first_T) - offset, self.queries(self.visibility.last_T) - offset

    @cached_property
    def max_visible(self) -> int:
        """The largest number of keys that one query of the tile sees."""
        first_nq, last_nq = self.bounds
        return int((last_nq - first_nq).max()) + 1

    @property
    def sees_everything(self) -> bool:
        """Whether every query sees all of the tile's keys, so that no mask is needed."""
        return self.block.causal and self.q1 - self.q0 == 1

    def visible(self) -> Tensor:
        """Bool [n, q, num_keys]: whether the query may see the key. The small ones of decode are kept."""
        if self.q1 - self.q0 > KEPT_MASK_QUERIES:
            return self._visible()
        return self._kept_visible

    @cached_property
    def _kept_visible(self) -> Tensor:
        return self._visible()

    def _visible(self) -> Tensor:
        first_nq, last_nq = self.bounds
        keys = torch.arange(self.num_keys, device=first_nq.device)
        mask = keys <= last_nq[..., None]
        return mask if self.block.causal else mask & (keys >= first_nq[..., None])

    def selected(self, selection: Selection) -> Tensor:
        """Bool [n, q, num_keys]: whether the query kept the key; never more than one tile of it exists."""
        positions = self.queries(selection.positions_TK)
        keys = positions.long() + self.bounds[0][..., None]
        mask = torch.zeros((*positions.shape[:2], self.num_keys + 1), dtype=torch.bool, device=keys.device)
        mask.scatter_(-1, torch.where(positions < 0, self.num_keys, keys), True)
        return mask[..., :-1]


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which pool rows each query may see: the range ``[first_T, last_T]`` (int64), its document up to itself.

    ``blocks`` cover all T queries in their order; ``max_visible`` and ``mean_visible`` are the largest and the mean
    number of keys that one query sees. A query with ``last_T < first_T`` sees nothing: no key, a zero output.
    """

    first_T: Tensor
    last_T: Tensor
    blocks: tuple[Block, ...]
    max_visible: int
    mean_visible: float

    @cached_property
    def num_rows(self) -> int:
        """Pool rows up to the last one that any block looks at."""
        ends = (b.key_start + (b.num_sequences - 1) * b.key_stride + b.num_keys for b in self.blocks)
        return max(ends, default=0)

    @classmethod
    def of(cls, first_T: Tensor, last_T: Tensor, blocks: tuple[Block, ...]) -> Visibility:
        """Build from the ranges (on the CPU, so that counting does not wait for a device)."""
        seen = (last_T - first_T + 1).clamp(min=0)
        most = int(seen.max()) if seen.numel() else 0
        return cls(first_T, last_T, blocks, most, float(seen.float().mean()) if seen.numel() else 0.0)

    def to(self, device: torch.device | str) -> Visibility:
        """The same visibility on ``device``."""
        return replace(self, first_T=self.first_T.to(device), last_T=self.last_T.to(device))

    def tiles(self, *, max_cells: int, max_queries: int = 128) -> tuple[Tile, ...]:
        """Tiles of at most ``max_cells`` rows x keys, with at most ``max_queries`` rows of a sequence."""
        key = (max_cells, max_queries)
        if key not in self._tiles:
            self._tiles[key] = tuple(self._cut(max_cells, max_queries))
        return self._tiles[key]

    @cached_property
    def _tiles(self) -> dict[tuple[int, int], tuple[Tile, ...]]:
        return {}

    def _cut(self, max_cells: int, max_queries: int) -> Iterator[Tile]:
        for block in self.blocks:
            q_step = max(1, min(block.num_queries, max_queries, max_cells // max(block.num_keys, 1)))
            n_step = max(1, max_cells // (q_step * max(block.num_keys, 1)))
            for n0 in range(0, block.num_sequences, n_step):
                for q0 in range(0, block.num_queries, q_step):
                    n1, q1 = min(n0 + n_step, block.num_sequences), min(q0 + q_step, block.num_queries)
                    yield Tile(self, block, n0, n1, q0, q1)


@dataclass(frozen=True)
class Selection:
    """The keys that each query kept.

    ``positions_TK`` int32: positions inside the query's own document (pool row minus ``first_T``), ascending,
    padded with -1 at the end. ``is_full`` promises that there is no padding; False says nothing.
    """

    positions_TK: Tensor
    is_full: bool = False

    def rows(self, first_T: Tensor) -> Tensor:
        """Pool rows int64 [T, K]; padding points at the query's first row and must be masked by ``positions < 0``."""
        return self.positions_TK.clamp(min=0).long() + first_T[:, None]

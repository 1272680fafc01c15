"""Tiles of queries with the keys they multiply: a shared range of pool rows, or a list for each query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from yunque.ops.blockwise.key_ranges import KeyRange, key_ranges
from yunque.ops.visibility import Selection, Visibility

# Shapes: T queries, L live ones, P pool rows, K kept keys; B queries of a tile, W keys of it, X heads of any
# kind, R width of any pool; M keys at the end of a shared range that not all of its queries may use.

#: A query that sees more than this many times K keys gathers what it kept; below, it scores all, hides some.
#: Measured: a gathered key costs three to five times a scored one.
GATHER_ABOVE = 4
#: What a hidden key's logit gets added: its exponential is 0, and so is 0 times it.
HIDDEN = -1e30


class KeyTile(Protocol):
    """The keys of some queries, and the products with them."""

    @property
    def rows_B(self) -> Tensor:
        """The queries' rows."""
        ...

    def take(self, pool_PR: Tensor) -> Tensor:
        """The tile's rows of a pool, for ``multiply`` and ``pull``."""
        ...

    def multiply(self, query_BXR: Tensor, taken: Tensor) -> Tensor:
        """query . key as a fresh [B, X, W]."""
        ...

    def hide_(self, logits_BXW: Tensor) -> Tensor:
        """The same logits, those of keys that a query may not use put out of reach."""
        ...

    def pull(self, passed_BXW: Tensor, taken: Tensor) -> Tensor:
        """sum over keys of passed * key [B, X, R]."""
        ...

    def push_(self, grad_PR: Tensor, passed_BXW: Tensor, query_BXR: Tensor) -> None:
        """Add the sum over queries and heads of passed * query to the keys' rows of ``grad_PR``."""
        ...


@dataclass(frozen=True)
class TileSize:
    """How many queries fit a tile of ``numbers`` numbers."""

    numbers: int
    numbers_per_score: int
    numbers_per_gathered_key: int

    @classmethod
    def on(cls, device: torch.device, *, numbers_per_score: int, numbers_per_gathered_key: int) -> TileSize:
        """4 MB on a CPU, where half as much pays more calls; 256 MB on devices that want large products."""
        numbers = 1 << 20 if device.type == "cpu" else 1 << 26
        return cls(numbers, numbers_per_score, numbers_per_gathered_key)

    def shared_rows(self, num_keys: int) -> int:
        """Queries of a tile whose keys are a range; at least 8, or adding to the keys' gradient dominates."""
        return min(128, max(8, self.numbers // (self.numbers_per_score * num_keys)))

    def own_rows(self, num_keys: int) -> int:
        """Queries of a tile of gathered keys, which is twice as large: it does less with each number."""
        return min(64, max(1, 2 * self.numbers // (self.numbers_per_gathered_key * num_keys)))


def key_tiles(
    visibility: Visibility, weights_T: Tensor, selection: Selection | None, size: TileSize
) -> Iterator[KeyTile]:
    """Every query with a weight and something to see, once: those that see many times K keys gather."""
    live = _Live.of(visibility, weights_T, selection)
    first_L, last_L = live.first_L.cpu().numpy(), live.last_L.cpu().numpy()
    complete_L, padded_L = live.complete_L.cpu().numpy(), live.padded_L.cpu().numpy()
    is_far_L = np.zeros_like(complete_L)
    if selection is not None:
        is_far_L = last_L - first_L >= GATHER_ABOVE * selection.positions_TK.shape[1]
    near_L, far_L = np.flatnonzero(~is_far_L), np.flatnonzero(is_far_L)

    near_device_L = torch.from_numpy(near_L).to(live.rows_L.device)
    for keys in key_ranges(first_L[near_L], last_L[near_L], size.shared_rows):
        part = slice(keys.begin, keys.end)
        if selection is None or complete_L[near_L[part]].all():
            yield _visible_range(live, near_device_L[part], keys)
        else:
            yield _kept_range(live, selection, near_device_L[part], keys)
    if selection is None:
        return
    far_device_L = torch.from_numpy(far_L).to(live.rows_L.device)
    step = size.own_rows(selection.positions_TK.shape[1])
    for begin in range(0, len(far_L), step):
        part = slice(begin, begin + step)
        yield _kept_list(live, selection, far_device_L[part], bool(padded_L[far_L[part]].any()))


@dataclass(frozen=True)
class _Live:
    """The queries that count: their rows, their first and last visible key, and what they kept of that range.

    ``complete_L``: they kept all of it. ``padded_L``: they kept fewer than K.
    """

    rows_L: Tensor
    first_L: Tensor
    last_L: Tensor
    complete_L: Tensor
    padded_L: Tensor

    @classmethod
    def of(cls, visibility: Visibility, weights_T: Tensor, selection: Selection | None) -> _Live:
        first_T, last_T = visibility.first_T, visibility.last_T
        live_T = (weights_T != 0) & (last_T >= first_T)
        complete_T, padded_T = torch.ones_like(live_T), torch.zeros_like(live_T)
        if selection is not None:
            # Positions ascend without repeats: if the n-th is n - 1, all of n visible keys were kept.
            final_T1, num_kept = (last_T - first_T)[:, None], selection.positions_TK.shape[1]
            held_T1 = selection.positions_TK.gather(1, final_T1.clamp(0, num_kept - 1))
            complete_T = ((held_T1 == final_T1) & (final_T1 < num_kept)).squeeze(1)
            live_T &= selection.positions_TK[:, 0] >= 0
            padded_T = selection.positions_TK[:, -1] < 0
        rows_L = live_T.nonzero().squeeze(1)
        return cls(rows_L, *(t.index_select(0, rows_L) for t in (first_T, last_T, complete_T, padded_T)))


@dataclass(frozen=True)
class _SharedKeys:
    """All queries multiply the pool rows [begin, end); ``bias`` hides some of the last M of them."""

    rows_B: Tensor
    begin: int
    end: int
    bias_BM: Tensor

    def take(self, pool_PR: Tensor) -> Tensor:
        return pool_PR[self.begin : self.end]

    def multiply(self, query_BXR: Tensor, taken: Tensor) -> Tensor:
        return torch.mm(query_BXR.flatten(0, 1), taken.t()).view(*query_BXR.shape[:2], -1)

    def hide_(self, logits_BXW: Tensor) -> Tensor:
        logits_BXW[:, :, self.end - self.begin - self.bias_BM.shape[1] :].add_(self.bias_BM[:, None])
        return logits_BXW

    def pull(self, passed_BXW: Tensor, taken: Tensor) -> Tensor:
        return torch.mm(passed_BXW.flatten(0, 1), taken).view(*passed_BXW.shape[:2], -1)

    def push_(self, grad_PR: Tensor, passed_BXW: Tensor, query_BXR: Tensor) -> None:
        grad_PR[self.begin : self.end].addmm_(passed_BXW.flatten(0, 1).t(), query_BXR.flatten(0, 1))


@dataclass(frozen=True)
class _OwnKeys:
    """Each query multiplies the pool rows of its list; ``bias`` hides the padding, None if there is none."""

    rows_B: Tensor
    keys_BW: Tensor
    bias_BW: Tensor | None

    def take(self, pool_PR: Tensor) -> Tensor:
        return pool_PR.index_select(0, self.keys_BW.flatten()).view(*self.keys_BW.shape, -1)

    def multiply(self, query_BXR: Tensor, taken: Tensor) -> Tensor:
        return torch.bmm(query_BXR, taken.transpose(1, 2))

    def hide_(self, logits_BXW: Tensor) -> Tensor:
        return logits_BXW if self.bias_BW is None else logits_BXW.add_(self.bias_BW[:, None])

    def pull(self, passed_BXW: Tensor, taken: Tensor) -> Tensor:
        return torch.bmm(passed_BXW, taken)

    def push_(self, grad_PR: Tensor, passed_BXW: Tensor, query_BXR: Tensor) -> None:
        added_BWR = torch.bmm(passed_BXW.transpose(1, 2), query_BXR)
        grad_PR.index_add_(0, self.keys_BW.flatten(), added_BWR.flatten(0, 1))


def _visible_range(live: _Live, part_B: Tensor, keys: KeyRange) -> KeyTile:
    """Each query uses every key that it sees."""
    first_B1 = live.first_L.index_select(0, part_B)[:, None] - keys.key_begin
    last_B1 = live.last_L.index_select(0, part_B)[:, None] - keys.key_begin
    columns_M = torch.arange(keys.shared, keys.num_keys, device=part_B.device)
    bias_BM = ((columns_M < first_B1) | (columns_M > last_B1)).float().mul_(HIDDEN)
    return _SharedKeys(live.rows_L.index_select(0, part_B), keys.key_begin, keys.key_end, bias_BM)


def _kept_range(live: _Live, selection: Selection, part_B: Tensor, keys: KeyRange) -> KeyTile:
    """Each query uses the keys that it kept; the others of the range are multiplied in vain and hidden."""
    rows_B = live.rows_L.index_select(0, part_B)
    positions_BK = selection.positions_TK.index_select(0, rows_B)
    first_B1 = live.first_L.index_select(0, part_B)[:, None] - keys.key_begin
    columns_BK = torch.where(positions_BK < 0, keys.num_keys, positions_BK + first_B1)
    bias_BM = torch.full((len(rows_B), keys.num_keys + 1), HIDDEN, device=rows_B.device)
    return _SharedKeys(rows_B, keys.key_begin, keys.key_end, bias_BM.scatter_(1, columns_BK, 0.0)[:, :-1])


def _kept_list(live: _Live, selection: Selection, part_B: Tensor, is_padded: bool) -> KeyTile:
    """Each query gathers the keys that it kept."""
    rows_B = live.rows_L.index_select(0, part_B)
    positions_BK = selection.positions_TK.index_select(0, rows_B)
    keys_BK = positions_BK.clamp(min=0) + live.first_L.index_select(0, part_B)[:, None]
    bias_BK = (positions_BK < 0).float().mul_(HIDDEN) if is_padded else None
    return _OwnKeys(rows_B, keys_BK, bias_BK)

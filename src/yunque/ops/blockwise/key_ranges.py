"""Runs of queries whose visible keys lie close together, so that one dense tile serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Documents of fewer keys share a tile even though most of it is hidden: one call costs more than the cells.
SMALL_KEYS = 128


@dataclass(frozen=True)
class KeyRange:
    """Queries ``[begin, end)`` see keys of ``[key_begin, key_end)``; all of them see the first ``shared``."""

    begin: int
    end: int
    key_begin: int
    key_end: int
    shared: int

    @property
    def num_keys(self) -> int:
        return self.key_end - self.key_begin


def key_ranges(
    first_L: NDArray[np.int64], last_L: NDArray[np.int64], rows_for: Callable[[int], int]
) -> Iterator[KeyRange]:
    """Cut queries that see the keys ``[first, last]`` into ranges of ``rows_for(keys of the range)`` queries.

    Consecutive queries of the same first key (a document) are cut where the range is full; short documents
    join their neighbours while the range stays small or within twice the keys of its widest document.
    """
    ends = [*(np.flatnonzero(np.diff(first_L)) + 1).tolist(), len(first_L)]
    run, begin = 0, 0
    while begin < len(first_L):
        reach = min(begin + rows_for(1), ends[run])
        rows = rows_for(int(last_L[begin:reach].max() - first_L[begin]) + 1)
        end = min(begin + rows, ends[run])
        low, high = int(first_L[begin]), int(last_L[begin:end].max())
        widest = high - low + 1
        while end == ends[run] and run + 1 < len(ends):
            far = ends[run + 1]
            next_low, next_high = int(first_L[end]), int(last_L[end:far].max())
            joined_low, joined_high = min(low, next_low), max(high, next_high)
            joined, joined_widest = joined_high - joined_low + 1, max(widest, next_high - next_low + 1)
            if joined > max(SMALL_KEYS, 2 * joined_widest) or far - begin > rows_for(joined):
                break
            run, end, low, high, widest = run + 1, far, joined_low, joined_high, joined_widest
        starts_alike = int(first_L[begin:end].max()) == low
        yield KeyRange(begin, end, low, high + 1, int(last_L[begin:end].min()) + 1 - low if starts_alike else 0)
        begin = end
        run += end == ends[run]

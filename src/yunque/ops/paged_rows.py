"""Rows of many sequences that lie in pages of one store, addressed as if each sequence lay in one piece."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Shapes: N pages of the store, g rows of a page, R row width, S sequences, p pages of each; I rows asked for.


@dataclass(frozen=True, eq=False)
class PagedRows:
    """A pool whose row ``s * p * g + i`` is row ``i`` of sequence ``s``; it stands in page ``table_Sp[s, i // g]``.

    ``store_NgR`` are the pages; entries of the table behind a sequence's end may name any page. For inference: rows
    come out as copies, without gradients.
    """

    store_NgR: Tensor
    table_Sp: Tensor

    @property
    def page_size(self) -> int:
        return self.store_NgR.shape[1]

    @property
    def width(self) -> int:
        return self.store_NgR.shape[2]

    def spans(self, start: int, stride: int, count: int, length: int) -> Tensor:
        """[count, length, R]: the rows ``start + n * stride + [0, length)``. Start and stride are whole pages."""
        size = self.page_size
        pages = -(-length // size)
        if stride == self.table_Sp.shape[1] * size:
            first, offset = divmod(start, stride)
            table_np = self.table_Sp[first : first + count, offset // size : offset // size + pages]
        else:
            begin = start // size
            table_np = self.table_Sp.flatten()[begin : begin + pages][None]
            assert count == 1, (start, stride, count)
        rows = self.store_NgR.index_select(0, table_np.flatten())
        return rows.view(count, pages * size, self.width)[:, :length]

    def take(self, index_I: Tensor) -> Tensor:
        """The rows at ``index_I`` (int64), [I, R]."""
        size = self.page_size
        page_I = self.table_Sp.flatten().index_select(0, index_I // size)
        return self.store_NgR.flatten(0, 1).index_select(0, page_I * size + index_I % size)


Rows = Tensor | PagedRows


def take_rows(pool: Rows, index_I: Tensor) -> Tensor:
    """Rows of a pool by number, [I, R]."""
    return pool.take(index_I) if isinstance(pool, PagedRows) else pool.index_select(0, index_I)


def row_width(pool: Rows) -> int:
    """R."""
    return pool.width if isinstance(pool, PagedRows) else pool.shape[1]


def first_rows(pool: Rows, count: int) -> Tensor:
    """The first ``count`` rows; of a plain pool a view."""
    if isinstance(pool, PagedRows):
        return pool.spans(0, 0, 1, count)[0]
    return pool[:count]


def require_plain(pool: Rows) -> Tensor:
    """The pool itself, where an operation with a gradient works in place on rows that lie in one piece."""
    assert isinstance(pool, Tensor), "paged rows are for inference"
    return pool


__all__ = ["PagedRows", "Rows", "first_rows", "require_plain", "row_width", "take_rows"]

"""Ranges of queries: complete, in order, never too large, and not wasteful."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from yunque.ops.blockwise.key_ranges import SMALL_KEYS, key_ranges


def documents(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """First and last visible key of each query of packed documents."""
    first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    return first, np.arange(sum(lengths))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(20, 5000), st.integers(0, 99))
@settings(deadline=None)
def test_every_query_is_in_one_range_with_all_its_keys(lengths, cells, seed):
    first, last = documents(lengths)
    is_live = np.random.default_rng(seed).random(len(first)) < 0.6
    first, last = first[is_live], last[is_live]

    def rows_for(num_keys: int) -> int:
        return max(2, min(64, cells // num_keys))

    begin = 0
    for found in key_ranges(first, last, rows_for):
        assert found.begin == begin < found.end
        begin = found.end
        part = slice(found.begin, found.end)
        assert found.key_begin == first[part].min()
        assert found.key_end == last[part].max() + 1
        assert 0 <= found.shared <= found.num_keys
        if found.shared:
            assert (first[part] == found.key_begin).all()
            assert last[part].min() + 1 - found.key_begin == found.shared
        assert found.end - found.begin <= rows_for(1)
        widest = int((last[part] - first[part]).max()) + 1
        assert found.num_keys <= max(SMALL_KEYS, 2 * widest)
    assert begin == len(first)


def test_one_document_is_cut_where_the_rows_say():
    first, last = documents([10])
    found = list(key_ranges(first, last, lambda _: 4))
    assert [(r.begin, r.end, r.num_keys, r.shared) for r in found] == [
        (0, 4, 4, 1),
        (4, 8, 8, 5),
        (8, 10, 10, 9),
    ]


def test_documents_of_one_token_share_ranges():
    first, last = documents([1] * 256)
    assert [r.end - r.begin for r in key_ranges(first, last, lambda _: 64)] == [64] * 4


def test_far_apart_pool_rows_are_not_joined():
    first, last = np.array([0, 0, 100_000]), np.array([3, 4, 100_002])
    assert [(r.key_begin, r.key_end) for r in key_ranges(first, last, lambda _: 64)] == [
        (0, 5),
        (100_000, 100_003),
    ]


def test_no_queries_give_no_ranges():
    nothing = np.zeros(0, dtype=np.int64)
    assert list(key_ranges(nothing, nothing, lambda _: 64)) == []

"""The page allocator: contiguous runs, reference counts, all or nothing."""

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunque.engine.pages import OutOfPages, PageAllocator, pages_for


def free_runs(allocator: PageAllocator) -> list[tuple[int, int]]:
    """First page and length of every free run, found one page at a time."""
    runs: list[tuple[int, int]] = []
    for page in range(allocator.reserved, allocator.num_pages):
        if not allocator.is_free(page):
            continue
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


def expected_pages(allocator: PageAllocator, count: int, after: int | None, room: int) -> list[int]:
    """The stated rule, by brute force: behind ``after``, then the lowest run that fits (after a gap of ``room``, if
    one is long enough), or the longest."""
    pages: list[int] = []
    runs = free_runs(allocator)
    while len(pages) < count:
        need = count - len(pages)
        behind = [run for run in runs if not pages and after is not None and run[0] == after + 1]
        roomy = [run for run in runs if room and run[1] >= need + room]
        fitting = [run for run in runs if run[1] >= need]
        longest = [max(runs, key=lambda run: (run[1], -run[0]))]
        first, length = (behind or roomy or fitting or longest)[0]
        runs.remove((first, length))
        if not behind and roomy and first > allocator.reserved:
            runs.append((first, room))
            first, length = first + room, length - room
        pages += range(first, first + min(length, need))
        if need < length:
            runs.append((first + need, length - need))
        runs.sort()
    return pages


@given(st.integers(1, 50), st.integers(0, 3), st.integers(0, 2**32))
def test_pages_are_those_of_the_stated_rule(num_pages, reserved, seed):
    draw = random.Random(seed)
    allocator = PageAllocator(num_pages + reserved, 16, reserved=reserved)
    held: list[list[int]] = []
    for _ in range(40):
        if held and draw.random() < 0.45:
            pages = held.pop(draw.randrange(len(held)))
            keep = draw.randrange(len(pages) + 1)
            allocator.release(pages[keep:])
            held += [pages[:keep]] if keep else []
        else:
            count = draw.randint(0, 8)
            after = draw.choice(held)[-1] if held and draw.random() < 0.6 else None
            room = draw.choice([0, 0, 1, 5])
            if count > allocator.num_free:
                before = free_runs(allocator)
                with pytest.raises(OutOfPages):
                    allocator.allocate(count, after=after, room=room)
                assert free_runs(allocator) == before
                continue
            expected = expected_pages(allocator, count, after, room)
            pages = allocator.allocate(count, after=after, room=room)
            assert pages == expected
            held += [pages] if pages else []
        assert allocator.num_free == sum(length for _, length in free_runs(allocator))
        assert allocator.num_used == sum(len(pages) for pages in held) == num_pages - allocator.num_free


def test_a_sequence_that_grows_alone_is_one_ascending_run():
    allocator = PageAllocator(200, 16, reserved=1)
    pages = allocator.allocate(3)
    for _ in range(100):
        pages += allocator.allocate(1, after=pages[-1])
    assert pages == list(range(1, 104))


def test_sequences_that_grow_side_by_side_stay_one_run_each_where_there_is_room():
    for room, num_pieces in [(0, 16 * 33), (32, 16), (31, 32)]:
        allocator = PageAllocator(1000, 16, reserved=1)
        sequences = [allocator.allocate(4, room=room) for _ in range(16)]
        for _ in range(32):
            for pages in sequences:
                pages += allocator.allocate(1, after=pages[-1], room=room)
        jumps = sum(page != before + 1 for pages in sequences for before, page in pairwise(pages))
        assert 16 + jumps == num_pieces


def test_room_is_given_up_before_a_page_is_refused():
    allocator = PageAllocator(20, 16)
    taken = [allocator.allocate(2, room=6) for _ in range(10)]
    assert taken[:4] == [[0, 1], [8, 9], [16, 17], [2, 3]]
    assert sorted(page for pages in taken for page in pages) == list(range(20))


def test_a_page_is_free_when_its_last_holder_lets_go():
    allocator = PageAllocator(4, 16)
    pages = allocator.allocate(2)
    allocator.share(pages)
    allocator.share(pages[:1])
    assert [allocator.references(page) for page in pages] == [3, 2]
    allocator.release([*pages, *pages])
    assert [allocator.references(page) for page in pages] == [1, 0]
    assert (allocator.num_free, allocator.is_free(pages[0])) == (3, False)


def test_changes_between_one_and_two_holders_are_told():
    allocator = PageAllocator(8, 16)
    told: list[list[int]] = []
    allocator.watch(told.append)
    allocator.share(allocator.allocate(2))
    allocator.share([1])
    allocator.release([1])
    allocator.release([0, 1])
    allocator.release([0])
    assert told == [[0, 1], [0, 1]]


def test_what_nobody_holds_is_neither_released_nor_shared():
    allocator = PageAllocator(6, 16, reserved=1)
    pages = allocator.allocate(2)
    for wrong in ([3], [0], [-1], [6], [*pages, 4], [pages[0], pages[0]]):
        with pytest.raises(ValueError, match="page"):
            allocator.release(wrong)
    for wrong in ([3], [0], [-1], [6], [*pages, 4]):
        with pytest.raises(ValueError, match="page"):
            allocator.share(wrong)
    assert [allocator.references(page) for page in pages] == [1, 1]
    for after in (4, 6, -1):
        with pytest.raises(ValueError, match="page"):
            allocator.allocate(1, after=after)
    with pytest.raises(ValueError, match="negative"):
        allocator.allocate(-1)
    with pytest.raises(ValueError, match="negative"):
        allocator.allocate(1, room=-1)
    assert allocator.allocate(1, after=0) == [3]
    assert allocator.num_free == 2


@pytest.mark.parametrize(("num_pages", "page_size", "reserved"), [(0, 16, 0), (4, 0, 0), (4, 16, 4), (4, 16, -1)])
def test_sizes_that_make_no_cache_are_refused(num_pages, page_size, reserved):
    with pytest.raises(ValueError, match="must be at least"):
        PageAllocator(num_pages, page_size, reserved=reserved)


def test_pages_for_rounds_up():
    assert [pages_for(tokens, 16) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def seconds_per_growth(num_pages: int) -> float:
    """The time of one page for a sequence among 64, in a cache of ``num_pages``."""
    allocator = PageAllocator(num_pages, 16)
    lasts = [allocator.allocate(1)[0] for _ in range(64)]
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        for index in range(64):
            lasts[index] = allocator.allocate(1, after=lasts[index])[0]
        best = min(best, (time.process_time() - started) / 64)
    return best


def test_growing_costs_the_same_in_a_hundred_times_larger_cache():
    assert seconds_per_growth(200_000) < 10 * seconds_per_growth(2_000)

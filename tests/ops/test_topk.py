"""Deterministic top-k against the specification: ties, infinities, NaN, ragged and empty rows."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from yunque.ops.blockwise.topk import all_visible, top_positions
from yunque.ops.reference import topk as reference

# Few distinct values make ties the rule, as ReLU does in the indexer.
VALUES = st.sampled_from([0.0, 0.0, -0.0, 1.0, -1.0, 0.5, float("inf"), float("-inf"), float("nan")])


@st.composite
def rows(draw):
    """Scores [Q, N], visible ranges, k."""
    num_rows, num_keys = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    scores = draw(st.lists(VALUES, min_size=num_rows * num_keys, max_size=num_rows * num_keys))
    first = [draw(st.integers(0, num_keys - 1)) for _ in range(num_rows)]
    last = [draw(st.integers(start - 1, num_keys - 1)) for start in first]
    k = draw(st.integers(1, num_keys + 2))
    return torch.tensor(scores).view(num_rows, num_keys), torch.tensor(first), torch.tensor(last), k


@given(rows())
def test_top_positions_equal_the_specification_on_ties_infinities_and_nan(case):
    scores, first, last, k = case
    expected = reference.top_positions(scores, first, last, k)
    assert torch.equal(top_positions(scores.clone(), first, last, k), expected)


@given(rows())
def test_rows_that_see_all_keys_equal_the_specification(case):
    scores, first, last, k = case
    first, last = torch.zeros_like(first), torch.full_like(last, scores.shape[1] - 1)
    expected = reference.top_positions(scores, first, last, k)
    assert torch.equal(top_positions(scores.clone(), first, last, k, all_seen=True), expected)


@given(rows())
@example((torch.full((3, 8), float("nan")), torch.zeros(3, dtype=torch.int64), torch.tensor([7, 3, -1]), 4))
@example((torch.full((1, 8), float("-inf")), torch.tensor([2]), torch.tensor([6]), 3))
@example((torch.full((1, 8), float("inf")), torch.tensor([2]), torch.tensor([6]), 3))
def test_positions_are_in_range_unique_ascending_and_padded_at_the_end(case):
    """sglang#30698: equal, infinite and NaN scores made invalid indices.
    sglang#31123: padded rows of negative length. sglang#33197: rows of ragged lengths."""
    scores, first, last, k = case
    kept = top_positions(scores.clone(), first, last, k)
    assert kept.dtype == torch.int32
    assert kept.shape == (scores.shape[0], k)
    for row, begin, end in zip(kept.tolist(), first.tolist(), last.tolist(), strict=True):
        visible = max(end - begin + 1, 0)
        chosen = row[: min(k, visible)]
        assert chosen == sorted(set(chosen))
        assert all(0 <= position < visible for position in chosen)
        assert row[len(chosen) :] == [-1] * (k - len(chosen))


@pytest.mark.parametrize("value", [0.0, 3.5, float("inf"), float("-inf")])
def test_all_tied_scores_keep_the_lowest_positions_in_twenty_runs(value):
    """sglang#31115: a plateau of equal scores gave another set on 21 of 25 replays."""
    scores = torch.full((5, 300), value)
    first, last = torch.tensor([0, 0, 7, 100, 290]), torch.tensor([299, 50, 299, 103, 299])
    for _ in range(20):
        kept = top_positions(scores.clone(), first, last, 16)
        for row, begin, end in zip(kept.tolist(), first.tolist(), last.tolist(), strict=True):
            count = min(16, end - begin + 1)
            assert row == [*range(count), *[-1] * (16 - count)]


def test_ties_at_the_boundary_go_to_the_lowest_positions():
    scores = torch.tensor([[1.0, 2.0, 1.0, 3.0, 1.0, 1.0]])
    kept = top_positions(scores, torch.tensor([0]), torch.tensor([5]), 4)
    assert kept.tolist() == [[0, 1, 2, 3]]


def test_nan_ranks_with_minus_infinity_below_every_number():
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[nan, -inf, 2.0, nan, -5.0, inf]])
    first, last = torch.tensor([0]), torch.tensor([5])
    assert top_positions(scores.clone(), first, last, 3).tolist() == [[2, 4, 5]]
    assert top_positions(scores.clone(), first, last, 4).tolist() == [[0, 2, 4, 5]]


def test_wide_rows_with_a_plateau_equal_the_specification():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn((40, 700), generator=generator).relu()
    last = torch.randint(0, 700, (40,), generator=generator)
    first = (last - torch.randint(0, 600, (40,), generator=generator)).clamp(min=0)
    expected = reference.top_positions(scores, first, last, 64)
    assert torch.equal(top_positions(scores.clone(), first, last, 64), expected)


def test_all_visible_lists_every_key_of_short_rows():
    kept = all_visible(torch.tensor([5, 5, 5]), torch.tensor([7, 5, 4]), 4)
    assert kept.tolist() == [[0, 1, 2, -1], [0, -1, -1, -1], [-1, -1, -1, -1]]

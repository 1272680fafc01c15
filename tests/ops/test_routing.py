"""Choice of experts and the balance loss: hand-worked values, ties, groups."""

import pytest
import torch
from drawn import normal
from hypothesis import given
from hypothesis import strategies as st

from yunque.ops.routing import choose_experts, sequence_balance


def chosen_by_hand(row: list[float], count: int, groups: int, kept_groups: int) -> list[int]:
    """The rule in words: best groups by the sum of their two best, then best experts, ties to the lowest."""
    size = len(row) // groups
    strength = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: (-strength[g], g))[:kept_groups]
    experts = [e for e in range(len(row)) if e // size in kept]
    return sorted(experts, key=lambda e: (-row[e], e))[:count]


@given(st.data())
def test_choice_follows_the_rule_with_ties_and_groups(data):
    groups, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    kept_groups = data.draw(st.integers(1, groups))
    count = data.draw(st.integers(1, kept_groups * size))
    values = st.sampled_from([0.0, 0.25, 0.5, -0.5, 1.0])
    rows = data.draw(st.lists(st.lists(values, min_size=groups * size, max_size=groups * size), min_size=1, max_size=5))
    got = choose_experts(torch.tensor(rows), count=count, groups=groups, kept_groups=kept_groups)
    assert got.tolist() == [chosen_by_hand(row, count, groups, kept_groups) for row in rows]


def test_excluded_groups_stay_out_even_when_every_score_is_negative():
    """A group set to 0 instead of minus infinity would win over negative biased scores."""
    choice = torch.tensor([[-5.0, -6.0, -1.0, -9.0, -8.0, -7.0]])
    assert choose_experts(choice, count=2, groups=3, kept_groups=1).tolist() == [[2, 3]]


def test_all_tied_experts_are_the_lowest_in_twenty_runs():
    for _ in range(20):
        assert choose_experts(torch.zeros(3, 16), count=3, groups=4, kept_groups=2).tolist() == [[0, 1, 2]] * 3


def test_balance_of_one_document_by_hand():
    # Shares of the scores: token 0 (1/2, 1/2), token 1 (1/4, 3/4); both choose expert 1.
    scores = torch.tensor([[0.4, 0.4], [0.2, 0.6]])
    loss = sequence_balance(scores, torch.tensor([[1], [1]]), torch.tensor([0, 0]), torch.tensor([1.0]))
    # f = 2 / (1 * 2) * (0, 2) = (0, 2); P = (3/8, 5/8): the sum is 5/4.
    assert loss.item() == pytest.approx(1.25, abs=1e-6)


def test_an_even_document_costs_its_weight():
    scores, experts = torch.full((4, 4), 0.3), torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]])
    loss = sequence_balance(scores, experts, torch.zeros(4, dtype=torch.int64), torch.tensor([7.0]))
    assert loss.item() == pytest.approx(7.0, abs=1e-5)


def test_balance_is_the_weighted_sum_over_documents():
    scores = normal(9, 4, seed=0).sigmoid()
    experts = choose_experts(scores, count=2, groups=1, kept_groups=1)
    document = torch.tensor([0] * 4 + [1] + [2] * 4)
    weight = torch.tensor([2.0, 0.5, 3.0], dtype=torch.float64)
    whole = sequence_balance(scores, experts, document, weight)
    parts = [
        weight[n] * sequence_balance(scores[rows], experts[rows], torch.zeros_like(document[rows]), torch.ones(1))
        for n, rows in ((n, document == n) for n in range(3))
    ]
    torch.testing.assert_close(whole, sum(parts), rtol=0, atol=1e-12)


def test_balance_sends_its_gradient_through_the_shares_only():
    scores = normal(6, 4, seed=1).sigmoid().requires_grad_()
    experts = choose_experts(scores.detach(), count=1, groups=1, kept_groups=1)
    document, weight = torch.zeros(6, dtype=torch.int64), torch.ones(1)
    (got,) = torch.autograd.grad(sequence_balance(scores, experts, document, weight), scores)
    load = torch.bincount(experts.flatten(), minlength=4).double() * 4 / 6
    (expected,) = torch.autograd.grad(((scores / scores.sum(1, keepdim=True)).mean(0) * load).sum(), scores)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)

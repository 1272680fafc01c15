import torch
from hypothesis import given
from hypothesis import strategies as st

from yunque.ops.ranking import best, best_ids, descending


@given(rows=st.integers(1, 4), size=st.integers(1, 40), seed=st.integers(0, 999))
def test_ranking_equals_a_stable_sort_of_values_with_many_ties(rows, size, seed):
    values = torch.randint(-3, 4, (rows, size), generator=torch.Generator().manual_seed(seed)).float()
    values[values == 3] = -torch.inf
    ordered = values.sort(dim=-1, stable=True, descending=True)
    assert torch.equal(best(values), ordered.indices[:, 0])
    assert torch.equal(descending(values), ordered.values)
    for count in (1, size // 2 + 1, size + 3):
        assert torch.equal(best_ids(values[0], count), ordered.indices[0, :count])

"""Views: what a step may see, where its rows go, and what a cache forgets."""

import pytest
import torch
from builders import build, draw_config, largest_difference, random_documents, run, run_in_steps

from yunque.model.batch import PackedBatch
from yunque.model.cache import PackedView, SequenceCache
from yunque.ops.reference.attention import allowed

CONFIG = draw_config(0, num_hidden_layers=2, indexer_types=("full", "shared"))


def cache(num_sequences: int = 3, capacity: int = 8) -> SequenceCache:
    return SequenceCache(CONFIG, num_sequences=num_sequences, capacity=capacity)


def test_packed_view_shows_each_token_its_document_up_to_itself():
    view = PackedView(PackedBatch.from_documents([[1, 2, 3], [4], [5, 6]]))
    assert view.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    expected = torch.tensor(
        [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [0, 0, 0, 1, 0, 0],
            [0, 0, 0, 0, 1, 0],
            [0, 0, 0, 0, 1, 1],
        ]
    )
    assert torch.equal(allowed(view.visibility, 6, None).long(), expected)
    rows = torch.randn(6, 4)
    assert view.write(0, "latent", rows) is rows


def test_steps_see_earlier_rows_of_their_own_sequence_only():
    store = cache()
    assert store.step([2, 0, 3]).positions_T.tolist() == [0, 1, 0, 1, 2]
    view = store.step([1, 2, 1])
    assert view.positions_T.tolist() == [2, 0, 1, 3]
    rows = [mask.nonzero()[:, 0].tolist() for mask in allowed(view.visibility, 24, None)]
    assert rows == [[0, 1, 2], [8], [8, 9], [16, 17, 18, 19]]
    assert store.lengths == [3, 2, 4]


def test_rows_are_written_where_the_step_sees_them():
    store = cache()
    first = torch.arange(5 * CONFIG.latent_dim, dtype=torch.float32).view(5, -1)
    store.step([2, 0, 3]).write(0, "latent", first)
    second = -first[:3]
    pool = store.step([1, 1, 1]).write(0, "latent", second)
    assert torch.equal(pool[[0, 1, 16, 17, 18]], first)
    assert torch.equal(pool[[2, 8, 19]], second)
    single = store.step([0, 2, 0]).write(0, "latent", first[:2])
    assert torch.equal(single[[9, 10]], first[:2])
    assert torch.equal(single[[2, 8, 19]], second)


def test_shared_layers_have_no_index_rows():
    latent, index = CONFIG.latent_dim, CONFIG.index_head_dim
    # Three layers with the MTP layer, of which the second shares.
    assert cache().num_bytes == 4 * 24 * (3 * latent + 2 * index)


def test_truncated_rows_are_forgotten():
    """Rejected drafts leave no trace: the same tokens afterwards give the same numbers."""
    model, (document,) = build(CONFIG), random_documents(CONFIG, [7])
    (expected,) = run_in_steps(model, [document], [[4], [3]])
    store = SequenceCache(CONFIG, num_sequences=1, capacity=8)
    tokens = torch.tensor(document)
    with torch.no_grad():
        model(tokens[:4], store.step([4]))
        model(torch.zeros(4, dtype=torch.int64), store.step([4]))
        store.truncate(0, 4)
        hidden = model(tokens[4:], store.step([3])).hidden_TD
    assert torch.equal(model.logits(hidden).log_softmax(-1), expected[4:])


def test_sequences_may_pause_and_resume():
    model, documents = build(CONFIG), random_documents(CONFIG, [6, 5, 7])
    steps = [[2, 0, 7], [0, 5, 0], [0, 0, 0], [4, 0, 0]]
    got = torch.cat(run_in_steps(model, documents, steps))
    expected = model.logits(run(model, PackedBatch.from_documents(documents)).hidden_TD).log_softmax(-1)
    assert largest_difference(got, expected) < 1e-5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.step([1, 1]), "2 counts for 3 sequences"),
        (lambda c: c.step([0, 9, 0]), "sequence 1 has 0 tokens; 9 more exceed its capacity 8"),
        (lambda c: c.truncate(0, 1), "length 1 is outside 0..0 of sequence 0"),
    ],
)
def test_impossible_steps_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(cache())

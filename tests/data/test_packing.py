import json
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunque.core.errors import ConfigError
from yunque.data.packing import Packer, PackingConfig, Piece

Lengths = list[tuple[int, bool]]

CONFIGS = st.builds(
    lambda tokens, share, buffer: PackingConfig(tokens, max(2, int(tokens * share)), buffer),
    st.integers(2, 60),
    st.floats(0, 1),
    st.integers(1, 9),
)
DOCUMENTS = st.lists(st.tuples(st.integers(1, 90), st.booleans()), max_size=40)


def _packer(config: PackingConfig, documents: Lengths) -> Packer:
    pieces = iter([Piece("s", i, 0, length, whole) for i, (length, whole) in enumerate(documents)])
    return Packer(config, lambda: next(pieces, None))


def _batches(packer: Packer) -> Iterator[tuple[list[Piece], int]]:
    while (batch := packer.next_batch()) is not None:
        yield batch


@given(CONFIGS, DOCUMENTS)
def test_every_token_is_packed_exactly_once_and_batches_are_full(config: PackingConfig, documents: Lengths) -> None:
    packer = _packer(config, documents)
    batches = list(_batches(packer))
    covered: dict[int, list[tuple[int, int]]] = {}
    for number, (pieces, padding) in enumerate(batches, start=1):
        rows = sum(piece.length for piece in pieces) + padding
        assert rows == config.tokens_per_batch or number == len(batches)
        assert rows <= config.tokens_per_batch
        for piece in pieces:
            assert 0 < piece.length <= config.sequence_length
            covered.setdefault(piece.document, []).append((piece.start, piece.stop))
    expected_truncated = 0
    for index, (length, whole) in enumerate(documents):
        kept = min(length, config.sequence_length) if whole else length
        expected_truncated += length - kept
        spans = covered[index]
        assert len(spans) == 1 or not whole
        assert [position for start, stop in spans for position in range(start, stop)] == list(range(kept))
    report = packer.report
    assert report.truncated_tokens == expected_truncated
    assert report.tokens == sum(length for length, _ in documents) - expected_truncated
    assert report.padding == sum(padding for _, padding in batches)
    assert (report.documents, report.pieces) == (len(documents), sum(map(len, covered.values())))


@given(CONFIGS, DOCUMENTS.filter(lambda documents: not any(whole for _, whole in documents)))
def test_text_is_packed_without_padding(config: PackingConfig, documents: Lengths) -> None:
    packer = _packer(config, documents)
    list(_batches(packer))
    assert packer.report.waste == 0


@given(CONFIGS, DOCUMENTS, st.integers(0, 8))
def test_a_restored_packer_goes_on_with_the_same_batches(config: PackingConfig, documents: Lengths, after: int) -> None:
    packer = _packer(config, documents)
    drawn = [0]
    pieces = [Piece("s", i, 0, length, whole) for i, (length, whole) in enumerate(documents)]

    def draw() -> Piece | None:
        drawn[0] += 1
        return pieces[drawn[0] - 1] if drawn[0] <= len(pieces) else None

    packer = Packer(config, draw)
    for _ in range(after):
        packer.next_batch()
    state, position = json.loads(json.dumps(packer.state())), drawn[0]
    rest = list(_batches(packer))
    drawn[0] = position
    other = Packer(config, draw)
    other.restore(state)
    assert list(_batches(other)) == rest
    assert other.report == packer.report


def test_a_buffer_of_one_keeps_the_stream_in_order() -> None:
    packer = _packer(PackingConfig(10, 6, buffer_documents=1), [(4, False), (15, False), (3, False)])
    spans = [[(p.document, p.start, p.stop) for p in pieces] for pieces, _ in _batches(packer)]
    assert spans == [[(0, 0, 4), (1, 0, 6)], [(1, 6, 12), (1, 12, 15), (2, 0, 1)], [(2, 1, 3)]]


def test_the_longest_that_fits_comes_next_and_nothing_waits_for_ever() -> None:
    packer = _packer(PackingConfig(10, 10), [(5, True), (3, True), (7, True), (4, True), (1, True), (9, True)])
    packed = [([p.document for p in pieces], padding) for pieces, padding in _batches(packer)]
    assert packed == [([0, 3, 4], 0), ([1, 2], 0), ([5], 0)]


def test_conversations_are_padded_only_where_none_fits() -> None:
    packer = _packer(PackingConfig(10, 10), [(6, True), (6, True), (6, True)])
    assert [padding for _, padding in _batches(packer)] == [4, 4, 0]
    assert packer.report.waste == 8 / 26
    mixed = _packer(PackingConfig(10, 10), [(6, True), (6, True), (8, False)])
    assert [padding for _, padding in _batches(mixed)] == [0, 0]


def test_a_batch_of_long_documents_takes_from_each_in_turn() -> None:
    packer = _packer(PackingConfig(8, 2), [(8, False)] * 4)
    assert [[p.document for p in pieces] for pieces, _ in _batches(packer)] == [[0, 1, 2, 3]] * 4


def test_padding_of_typical_conversations_is_below_two_percent() -> None:
    rng = random.Random(0)
    lengths = [(min(2000, int(rng.lognormvariate(5.7, 0.6))), True) for _ in range(2000)]
    packer = _packer(PackingConfig(8192, 2048, buffer_documents=256), lengths)
    list(_batches(packer))
    assert packer.report.waste < 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 11), "tokens_per_batch 10 is below sequence_length 11"),
        ((10, 1), "sequence_length 1"),
        ((10, 5, 0), "buffer_documents is 0"),
    ],
)
def test_impossible_settings_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PackingConfig(*arguments)

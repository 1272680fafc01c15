import json
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunque.core.errors import ConfigError, DataError
from yunque.core.seeds import Seeds
from yunque.data.mixture import Mixture, MixtureConfig, Phase
from yunque.data.packing import Piece


@dataclass(frozen=True)
class Texts:
    """A source by the lengths of its documents."""

    lengths: tuple[int, ...]
    whole: bool = False

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def length(self, document: int) -> int:
        return self.lengths[document]


A, B = Texts((5, 7, 9, 4, 11)), Texts((30, 2, 18), whole=True)


def _mixture(
    config: MixtureConfig, seed: int = 0, *, max_epochs: dict[str, int] | None = None, shuffle: bool = True
) -> Mixture:
    return Mixture(config, {"a": A, "b": B}, Seeds(seed), max_epochs=max_epochs or {}, shuffle=shuffle)


def _draw(mixture: Mixture, number: int = 10_000) -> list[Piece]:
    drawn = []
    while len(drawn) < number and (piece := mixture.draw()) is not None:
        drawn.append(piece)
    return drawn


def _tokens(pieces: list[Piece]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for piece in pieces:
        counts[piece.source] += piece.length
    return counts


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_sources_never_differ_from_their_share_by_more_than_two_documents(one: float, other: float) -> None:
    pieces = _draw(_mixture(MixtureConfig((Phase({"a": one, "b": other}),))), 300)
    total = 0
    counts = Counter({"a": 0, "b": 0})
    for piece in pieces:
        total += piece.length
        counts[piece.source] += piece.length
        assert abs(counts["a"] - total * one / (one + other)) <= 30 + 11


def test_without_weights_sources_are_read_by_size() -> None:
    counts = _tokens(_draw(_mixture(MixtureConfig()), 4000))
    assert abs(counts["a"] / counts["b"] - A.num_tokens / B.num_tokens) < 0.01


def test_every_epoch_reads_every_document_once_in_its_own_order() -> None:
    pieces = [p.document for p in _draw(_mixture(MixtureConfig((Phase({"a": 1}),))), 500)]
    epochs = [tuple(pieces[i : i + 5]) for i in range(0, 500, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len(set(epochs)) > 50
    assert pieces != [p.document for p in _draw(_mixture(MixtureConfig((Phase({"a": 1}),)), seed=1), 500)]
    plain = _draw(_mixture(MixtureConfig((Phase({"a": 1}),)), shuffle=False), 10)
    assert [p.document for p in plain] == [0, 1, 2, 3, 4] * 2


def test_phases_change_the_weights_at_their_tokens_and_the_last_may_end() -> None:
    config = MixtureConfig((Phase({"a": 1}, 100), Phase({"a": 1, "b": 3}, 1000), Phase({"b": 1}, 2000)))
    mixture = _mixture(config)
    pieces = _draw(mixture)
    ends = [sum(p.length for p in pieces[: i + 1]) for i in range(len(pieces))]
    first = [p for p, end in zip(pieces, ends, strict=True) if end - p.length < 100]
    second = [p for p, end in zip(pieces, ends, strict=True) if 100 <= end - p.length < 1000]
    third = [p for p, end in zip(pieces, ends, strict=True) if end - p.length >= 1000]
    assert set(_tokens(first)) == {"a"}
    assert abs(_tokens(second)["b"] / sum(_tokens(second).values()) - 0.75) < 0.05
    assert set(_tokens(third)) == {"b"}
    assert 2000 <= mixture.tokens < 2030


def test_dropped_sources_leave_their_share_to_the_others() -> None:
    mixture = _mixture(MixtureConfig((Phase({"a": 1, "b": 1}),)), max_epochs={"a": 2, "b": 5})
    pieces = _draw(mixture)
    assert _tokens(pieces) == {"a": 2 * A.num_tokens, "b": 5 * B.num_tokens}
    assert mixture.epochs == {"a": 2.0, "b": 5.0}
    assert mixture.draw() is None


def test_stop_ends_the_data_with_the_first_source() -> None:
    config = MixtureConfig((Phase({"a": 1, "b": 1}),), on_exhausted="stop")
    counts = _tokens(_draw(_mixture(config, max_epochs={"a": 2})))
    assert counts["a"] == 2 * A.num_tokens
    assert abs(counts["b"] - counts["a"]) <= 30


@given(st.integers(0, 60), st.integers(0, 3))
def test_a_restored_mixture_draws_what_the_other_would_have(number: int, seed: int) -> None:
    config = MixtureConfig((Phase({"a": 2, "b": 1}, 150), Phase({"b": 1}, 300), Phase()))
    mixture = _mixture(config, seed, max_epochs={"a": 6, "b": 9})
    _draw(mixture, number)
    state = json.loads(json.dumps(mixture.state()))
    rest = _draw(mixture)
    other = _mixture(config, seed, max_epochs={"a": 6, "b": 9})
    _draw(other, 7)
    other.restore(state)
    assert _draw(other) == rest


def test_a_state_of_other_sources_is_refused() -> None:
    state = _mixture(MixtureConfig()).state()
    with pytest.raises(DataError, match=r"the state has sources \['a', 'b'\], this run \['a'\]"):
        Mixture(MixtureConfig(), {"a": A}, Seeds(0), max_epochs={}).restore(state)
    short = _mixture(MixtureConfig((Phase(until_tokens=5), Phase(until_tokens=9), Phase())))
    _draw(short, 3)
    with pytest.raises(DataError, match="in phase 2, this run has 1"):
        _mixture(MixtureConfig()).restore(short.state())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Phase({"a": -1.0}), "weights.a is -1.0"),
        (lambda: Phase({"a": float("nan")}), "finite"),
        (lambda: Phase({"a": 0.0}), "all weights are 0"),
        (lambda: MixtureConfig(()), "phases is empty"),
        (lambda: MixtureConfig((Phase(), Phase())), "must rise"),
        (lambda: MixtureConfig((Phase(until_tokens=5), Phase(until_tokens=5))), "must rise"),
        (lambda: MixtureConfig((Phase(until_tokens=-1),)), "must rise"),
        (lambda: _mixture(MixtureConfig((Phase({"c": 1.0}),))), "unknown source 'c'"),
    ],
)
def test_impossible_settings_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]

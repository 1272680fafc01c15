from hypothesis import given
from hypothesis import strategies as st

from yunque.engine.stops import Match, StopWatch
from yunque.text import Tokenizer, train_bpe

TOKENIZER = train_bpe(["stop"] * 9 + ["abcab aab é 東京 here\n\nabc"] * 3, 310)


def ids_of(tokenizer: Tokenizer, pieces: list[str | bytes]) -> list[int]:
    """One token for a piece that is one, single bytes for another."""
    single = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    ids: list[int] = []
    for piece in pieces:
        data = piece.encode() if isinstance(piece, str) else piece
        ids += [single[data]] if data in single else [single[bytes([byte])] for byte in data]
    return ids


def watched(stops: list[str], ids: list[int]) -> tuple[int, Match] | None:
    """After how many tokens a match came, and which."""
    watch = StopWatch(TOKENIZER, stops)
    for count, token in enumerate(ids, start=1):
        match = watch.feed(token)
        if match is not None:
            return count, match
    return None


def test_a_stop_string_is_found_across_tokens_and_inside_one():
    assert watched(["bca"], ids_of(TOKENIZER, ["a", "b", "c", "a", "b"])) == (4, Match("bca", 1))
    inside = TOKENIZER.encode("stop")
    assert len(inside) == 1
    assert watched(["to"], [*ids_of(TOKENIZER, ["x"]), *inside]) == (2, Match("to", 2))
    assert watched(["to"], ids_of(TOKENIZER, ["x", "t", "x", "o"])) is None


def test_the_earliest_match_counts_and_at_a_tie_the_longest():
    token = TOKENIZER.encode("stop")
    assert watched(["op", "to"], token) == (1, Match("to", 1))
    assert watched(["st", "sto", "s"], token) == (1, Match("sto", 0))
    assert watched(["sto", "st", "s"], token) == (1, Match("sto", 0))
    assert watched(["top", "op"], [*ids_of(TOKENIZER, ["é"]), *token]) == (2, Match("top", 2))


def test_characters_split_between_tokens_count_once_they_are_whole():
    ids = ids_of(TOKENIZER, [bytes([byte]) for byte in "x東é東京".encode()])
    assert len(ids) == 12
    assert watched(["東京"], ids) == (12, Match("東京", 3))
    assert watched(["é"], ids) == (6, Match("é", 2))
    assert watched(["東"], ids) == (4, Match("東", 1))
    cut = ids_of(TOKENIZER, ["東".encode()[:1], "x"])
    assert watched(["x"], cut) == (2, Match("x", 1))  # what never became a character is one, U+FFFD


def test_without_stops_nothing_matches_and_control_tokens_count_as_their_spelling():
    ids = [*TOKENIZER.encode("abc"), TOKENIZER.id_of("<|user|>")]
    assert watched([], ids) is None
    assert watched(["|user|"], ids) == (len(ids), Match("|user|", 4))


@given(
    data=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40),
    stops=st.lists(st.text("abcéo 京s\n", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_streaming_finds_what_a_search_of_the_whole_text_finds(data, stops):
    found = watched(stops, data)
    decoded = [TOKENIZER.decode(data[:count]) for count in range(len(data) + 1)]
    # The first prefix whose complete characters hold a stop string.
    whole = [text.rstrip("\ufffd") if text.endswith("\ufffd") else text for text in decoded]
    first = next((count for count, text in enumerate(whole) if any(stop in text for stop in stops)), None)
    if first is None:
        assert found is None
        return
    text = whole[first]
    start = min(text.find(stop) for stop in stops if stop in text)
    longest = max((stop for stop in stops if text.startswith(stop, start)), key=len)
    assert found == (first, Match(longest, start))

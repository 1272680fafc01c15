"""Stop strings are never shown, not even their beginnings, and all other text is."""

from hypothesis import given
from hypothesis import strategies as st

from yunque.serve.stop_text import StopText

PIECES = st.lists(st.text("ab", max_size=4), max_size=8)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def first_place(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where a stop string is complete first, and which: what an engine reports."""
    ends = [(text.index(stop) + len(stop), stop) for stop in stops if stop in text]
    return min(ends) if ends else None


@given(PIECES, STOPS)
def test_what_is_shown_is_the_text_before_the_stop_string(pieces: list[str], stops: list[str]) -> None:
    shown, seen = "", ""
    reader = StopText(stops)
    for piece in pieces:
        found = first_place(seen + piece, stops)
        if found is not None:
            end, stop = found
            text, was_found = reader.cut((seen + piece)[len(seen) : end], stop)
            shown += text
            assert was_found
            assert shown == (seen + piece)[: end - len(stop)]
            return
        seen += piece
        shown += reader.push(piece)
        assert seen.startswith(shown)
        assert first_place(shown, stops) is None
    assert shown + reader.finish() == seen

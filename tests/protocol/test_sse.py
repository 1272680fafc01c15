"""Server-sent events read back from bytes cut anywhere."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from yunque.protocol.sse import ServerEvent, SseDecoder, encode_comment, encode_event

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = st.none() | st.text("abc_.", min_size=1, max_size=5)


def decode(data: bytes, cuts: list[int]) -> list[ServerEvent]:
    decoder = SseDecoder()
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    found = [event for a, b in pairwise(places) for event in decoder.feed(data[a:b])]
    return found + decoder.finish()


@given(st.lists(st.tuples(TEXT, NAMES), max_size=5), st.lists(st.integers(0, 400), max_size=8))
def test_events_read_back_whatever_the_cuts(sent: list[tuple[str, str | None]], cuts: list[int]) -> None:
    data = b"".join(encode_comment("ping") + encode_event(text, event=name) for text, name in sent)
    newlines = [ServerEvent(text.replace("\r\n", "\n").replace("\r", "\n"), name) for text, name in sent]
    assert decode(data, cuts) == newlines


@given(st.sampled_from(["\n", "\r", "\r\n"]), st.lists(st.integers(0, 100), max_size=6))
def test_every_line_end_ends_a_line(end: str, cuts: list[int]) -> None:
    text = end.join(["\ufeffevent: a", "data: 1", "data:2", ": comment", "id: 7", "retry: 9", "", "data", "", ""])
    assert decode(text.encode(), cuts) == [ServerEvent("1\n2", "a"), ServerEvent("")]


def test_an_event_cut_off_by_the_end_is_none() -> None:
    assert decode(b"data: 1\n\ndata: 2\n", []) == [ServerEvent("1")]
    assert decode(b"data: 1\n\ndata: 2\r\r", []) == [ServerEvent("1"), ServerEvent("2")]


def test_bytes_that_are_not_utf8_become_replacements() -> None:
    assert decode(b"data: \xff\n\n", []) == [ServerEvent("\ufffd")]

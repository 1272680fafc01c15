"""Events come whole and in order however the bytes are cut."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunque.serve.router import sse

STREAM = (
    b'data: {"a": 1}\n\n: ping\n\nevent: error\ndata: {"b":\ndata: 2}\n\ndata: {"c": "\xe2\x80\xa8"}\r\n\r\n'
    b"data: [DONE]\n\n"
)


def read(parts: list[bytes], **options) -> list[sse.Event]:
    async def chunks():
        for part in parts:
            yield part

    async def collect():
        return [event async for event in sse.events(chunks(), **options)]

    return asyncio.run(collect())


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_where_the_bytes_are_cut(cuts):
    places = [0, *sorted(cuts), len(STREAM)]
    events = read([STREAM[begin:end] for begin, end in pairwise(places)])
    assert b"".join(event.raw for event in events) == STREAM
    assert [event.json() for event in events] == [{"a": 1}, None, {"b": 2}, {"c": "\u2028"}, None]
    assert [event.name for event in events] == ["", "", "error", "", ""]
    assert [event.is_done for event in events] == [False] * 4 + [True]


def test_a_cut_off_event_is_not_an_event_and_an_endless_one_is_refused():
    assert [event.data for event in read([b"data: 1\n\ndata: 2"])] == ["1"]
    with pytest.raises(sse.EventTooLong, match="1000 bytes"):
        read([b"x" * 600] * 2, max_bytes=1000)


def test_encoding_reads_back():
    (event,) = read([sse.encode({"text": "a\nb é"}, name="error")])
    assert (event.json(), event.name) == ({"text": "a\nb é"}, "error")

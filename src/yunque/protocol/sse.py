"""Server-sent events: written, and read back from bytes that were cut anywhere."""

from dataclasses import dataclass

DONE = "[DONE]"
"""The data of the event that ends an OpenAI stream."""


@dataclass(frozen=True)
class ServerEvent:
    """One event: its data (lines joined by newlines) and its type, None where the stream named none."""

    data: str
    event: str | None = None


def encode_event(data: str, *, event: str | None = None) -> bytes:
    """The bytes of one event. ``data`` may hold line ends; every one of them is read back as a newline."""
    name = "" if event is None else f"event: {event}\n"
    lines = data.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return (name + "".join(f"data: {line}\n" for line in lines) + "\n").encode()


def encode_comment(text: str = "") -> bytes:
    """A line that readers skip; it keeps a silent connection open."""
    return f": {text}\n\n".encode()


class SseDecoder:
    """Reads a stream as the HTML standard says: lines end with LF, CR or CRLF, a blank line ends an event, fields it
    does not know and comments are skipped, a byte order mark at the start too, and an event cut off by the end of the
    stream is none. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_first = True
        self._data: list[str] = []
        self._event: str | None = None

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """The events that these bytes complete."""
        # A CR at the end waits: an LF after it belongs to the same line end.
        self._rest += chunk
        events: list[ServerEvent] = []
        begin = 0
        while (cut := self._line_end(begin)) is not None:
            stop, begin_next = cut
            event = self._take(self._rest[begin:stop])
            if event is not None:
                events.append(event)
            begin = begin_next
        self._rest = self._rest[begin:]
        return events

    def finish(self) -> list[ServerEvent]:
        """The stream ended: a CR that was the last byte ends its line."""
        return self.feed(b"\n") if self._rest.endswith(b"\r") else []

    def _line_end(self, begin: int) -> tuple[int, int] | None:
        """Where the line from ``begin`` stops, and where the next one begins; None while its end has not come."""
        rest = self._rest
        ends = [place for place in (rest.find(b"\n", begin), rest.find(b"\r", begin)) if place >= 0]
        if not ends:
            return None
        stop = min(ends)
        if rest[stop : stop + 1] == b"\n":
            return stop, stop + 1
        if stop + 1 == len(rest):
            return None
        return stop, stop + 2 if rest[stop + 1 : stop + 2] == b"\n" else stop + 1

    def _take(self, line: bytes) -> ServerEvent | None:
        text = line.decode("utf-8", errors="replace")
        if self._is_first:
            self._is_first, text = False, text.removeprefix("\ufeff")
        if not text:
            return self._dispatch()
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        return None

    def _dispatch(self) -> ServerEvent | None:
        data, event = self._data, self._event
        self._data, self._event = [], None
        return ServerEvent("\n".join(data), event or None) if data else None

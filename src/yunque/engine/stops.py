"""Stop strings in a reply, found while its tokens stream in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yunque.text import IncrementalDecoder, Tokenizer


@dataclass(frozen=True)
class Match:
    """The stop string that ended a reply, and how many characters of the reply's text stand before it."""

    stop: str
    kept_characters: int


class StopWatch:
    """Looks for ``stops`` in the text of one reply, token by token.

    Only as much text is kept as the beginning of a stop string can be long. Of several matches that a token
    completes the earliest counts, at a tie the longest. A character counts once its last byte has come.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = sorted(stops, key=len, reverse=True)
        self._tail_length = max(map(len, stops), default=1) - 1
        self._tail = ""
        self._num_characters = 0

    def feed(self, token: int) -> Match | None:
        """Read one more token; the match that it completes, if any."""
        new = self._decoder.push(token)
        if not new:
            return None
        text = self._tail + new
        text_start = self._num_characters - len(self._tail)
        self._num_characters += len(new)
        self._tail = text[-self._tail_length :] if self._tail_length else ""
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if not found:
            return None
        start, stop = min(found, key=lambda match: match[0])  # the first of equals is the longest
        return Match(stop, text_start + start)

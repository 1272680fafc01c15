"""Text shown while it grows: what may be the beginning of a stop string is held back until it is known not to be."""

from collections.abc import Sequence


class StopText:
    """One channel of text (the answer, or the thought) of a reply that some strings end.

    The engine decides that a string has ended the reply; this only sees to it that nothing of it is shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._longest = max(map(len, self._prefixes), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        """The part of the text so far that can be shown: all but a beginning of a stop string at its end."""
        text = self._held + text
        held = next((n for n in range(min(len(text), self._longest), 0, -1) if text[-n:] in self._prefixes), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def cut(self, text: str, stop: str) -> tuple[str, bool]:
        """The last text, which ``stop`` may have ended: what precedes it, and whether it is in there."""
        text, self._held = self._held + text, ""
        shown, found, _ = text.partition(stop)
        return shown, bool(found)

    def finish(self) -> str:
        """What was held back: the reply ended before it became a stop string."""
        held, self._held = self._held, ""
        return held

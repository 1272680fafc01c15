"""Token deltas of a plain completion into text: characters whole, special tokens and stop strings left out."""

from yunque.protocol.generation import TokenDelta
from yunque.serve.stop_text import StopText
from yunque.serve.turn_reader import TurnEvent
from yunque.text import CONTROL_TOKENS, IncrementalDecoder, Malformed, TextDelta, Tokenizer


class TextReader:
    """Reads the deltas of one reply as one text. ``has_special``: role markers and document marks are shown too."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], *, has_special: bool = False) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._hidden = set() if has_special else {tokenizer.find(token) for token in CONTROL_TOKENS}
        self._text = StopText(stops)
        self.reasoning_tokens = 0
        self.has_calls = False

    @property
    def failures(self) -> tuple[Malformed, ...]:
        """Plain text cannot be malformed."""
        return ()

    def read(self, delta: TokenDelta) -> tuple[TurnEvent, ...]:
        """The text that a delta completes; the one with a ``finish`` completes it all."""
        is_stopped_by_id = isinstance(delta.stopped_by, int)
        shown = delta.tokens[: len(delta.tokens) - is_stopped_by_id]
        text = self._decoder.push(*(token for token in shown if token not in self._hidden))
        if delta.finish is not None:
            text += self._decoder.finish()
        if isinstance(delta.stopped_by, str):
            text, _ = self._text.cut(text, delta.stopped_by)
        else:
            text = self._text.push(text)
            if delta.finish is not None:
                text += self._text.finish()
        return (TextDelta(text),) if text else ()

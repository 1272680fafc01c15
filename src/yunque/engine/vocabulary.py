"""A tokenizer as llguidance asks for it."""

from yunque.core.errors import DataError
from yunque.text import Tokenizer


class Vocabulary:
    """What llguidance asks of a tokenizer. Added tokens are special: no text is made of them."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.vocab_size
        self._holes: set[int] = set()  # ids below the highest one that stand for nothing
        self.tokens = [self._bytes_of(token) for token in range(tokenizer.vocab_size)] + [b"<end>"]
        self.special_token_ids = [*sorted(tokenizer.added_ids | self._holes), tokenizer.vocab_size]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode())

    def _bytes_of(self, token: int) -> bytes:
        try:
            return self._tokenizer.token_bytes(token)
        except DataError:
            self._holes.add(token)
            return f"<hole {token}>".encode()

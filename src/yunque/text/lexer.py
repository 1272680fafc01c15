"""Generated ids as a stream of tags and text; characters and tags that came in part are held back."""

import re
from dataclasses import dataclass

from yunque.core.errors import TemplateError
from yunque.text.special import CONTROL_TOKENS, TAG_TOKENS
from yunque.text.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True)
class Tag:
    """A token of the chat format, by its spelling."""

    text: str


Symbol = Tag | str

_TAG_PATTERN = re.compile("|".join(map(re.escape, TAG_TOKENS)))
_TAG_PREFIXES = frozenset(tag[:length] for tag in TAG_TOKENS for length in range(1, len(tag)))
_LONGEST_PREFIX = max(map(len, _TAG_PREFIXES))


class TagLexer:
    """Turns ids into symbols; adjacent texts may come in any number of pieces.

    With ``text_tags`` a tag is also recognised when it is spelled by ordinary tokens, however these cut it;
    without, only the tag's own id counts, so that text which looks like a tag stays text. Control tokens
    (role markers) are always recognised by id alone.
    """

    def __init__(self, tokenizer: Tokenizer, *, text_tags: bool) -> None:
        tags = {token: tokenizer.find(token) for token in (*CONTROL_TOKENS, *TAG_TOKENS)}
        if not text_tags:
            missing = [token for token in TAG_TOKENS if tags[token] is None]
            if missing:
                raise TemplateError(f"the tokenizer lacks {', '.join(missing)}; text_tags=True finds them in text")
        self._tags = {token_id: Tag(token) for token, token_id in tags.items() if token_id is not None}
        self._decoder = IncrementalDecoder(tokenizer)
        self._text_tags = text_tags
        self._held = ""

    def push(self, token_id: int) -> list[Symbol]:
        """The symbols that one more id completes."""
        if token_id in self._tags:
            return [*self.finish(), self._tags[token_id]]
        return self._scan(self._decoder.push(token_id))

    def finish(self) -> list[Symbol]:
        """What was held back: it turned out to be neither a tag nor a whole character."""
        symbols = self._scan(self._decoder.finish())
        held, self._held = self._held, ""
        return [*symbols, held] if held else symbols

    def _scan(self, text: str) -> list[Symbol]:
        if not self._text_tags:
            return [text] if text else []
        text = self._held + text
        symbols: list[Symbol] = []
        start = 0
        for match in _TAG_PATTERN.finditer(text):
            symbols += [text[start : match.start()], Tag(match.group())]
            start = match.end()
        rest = text[start:]
        longest = min(len(rest), _LONGEST_PREFIX)
        held = next((n for n in range(longest, 0, -1) if rest[-n:] in _TAG_PREFIXES), 0)
        self._held = rest[len(rest) - held :]
        symbols.append(rest[: len(rest) - held])
        return [symbol for symbol in symbols if symbol != ""]

"""Long texts are tokenised in threads, few at once; those that cannot fit into the context are not tokenised at all."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from yunque.protocol.errors import ContextLengthExceeded
from yunque.text import Tokenizer

THREAD_ABOVE_CHARS = 4_000
"""Longer texts are tokenised in a thread, so that the event loop goes on serving others."""
ALONE_ABOVE_CHARS = 200_000
"""Of longer ones ``MAX_AT_ONCE`` are tokenised at once: it takes about 150 bytes of memory for each byte of text."""
MAX_AT_ONCE = 2
_Result = TypeVar("_Result")


class LongTexts:
    """The long texts of one server."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._places = asyncio.Semaphore(MAX_AT_ONCE)

    async def run(self, work: Callable[[], _Result], num_chars: int) -> _Result:
        """The result of ``work`` on a text of ``num_chars``."""
        if num_chars <= THREAD_ABOVE_CHARS:
            return work()
        if num_chars <= ALONE_ABOVE_CHARS:
            return await asyncio.to_thread(work)
        async with self._places:
            return await asyncio.to_thread(work)

    def check_fits(self, num_chars: int, max_tokens: int, *, param: str) -> None:
        """Raise ``ContextLengthExceeded`` where not even the longest tokens would make ``num_chars`` fit."""
        if num_chars > THREAD_ABOVE_CHARS and num_chars > max_tokens * self._tokenizer.longest_token_bytes:
            raise ContextLengthExceeded(
                f"the text has {num_chars} characters, more than any {max_tokens} tokens of the context can hold",
                param=param,
            )

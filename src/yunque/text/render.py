"""Conversations as token ids with the author of every id, in one of the GLM-5 chat formats."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from yunque.core.records import Author, Message, ToolSpec
from yunque.text.compose import Piece, PieceKind, compose
from yunque.text.formats import ChatFormat, TemplateKwargs, TemplateOptions
from yunque.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TurnSpan:
    """The ids ``tokens[start:stop]`` from the first to the last that the assistant wrote in one message.

    They follow the generation prompt (``<|assistant|>`` and what the template puts after it) and run to the
    end of the turn. ``has_end`` says that the last of them is the marker that ends the turn; a turn has none
    when the conversation stops there, or when a system or another assistant message follows.
    """

    message_index: int
    start: int
    stop: int
    has_end: bool


@dataclass(frozen=True)
class Rendered:
    """A conversation as ids.

    ``authors[i]`` wrote ``tokens[i]``: this, not a span, is what a loss mask starts from. It is ASSISTANT
    only inside ``turns``, which are in order and disjoint, and everywhere in them save on the word ``None``
    that GLM-5 and 5.1 put for null content. A turn in which nothing was said has no span. ``opens_reasoning``
    says that the prompt ends inside ``<think>``, so that what is generated starts in the middle of a thought.
    """

    tokens: tuple[int, ...]
    authors: tuple[Author, ...]
    turns: tuple[TurnSpan, ...]
    opens_reasoning: bool


class Renderer:
    """Writes conversations in one chat format, with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, chat_format: ChatFormat | str) -> None:
        self.tokenizer = tokenizer
        self.chat_format = ChatFormat.named(chat_format)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        add_generation_prompt: bool = False,
        close_last_turn: bool = False,
        **options: Unpack[TemplateKwargs],
    ) -> Rendered:
        """The ids of a conversation, and who wrote them.

        ``messages`` is not empty. ``tools`` are what the assistant may call, shown before everything else.
        ``add_generation_prompt`` ends with ``<|assistant|>`` and the opening of its turn. ``close_last_turn`` adds,
        when the last message is the assistant's, the token that ends its turn, as its own: ``<|observation|>`` after
        tool calls, else ``<|endoftext|>``; the released templates leave it out, training needs it. ``options`` are
        ``enable_thinking``, ``clear_thinking`` and ``reasoning_effort``: see ``TemplateOptions``.

        What people wrote is encoded as plain text, so ``"<|user|>"`` in it never becomes that token. Raises
        TemplateError for an unknown option or an empty conversation, or if the tokenizer lacks a GLM token.
        """
        pieces = compose(
            self.chat_format,
            messages,
            tools,
            TemplateOptions.from_kwargs(options),
            add_generation_prompt=add_generation_prompt,
            close_last_turn=close_last_turn,
        )
        ids = [self._encode(piece) for piece in pieces]
        tokens = tuple(token for group in ids for token in group)
        return Rendered(
            tokens=tokens,
            authors=tuple(piece.author for piece, group in zip(pieces, ids, strict=True) for _ in group),
            turns=_turns(pieces, ids),
            opens_reasoning=add_generation_prompt and self.tokenizer.special.opens_reasoning(tokens),
        )

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        add_generation_prompt: bool = False,
        close_last_turn: bool = False,
        **options: Unpack[TemplateKwargs],
    ) -> str:
        """The same conversation as text, character for character what the format's Jinja template gives."""
        pieces = compose(
            self.chat_format,
            messages,
            tools,
            TemplateOptions.from_kwargs(options),
            add_generation_prompt=add_generation_prompt,
            close_last_turn=close_last_turn,
        )
        return "".join(piece.text for piece in pieces)

    def _encode(self, piece: Piece) -> list[int]:
        if piece.kind is PieceKind.TOKEN:
            return [self.tokenizer.special[piece.text]]
        if piece.kind is PieceKind.FIXED:
            return self.tokenizer.encode_with_special(piece.text)
        return self.tokenizer.encode(piece.text)


_TURN_ENDS = frozenset({"<|user|>", "<|observation|>", "<|endoftext|>"})


def _turns(pieces: Sequence[Piece], ids: Sequence[list[int]]) -> tuple[TurnSpan, ...]:
    """One span for each message in which the assistant wrote something."""
    spans: dict[int, TurnSpan] = {}
    start = 0
    for piece, tokens in zip(pieces, ids, strict=True):
        stop = start + len(tokens)
        if piece.author is Author.ASSISTANT and tokens:
            first = spans[piece.message].start if piece.message in spans else start
            has_end = piece.kind is PieceKind.TOKEN and piece.text in _TURN_ENDS
            spans[piece.message] = TurnSpan(piece.message, first, stop, has_end)
        start = stop
    return tuple(spans.values())

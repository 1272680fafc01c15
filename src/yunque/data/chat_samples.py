"""From a conversation to token documents in which only the assistant's own tokens are learned.

A format that clears thinking shows the model, at inference, earlier turns without their reasoning and the
current turn with it. One rendering of a whole conversation cannot show both: its earlier turns would be
learned as if they had been written without the reasoning that led to them. So each user turn (the messages
from one user message to the next) is rendered as inference sees it, with everything before it as context, and
only its own messages are learned. Where that rendering begins with the one before it, token for token, the
two are one sample: always when thinking is preserved, and mostly when no turn has reasoning.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from yunque.core.errors import DataError
from yunque.core.records import Message
from yunque.data.conversations import Conversation
from yunque.data.documents import TokenDocument
from yunque.data.source import ChatSource
from yunque.text.render import Renderer


def chat_samples(conversation: Conversation, renderer: Renderer, settings: ChatSource) -> list[TokenDocument]:
    """The samples of a conversation, in the order of its turns. Raises DataError where nothing is learned.

    A turn is thinking where one of its assistant messages has reasoning: it is then learned after
    ``<think>``, and otherwise as with thinking switched off. A turn's last token is the ``<|user|>`` that
    follows it, ``<|observation|>`` after tool calls, or ``<|endoftext|>`` at the end of the conversation.
    """
    messages = _without_reasoning(conversation.messages) if settings.thinking == "off" else conversation.messages
    samples: list[_Sample] = []
    for start, stop in _user_turns(messages):
        sample = _render_turn(conversation, messages, (start, stop), renderer, settings)
        if samples and sample.begins_with(samples[-1]):
            sample.mask[: len(samples[-1].mask)] |= samples[-1].mask
            samples[-1] = sample
        else:
            samples.append(sample)
    learned = [sample for sample in samples if sample.mask.any()]
    if not learned:
        raise DataError("nothing is learned: the assistant wrote nothing, or every message has train false")
    return [TokenDocument(sample.tokens, sample.mask, conversation.source) for sample in learned]


class _Sample:
    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: npt.NDArray[np.int64] = np.asarray(tokens, dtype=np.int64)
        self.mask: npt.NDArray[np.uint8] = np.zeros(len(tokens), dtype=np.uint8)

    def begins_with(self, other: "_Sample") -> bool:
        return np.array_equal(self.tokens[: len(other.tokens)], other.tokens)


def _user_turns(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """(start, stop) of each user turn with an assistant message; ``stop`` is right after its last one."""
    starts = [0, *(i for i, message in enumerate(messages) if i > 0 and message.role == "user")]
    turns = []
    for start, end in zip(starts, [*starts[1:], len(messages)], strict=True):
        written = [i for i in range(start, end) if messages[i].role == "assistant"]
        if written:
            turns.append((start, written[-1] + 1))
    return turns


def _render_turn(
    conversation: Conversation,
    messages: Sequence[Message],
    turn: tuple[int, int],
    renderer: Renderer,
    settings: ChatSource,
) -> _Sample:
    start, stop = turn
    rendered = renderer.render(
        messages[:stop],
        conversation.tools,
        close_last_turn=True,
        enable_thinking=any(_has_reasoning(message) for message in messages[start:stop]),
        clear_thinking=False if settings.thinking == "preserved" else None,
        reasoning_effort=settings.reasoning_effort,
    )
    sample = _Sample(rendered.tokens)
    is_followed = stop < len(messages) and messages[stop].role == "user"
    if is_followed and not messages[stop - 1].tool_calls:
        sample.tokens[-1] = renderer.tokenizer.special["<|user|>"]
    for span in rendered.turns:
        if span.message_index >= start and conversation.learned[span.message_index]:
            sample.mask[span.start : span.stop] = 1
    return sample


def _has_reasoning(message: Message) -> bool:
    return message.reasoning is not None or "</think>" in (message.content or "")


def _without_reasoning(messages: Sequence[Message]) -> list[Message]:
    """The messages without the reasoning of the assistant's, wherever it stands."""
    return [
        replace(message, reasoning=None, content=(message.content or "").rpartition("</think>")[2])
        if message.role == "assistant" and _has_reasoning(message)
        else message
        for message in messages
    ]

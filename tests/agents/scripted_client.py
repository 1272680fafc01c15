"""A chat client that plays written replies: the public double of ``ChatClient``."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence

from yunque.agents import BadCall, CallDelta, ChatEvent, ChatOptions, ChatReply
from yunque.core.records import Message, ToolCall, ToolSpec
from yunque.text.events import TextDelta


class ScriptedChat:
    """Plays ``replies`` in order, the last one for ever, a word at a time; keeps what it was asked."""

    def __init__(self, *replies: ChatReply, delay_s: float = 0.0) -> None:
        self.replies = replies
        self.delay_s = delay_s
        self.asked: list[tuple[tuple[Message, ...], tuple[ToolSpec, ...], ChatOptions]] = []
        self.left = 0
        """Replies that were not read to their end."""
        self.is_closed = False

    async def stream(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: ChatOptions
    ) -> AsyncGenerator[ChatEvent, None]:
        self.asked.append((tuple(messages), tuple(tools), options))
        reply = self.replies[min(len(self.asked), len(self.replies)) - 1]
        is_whole = False
        try:
            for word in (reply.message.content or "").split(" "):
                await asyncio.sleep(self.delay_s)
                yield TextDelta(word)
            for index, call in enumerate(reply.message.tool_calls):
                yield CallDelta(index, call.name, "{}")
            yield reply
            is_whole = True
        finally:
            self.left += not is_whole

    async def close(self) -> None:
        self.is_closed = True


_numbers = itertools.count()


def says(text: str, *calls: tuple[str, dict], finish: str | None = None, bad: Sequence[BadCall] = ()) -> ChatReply:
    """A reply of this text and these calls."""
    made = tuple(ToolCall(name, arguments, f"call_{next(_numbers)}") for name, arguments in calls)
    return ChatReply(Message("assistant", text, None, made), finish or ("tool_calls" if made else "stop"), tuple(bad))

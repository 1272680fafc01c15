"""What a chat client is: messages in, a reply out that streams its thought, its text and its calls."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from yunque.core.records import Message, ToolSpec
from yunque.text.events import ReasoningDelta, TextDelta


@dataclass(frozen=True)
class ChatOptions:
    """How a reply is made; None leaves it to the server. ``session`` groups the requests of one conversation."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    enable_thinking: bool | None = None
    session: str | None = None


@dataclass(frozen=True)
class CallDelta:
    """The next piece of a call's arguments; the first piece of each ``index`` comes with its name."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True)
class BadCall:
    """A call that cannot be used, with its text as far as it is known."""

    name: str
    raw: str
    reason: str


@dataclass(frozen=True)
class ChatUsage:
    """Counts of tokens; ``drafted`` and ``accepted`` are those of speculation, 0 where nothing is known."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class ChatReply:
    """A whole reply. Every call of ``message`` has an id. ``finish`` is OpenAI's word: stop, length, tool_calls, ..."""

    message: Message
    finish: str
    bad_calls: tuple[BadCall, ...] = ()
    usage: ChatUsage = field(default_factory=ChatUsage)


ChatEvent = ReasoningDelta | TextDelta | CallDelta | ChatReply


class ChatClient(Protocol):
    """A model that converses."""

    def stream(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: ChatOptions
    ) -> AsyncGenerator[ChatEvent, None]:
        """One reply as it is made; the last event is the ``ChatReply``. Closing the generator ends the reply.

        Raises ``RequestError``, ``ContextLengthExceeded``, ``Overloaded``, ``EngineUnavailable``, ``UnusableReply``.
        """
        ...

    async def close(self) -> None: ...

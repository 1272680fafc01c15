"""A chat client over an engine in the same process, by the server's own way of making a turn."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from yunque.agents.chat_client import BadCall, CallDelta, ChatEvent, ChatOptions, ChatReply, ChatUsage
from yunque.core.records import Message, ToolCall, ToolSpec
from yunque.protocol.errors import EngineUnavailable
from yunque.protocol.generation import EngineService, Finish, SamplingParams
from yunque.serve.conversation import CallEnd, CallStart, ChatTurn, Conversations, ToolCallDelta, TurnEnd, TurnStep
from yunque.text import FailureReason, Malformed, ReasoningDelta, Renderer, TextDelta


class LocalChatClient:
    """``agents.ChatClient`` over an engine. Closing it leaves the engine open."""

    def __init__(self, service: EngineService, renderer: Renderer) -> None:
        self._conversations = Conversations(service, renderer)

    async def stream(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: ChatOptions
    ) -> AsyncGenerator[ChatEvent, None]:
        """See ``ChatClient.stream``; leaving it aborts the request and frees its pages."""
        template = {} if options.enable_thinking is None else {"enable_thinking": options.enable_thinking}
        chat = ChatTurn(
            tuple(messages), tuple(tools), template=template, sampling=_sampling(options), session=options.session
        )
        turn = await self._conversations.prepare(chat)
        reader = _StepReader()
        async with aclosing(self._conversations.start(turn)) as steps:
            async for step in steps:
                for event in reader.read(step):
                    yield event

    async def close(self) -> None:
        """Nothing is held."""


def _sampling(options: ChatOptions) -> SamplingParams:
    given = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "max_new_tokens": options.max_tokens,
        "seed": options.seed,
    }
    return dataclasses.replace(SamplingParams(), **{key: value for key, value in given.items() if value is not None})


class _StepReader:
    """Steps of a turn as events of a chat; the last step gives the reply."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._names: dict[int, str] = {}

    def read(self, step: TurnStep) -> list[ChatEvent]:
        events: list[ChatEvent] = []
        for event in step.events:
            match event:
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                    events.append(event)
                case TextDelta(text):
                    self._text.append(text)
                    events.append(event)
                case CallStart(index, _, name):
                    self._names[index] = name
                    events.append(CallDelta(index, name, ""))
                case ToolCallDelta(index, arguments):
                    events.append(CallDelta(index, self._names[index], arguments))
                case CallEnd(_, call):
                    self._calls.append(call)
                case _:
                    pass  # a void call is among the turn's failures
        if step.end is not None:
            if step.end.finish is Finish.ERROR:
                raise EngineUnavailable(f"the engine failed: {step.delta.error or 'no reason given'}")
            events.append(self._reply(step.end))
        return events

    def _reply(self, end: TurnEnd) -> ChatReply:
        message = Message("assistant", "".join(self._text), "".join(self._reasoning) or None, tuple(self._calls))
        bad = (_bad_call(failure) for failure in end.failures if failure.reason is not FailureReason.STRAY_TAG)
        usage = ChatUsage(
            prompt_tokens=end.usage.prompt_tokens,
            completion_tokens=end.usage.completion_tokens,
            cached_tokens=end.usage.cached_tokens,
            reasoning_tokens=end.usage.reasoning_tokens,
            drafted=end.drafted,
            accepted=end.accepted,
        )
        return ChatReply(message, end.reason, tuple(bad), usage)


def _bad_call(failure: Malformed) -> BadCall:
    return BadCall("", failure.raw, f"{failure.reason}: {failure.detail}")

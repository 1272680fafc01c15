"""The minimal tool loop: ask, run the calls, tell their results, ask again, until there are no calls.

::

    messages ─► client ─► reply ─┬─ no calls ─► done
        ▲                        └─ calls ─► tools (at once) ─┐
        └──────────── reply and results ◄─────────────────────┘
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum

from yunque.agents.chat_client import BadCall, ChatClient, ChatEvent, ChatOptions, ChatReply
from yunque.agents.tools import ToolResult, Toolset
from yunque.core.records import Message, ToolCall
from yunque.protocol.errors import UnusableReply


class LoopEnd(StrEnum):
    """Why a loop ended."""

    ANSWERED = "answered"
    """The last reply calls nothing."""
    LENGTH = "length"
    """The last reply was cut."""
    MAX_TURNS = "max_turns"
    """The last reply has calls, which were not run."""


@dataclass(frozen=True)
class ToolStarted:
    """A call is run."""

    call: ToolCall


@dataclass(frozen=True)
class ToolEnded:
    """A call has its result."""

    call: ToolCall
    result: ToolResult


@dataclass(frozen=True)
class TurnAdded:
    """A turn is over: these messages follow those before it. Whoever keeps only these, and stops anywhere, has a
    conversation in which every call is answered."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class LoopDone:
    """The end: all that was added, and the last reply."""

    end: LoopEnd
    added: tuple[Message, ...]
    reply: ChatReply
    turns: int


LoopEvent = ChatEvent | ToolStarted | ToolEnded | TurnAdded | LoopDone


async def converse(
    client: ChatClient,
    messages: Sequence[Message],
    tools: Toolset | None = None,
    *,
    options: ChatOptions | None = None,
    max_turns: int = 16,
) -> AsyncGenerator[LoopEvent, None]:
    """The loop as it happens; the last event is ``LoopDone``.

    Calls of one reply run at once; their results are told in the calls' order. A call that cannot be used is answered
    with what is wrong with it. Closing the generator, or cancelling its reader, ends the reply and the async tools
    that run. Raises what ``ChatClient.stream`` raises.
    """
    tools = Toolset() if tools is None else tools
    added: list[Message] = []
    for turn in range(1, max_turns + 1):
        reply: ChatReply | None = None
        async with aclosing(client.stream([*messages, *added], tools.specs, options or ChatOptions())) as events:
            async for event in events:
                reply = event if isinstance(event, ChatReply) else reply
                yield event
        if reply is None:
            raise UnusableReply("the chat client ended its stream without a reply")
        results: dict[int, ToolResult] = {}
        if turn < max_turns:
            async with aclosing(_run(reply.message.tool_calls, tools, results)) as happenings:
                async for happening in happenings:
                    yield happening
        made = _turn_messages(reply, results, max_turns)
        added += made
        yield TurnAdded(tuple(made))
        is_cut = reply.finish == "length"
        if not reply.message.tool_calls and (is_cut or not reply.bad_calls):
            yield LoopDone(LoopEnd.LENGTH if is_cut else LoopEnd.ANSWERED, tuple(added), reply, turn)
            return
        if turn == max_turns:
            yield LoopDone(LoopEnd.MAX_TURNS, tuple(added), reply, turn)


async def answer(
    client: ChatClient,
    messages: Sequence[Message],
    tools: Toolset | None = None,
    *,
    options: ChatOptions | None = None,
    max_turns: int = 16,
    on_event: Callable[[LoopEvent], None] | None = None,
) -> LoopDone:
    """The loop's end; ``on_event`` hears all that happens on the way."""
    done: LoopDone | None = None
    async with aclosing(converse(client, messages, tools, options=options, max_turns=max_turns)) as events:
        async for event in events:
            if on_event is not None:
                on_event(event)
            done = event if isinstance(event, LoopDone) else done
    assert done is not None, "the last event is LoopDone"
    return done


async def _run(
    calls: Sequence[ToolCall], tools: Toolset, results: dict[int, ToolResult]
) -> AsyncGenerator[ToolStarted | ToolEnded, None]:
    """Run all calls at once; ``results`` fills by the calls' places."""
    running = {asyncio.ensure_future(tools.call(call)): place for place, call in enumerate(calls)}
    try:
        for call in calls:
            yield ToolStarted(call)
        waiting = set(running)
        while waiting:
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(ended, key=running.__getitem__):
                results[running[task]] = task.result()
                yield ToolEnded(calls[running[task]], task.result())
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _turn_messages(reply: ChatReply, results: dict[int, ToolResult], max_turns: int) -> list[Message]:
    """The reply, a result for each of its calls, and what is wrong with those that cannot be used."""
    not_run = ToolResult(f"Error: not run: the limit of {max_turns} turns is reached", is_error=True)
    calls = enumerate(reply.message.tool_calls)
    told = [
        Message("tool", results.get(place, not_run).text, tool_call_id=call.id, name=call.name) for place, call in calls
    ]
    complaints = "\n".join(_complaint(bad) for bad in reply.bad_calls)
    return [reply.message, *told, *([Message("user", complaints)] if complaints and reply.finish != "length" else [])]


def _complaint(bad: BadCall) -> str:
    named = f"Your call of {bad.name!r}" if bad.name else "A tool call of yours"
    return f"{named} could not be used and was not run: {bad.reason}. Correct the call, or answer without it."

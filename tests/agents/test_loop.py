"""The tool loop: who is asked what, calls at once, malformed calls, limits, and stopping anywhere."""

import asyncio
import time
from contextlib import aclosing
from typing import Any

import pytest

from yunque.agents import (
    BadCall,
    LoopDone,
    LoopEnd,
    ToolEnded,
    Toolset,
    ToolStarted,
    TurnAdded,
    answer,
    converse,
)
from yunque.core.errors import DataError
from yunque.core.records import Message
from yunque.protocol.errors import UnusableReply
from yunque.text.events import TextDelta

from .scripted_client import ScriptedChat, says

QUESTION = Message("user", "What is 3 plus 4?")


def add(a: int, b: int) -> int:
    """Add."""
    if a < 0:
        raise ValueError("a is negative")
    return a + b


def run(client: ScriptedChat, *tools: Any, **options: Any) -> LoopDone:
    return asyncio.run(answer(client, [QUESTION], Toolset(tools), **options))


def test_results_go_back_under_their_calls_until_nothing_is_called() -> None:
    client = ScriptedChat(says("let me see", ("add", {"a": 3, "b": 4}), ("add", {"a": 1, "b": 1})), says("7"))
    done = run(client, add)
    first, call_a, call_b, last = done.added
    assert (done.end, done.turns, last.content) == (LoopEnd.ANSWERED, 2, "7")
    ids = [call.id for call in first.tool_calls]
    assert [(m.role, m.content, m.tool_call_id) for m in (call_a, call_b)] == [
        ("tool", "7", ids[0]),
        ("tool", "2", ids[1]),
    ]
    assert [len(messages) for messages, _, _ in client.asked] == [1, 4]
    assert client.asked[1][0] == (QUESTION, first, call_a, call_b)
    assert [spec.name for spec in client.asked[0][1]] == ["add"]


def test_calls_of_one_reply_run_at_once_and_are_told_in_order() -> None:
    async def wait(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    client = ScriptedChat(says("", *(("wait", {"seconds": s}) for s in (0.3, 0.2, 0.1))), says("done"))
    heard: list[Any] = []
    begin = time.monotonic()
    done = run(client, wait, on_event=heard.append)
    assert time.monotonic() - begin < 0.55  # one after the other they would take 0.6
    assert [message.content for message in done.added[1:4]] == ["0.3", "0.2", "0.1"]
    assert [event.result.text for event in heard if isinstance(event, ToolEnded)] == ["0.1", "0.2", "0.3"]
    assert sum(isinstance(event, ToolStarted) for event in heard) == 3


def test_what_goes_wrong_in_a_tool_is_told_to_the_model() -> None:
    calls = [("add", {"a": -1, "b": 0}), ("add", {"a": "x", "b": 0}), ("sub", {"a": 1})]
    done = run(ScriptedChat(says("", *calls), says("sorry")), add)
    texts = [message.content or "" for message in done.added[1:4]]
    assert texts[0] == "Error: ValueError: a is negative"
    assert texts[1].startswith("Error: add: a: ")
    assert "unknown tool 'sub'" in texts[2]
    assert done.end is LoopEnd.ANSWERED


def test_a_call_that_cannot_be_used_is_complained_about_beside_the_results_of_the_others() -> None:
    bad = BadCall("add", '{"a": ', "arguments are not JSON")
    client = ScriptedChat(says("", ("add", {"a": 1, "b": 2}), bad=[bad]), says("", bad=[bad]), says("3"))
    done = run(client, add)
    assert [message.role for message in done.added] == ["assistant", "tool", "user", "assistant", "user", "assistant"]
    assert "'add' could not be used and was not run: arguments are not JSON" in (done.added[2].content or "")
    assert (done.end, done.turns) == (LoopEnd.ANSWERED, 3)


def test_a_reply_cut_by_its_length_ends_the_loop_though_a_call_was_begun() -> None:
    done = run(ScriptedChat(says("I was", finish="length", bad=[BadCall("add", "", "cut")])), add)
    assert (done.end, done.turns, len(done.added)) == (LoopEnd.LENGTH, 1, 1)


def test_the_limit_of_turns_leaves_calls_unrun_and_answered() -> None:
    ran: list[int] = []

    def note(n: int) -> None:
        ran.append(n)

    done = run(ScriptedChat(says("again", ("note", {"n": 1}))), note, max_turns=3)
    assert (done.end, done.turns, ran) == (LoopEnd.MAX_TURNS, 3, [1, 1])
    assert done.added[-1].content == "Error: not run: the limit of 3 turns is reached"
    called = [call.id for message in done.added for call in message.tool_calls]
    assert called == [message.tool_call_id for message in done.added if message.role == "tool"]


def test_streamed_events_are_the_reply_and_end_with_the_loop() -> None:
    async def collect() -> list[Any]:
        client = ScriptedChat(says("a b", ("add", {"a": 1, "b": 1})), says("c"))
        return [event async for event in converse(client, [QUESTION], Toolset([add]))]

    events = asyncio.run(collect())
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "abc"
    assert isinstance(events[-1], LoopDone)
    added = [message for event in events if isinstance(event, TurnAdded) for message in event.messages]
    assert tuple(added) == events[-1].added


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.25, 0.35])
def test_a_loop_that_is_cancelled_anywhere_ends_its_reply_and_its_tools(delay_s: float) -> None:
    running: list[int] = []

    async def hang() -> None:
        running.append(1)
        try:
            await asyncio.sleep(30)
        finally:
            running.pop()

    client = ScriptedChat(says("one two three", ("hang", {}), ("hang", {})), delay_s=0.1)
    kept: list[Message] = []

    def keep(event: Any) -> None:
        if isinstance(event, TurnAdded):
            kept.extend(event.messages)

    async def stop() -> int:
        task = asyncio.ensure_future(answer(client, [QUESTION], Toolset([hang]), on_event=keep))
        await asyncio.sleep(delay_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(stop()) == 0
    assert (running, kept) == ([], [])
    assert client.left == (delay_s < 0.3) * len(client.asked)


def test_a_reader_that_leaves_ends_the_reply() -> None:
    client = ScriptedChat(says("one two three"))

    async def leave() -> None:
        async with aclosing(converse(client, [QUESTION])) as events:
            async for _ in events:
                break

    asyncio.run(leave())
    assert client.left == 1


def test_a_client_without_a_reply_is_an_error() -> None:
    class Mute(ScriptedChat):
        async def stream(self, *_: Any):  # type: ignore[override]
            yield TextDelta("…")

    with pytest.raises(UnusableReply, match="without a reply"):
        run(Mute(says("")))


def test_an_exception_of_the_client_comes_through() -> None:
    class Broken(ScriptedChat):
        async def stream(self, *_: Any):  # type: ignore[override]
            yield TextDelta("…")
            raise DataError("broken")

    with pytest.raises(DataError, match="broken"):
        run(Broken(says("")))

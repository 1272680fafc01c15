"""Turns through a scripted engine: what a client is shown, however the ids are cut into steps."""

import asyncio
import json

import pytest

from yunque.core.records import Message, ToolSpec
from yunque.protocol.errors import ContextLengthExceeded, Overloaded, RequestError
from yunque.protocol.generation import Finish, JsonConstraint, SamplingParams, ToolConstraint
from yunque.serve.conversation import (
    CallStart,
    CallVoid,
    ChatTurn,
    Conversations,
    FinishedTurn,
    ToolCallDelta,
    ToolChoice,
    collect,
)
from yunque.text import FailureReason, Renderer

from .scripted_engine import ScriptedEngine, ScriptSettings

WEATHER = ToolSpec.from_openai(
    {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {}}}}
)
USER = (Message("user", "Paris?"),)
CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
DAYS = "<tool_call>get_weather<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
TWO_CALLS = f"need it</think>Looking.{CALL}{DAYS}<|observation|>"


def engine_of(renderer: Renderer, *texts: str, **settings: object) -> ScriptedEngine:
    replies = [renderer.tokenizer.encode_with_special(text) for text in texts]
    return ScriptedEngine(replies, ScriptSettings(**settings), decode=renderer.tokenizer.decode)  # type: ignore[arg-type]


def run_turn(engine: ScriptedEngine, renderer: Renderer, chat: ChatTurn) -> FinishedTurn:
    async def run() -> FinishedTurn:
        conversations = Conversations(engine, renderer)
        return await collect(conversations.start(await conversations.prepare(chat)))

    return asyncio.run(run())


@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
def test_thought_text_and_parallel_calls_are_the_same_for_every_chunk_size(renderer: Renderer, chunk: int) -> None:
    engine = engine_of(renderer, TWO_CALLS, chunk=chunk)
    turn = run_turn(engine, renderer, ChatTurn(USER, (WEATHER,)))
    assert (turn.reasoning, turn.content, turn.end.reason) == ("need it", "Looking.", "tool_calls")
    assert [dict(call.arguments) for call in turn.tool_calls] == [{"city": "Paris"}, {"days": 2}]
    ids = [call.id or "" for call in turn.tool_calls]
    assert len(set(ids)) == 2
    assert all(call_id.startswith("call_") for call_id in ids)
    script = renderer.tokenizer.encode_with_special(TWO_CALLS)
    assert tuple(token for delta in turn.deltas for token in delta.tokens) == tuple(script)
    usage = turn.end.usage
    assert usage.completion_tokens == len(script)
    assert usage.reasoning_tokens == len(renderer.tokenizer.encode_with_special("need it</think>"))
    assert usage.prompt_tokens == len(engine.requests[0].tokens)
    assert usage.cached_tokens == usage.prompt_tokens // 2


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "stop", "reasoning", "content"),
    [
        ("a</think>one END two", "END", "a", "one"),
        ("a</think>one\n\nUser: two", "\n\nUser:", "a", "one"),
        ("a</think>oneEN", "END", "a", "oneEN"),
        ("aEND</think>x", "END", "a", ""),
    ],
)
def test_a_stop_string_is_cut_and_nothing_of_it_shown(
    renderer: Renderer, text: str, stop: str, reasoning: str, content: str, chunk: int
) -> None:
    engine = engine_of(renderer, text, chunk=chunk)
    turn = run_turn(engine, renderer, ChatTurn(USER, sampling=SamplingParams(stop=(stop,))))
    assert (turn.reasoning, turn.content.rstrip()) == (reasoning, content)
    assert turn.end.reason == "stop"
    assert turn.end.stop_string == (stop if stop in text else None)


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize(
    ("text", "reason", "content"),
    [
        ("</think><tool_call>nope</tool_call>", FailureReason.UNKNOWN_TOOL, "<tool_call>nope</tool_call>"),
        (
            "</think>Hm.<tool_call>get_weather<arg_key>city</arg_key>Paris</tool_call>",
            FailureReason.BAD_ARGUMENTS,
            "Hm.<tool_call>get_weather<arg_key>city</arg_key>Paris</tool_call>",
        ),
    ],
)
def test_a_failed_call_is_shown_as_text_and_the_turn_stops(
    renderer: Renderer, text: str, reason: FailureReason, content: str, chunk: int
) -> None:
    turn = run_turn(engine_of(renderer, text + "<|user|>", chunk=chunk), renderer, ChatTurn(USER, (WEATHER,)))
    assert (turn.content, turn.tool_calls, turn.end.reason) == (content, (), "stop")
    assert [failure.reason for failure in turn.end.failures] == [reason]


def test_a_call_cut_by_length_is_void_and_its_arguments_never_become_json(renderer: Renderer) -> None:
    text = "</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Par"

    async def run() -> list[object]:
        conversations = Conversations(engine_of(renderer, text + "is forever"), renderer)
        size = len(renderer.tokenizer.encode_with_special(text))
        chat = ChatTurn(USER, (WEATHER,), sampling=SamplingParams(max_new_tokens=size))
        steps = conversations.start(await conversations.prepare(chat))
        return [event async for step in steps for event in (*step.events, step.end) if event is not None]

    events = asyncio.run(run())
    arguments = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
    assert len([event for event in events if isinstance(event, CallStart)]) == 1
    assert len([event for event in events if isinstance(event, CallVoid)]) == 1
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(arguments)
    assert events[-1].reason == "length"  # type: ignore[attr-defined]


def test_tool_choices_become_constraints_and_barred_tokens(renderer: Renderer) -> None:
    engine = engine_of(renderer, "</think>x<|user|>")
    other = ToolSpec.from_openai({"name": "other"})
    tools = (WEATHER, other)
    seen = {}
    for mode in ("auto", "none", "required", "named"):
        choice = ToolChoice(mode, "other" if mode == "named" else None)  # type: ignore[arg-type]
        run_turn(engine, renderer, ChatTurn(USER, tools, choice))
        seen[mode] = engine.requests[-1]
    assert seen["auto"].sampling.constraint is None
    assert seen["required"].sampling.constraint == ToolConstraint(tools, required=True)
    assert seen["named"].sampling.constraint == ToolConstraint((other,), required=True, parallel=False)
    assert list(seen["none"].sampling.logit_bias) == [renderer.tokenizer.special["<tool_call>"]]
    assert len({request.tokens for request in seen.values()}) == 1, "the cached prefix does not depend on the choice"
    assert seen["auto"].sampling.stop_ids == frozenset(renderer.tokenizer.special.eos_ids)
    run_turn(engine, renderer, ChatTurn(USER, tools, parallel_tool_calls=False))
    assert engine.requests[-1].sampling.constraint == ToolConstraint(tools, parallel=False)
    run_turn(engine, renderer, ChatTurn(USER, tools, output=JsonConstraint()))
    assert engine.requests[-1].sampling.constraint == ToolConstraint(tools, output=JsonConstraint())


def test_what_cannot_be_asked_is_a_request_error_naming_the_field(renderer: Renderer) -> None:
    engine = engine_of(renderer, "x", max_model_len=60)
    cases = [
        (ChatTurn(USER, tool_choice=ToolChoice("required")), "tool_choice"),
        (ChatTurn(USER, (WEATHER,), ToolChoice("named", "get_wether")), "tool_choice"),
        (ChatTurn(USER, template={"thinking": True}), "chat_template_kwargs"),
        (ChatTurn(()), "messages"),
        (ChatTurn((Message("user", "\ud800"),)), "messages"),
    ]
    for chat, param in cases:
        with pytest.raises(RequestError) as caught:
            run_turn(engine, renderer, chat)
        assert caught.value.param == param
    with pytest.raises(ContextLengthExceeded):
        run_turn(engine, renderer, ChatTurn((Message("user", "Paris? " * 100),)))
    assert engine.requests == []


def test_closing_steps_before_the_first_frees_the_request(renderer: Renderer) -> None:
    engine = engine_of(renderer, "x", max_live=1)

    async def run() -> None:
        conversations = Conversations(engine, renderer)
        turn = await conversations.prepare(ChatTurn(USER))
        steps = conversations.start(turn, request_id="a")
        with pytest.raises(Overloaded):
            conversations.start(turn, request_id="a", choice=1)
        assert engine.pages_used > 0
        await steps.aclose()

    asyncio.run(run())
    assert (engine.pages_used, engine.aborted) == (0, ["a-0"])


def test_an_engine_failure_ends_the_turn_with_what_was_made(renderer: Renderer) -> None:
    engine = engine_of(renderer, "a</think>bcd")
    engine.fails_after = 3
    turn = run_turn(engine, renderer, ChatTurn(USER))
    assert (turn.end.finish, turn.end.usage.completion_tokens) == (Finish.ERROR, 3)

"""The chat client over HTTP: streams of other servers' making, and our own server."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from yunque.agents import CallDelta, ChatOptions, ChatReply, ChatUsage, HttpChatClient, Toolset, answer
from yunque.core.errors import YunqueError
from yunque.core.records import Message
from yunque.protocol.clients import HttpSettings
from yunque.protocol.errors import ContextLengthExceeded, EngineUnavailable, Overloaded, RequestError, UnusableReply
from yunque.serve.settings import ServeSettings
from yunque.text import ReasoningDelta, Renderer, TextDelta, train_bpe

from ..protocol.scripted_server import Answer, ScriptedServer
from ..serve.servers import listening, serve

QUESTION = [Message("user", "hello")]


@pytest.fixture(scope="module")
def running_server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as scripted:
        yield scripted


@pytest.fixture
def server(running_server: ScriptedServer) -> ScriptedServer:
    running_server.play()
    return running_server


def stream(*chunks: dict[str, Any] | str, done: bool = True, **answer: Any) -> Answer:
    """A stream of these chunks (deltas of the first choice, or text as it stands)."""
    lines = [
        chunk
        if isinstance(chunk, str)
        else "data: " + json.dumps(chunk if "choices" in chunk else {"choices": [{"index": 0, "delta": chunk}]})
        for chunk in chunks
    ]
    body = "\n\n".join([*lines, *(["data: [DONE]"] if done else []), ""])
    return Answer(body, headers={"content-type": "text/event-stream"}, **answer)


def end(reason: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def call(index: int | None, **function: Any) -> dict[str, Any]:
    place = {} if index is None else {"index": index}
    ident = {"id": function.pop("id")} if "id" in function else {}
    return {"tool_calls": [{**place, **ident, "type": "function", "function": function}]}


def ask(url: str, options: ChatOptions | None = None, tools: Toolset | None = None, **settings: Any) -> list[Any]:
    async def run() -> list[Any]:
        client = HttpChatClient(url, HttpSettings(backoff_s=0, **settings), model="m")
        try:
            specs = (tools or Toolset()).specs
            return [event async for event in client.stream(QUESTION, specs, options or ChatOptions())]
        finally:
            await client.close()

    return asyncio.run(run())


def test_thought_text_calls_and_usage_are_read_from_the_stream(server: ScriptedServer) -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {
            "reasoning_tokens": 2,
            "accepted_prediction_tokens": 3,
            "rejected_prediction_tokens": 1,
        },
    }
    server.play(
        stream(
            {"role": "assistant", "content": ""},
            {"reasoning_content": "h"},
            ": ping",
            {"reasoning_content": "m"},
            {"content": "Hi"},
            call(0, id="c0", name="add", arguments=""),
            call(0, arguments='{"a": '),
            call(1, id="c1", name="now", arguments="{}"),
            call(0, arguments="3}"),
            end("tool_calls"),
            {"choices": [], "usage": usage},
        )
    )
    *events, reply = ask(server.url)
    assert [event for event in events if not isinstance(event, CallDelta)] == [
        ReasoningDelta("h"),
        ReasoningDelta("m"),
        TextDelta("Hi"),
    ]
    assert [event for event in events if isinstance(event, CallDelta)] == [
        CallDelta(0, "add", ""),
        CallDelta(0, "add", '{"a": '),
        CallDelta(1, "now", "{}"),
        CallDelta(0, "add", "3}"),
    ]
    assert isinstance(reply, ChatReply)
    assert (reply.message.reasoning, reply.message.content, reply.finish) == ("hm", "Hi", "tool_calls")
    assert [(c.id, c.name, c.arguments) for c in reply.message.tool_calls] == [
        ("c0", "add", {"a": 3}),
        ("c1", "now", {}),
    ]
    assert reply.usage == ChatUsage(9, 8, 4, 2, drafted=4, accepted=3)


def test_spellings_of_other_servers(server: ScriptedServer) -> None:
    server.play(stream({"reasoning": "why"}, call(None, name="f", arguments={"x": 1}), end("tool_calls")))
    reply = ask(server.url)[-1]
    assert reply.message.reasoning == "why"
    (made,) = reply.message.tool_calls
    assert (made.name, made.arguments) == ("f", {"x": 1})
    assert made.id.startswith("call_")


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", '"x"', '{"a": NaN}'])
def test_a_call_whose_arguments_are_no_object_is_a_bad_call(server: ScriptedServer, arguments: str) -> None:
    server.play(stream(call(0, id="c", name="f", arguments=arguments), {"content": "x"}, end("stop")))
    reply = ask(server.url)[-1]
    assert (reply.message.tool_calls, reply.message.content) == ((), "x")
    (bad,) = reply.bad_calls
    assert (bad.name, bad.raw) == ("f", arguments)
    assert "arguments" in bad.reason


def test_the_request_carries_the_options_that_are_set_and_no_others(server: ScriptedServer) -> None:
    def f(x: int) -> int:
        return x

    server.play(stream({"content": "x"}, end("stop")))
    options = ChatOptions(0.5, 0.9, 7, 3, enable_thinking=False, session="s1")
    ask(server.url + "/v1/", options, Toolset([f]), api_key="k")
    (asked,) = server.asked
    assert (asked.path, asked.headers["authorization"], asked.headers["x-session-id"]) == (
        "/v1/chat/completions",
        "Bearer k",
        "s1",
    )
    tools = asked.body.pop("tools")
    assert tools[0]["function"]["name"] == "f"
    common = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert asked.body == common | {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "seed": 3,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    server.play(stream({"content": "x"}, end("stop")))
    ask(server.url)
    assert server.asked[0].body == common


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (stream({"content": "a"}, done=False), EngineUnavailable, "middle of the reply"),
        (stream({"content": "a" * 999}, end("stop"), breaks_off=True), EngineUnavailable, "broke off"),
        (stream("data: {oops"), UnusableReply, "not JSON"),
        (stream('data: {"object": "x"}'), UnusableReply, "no choices"),
        (stream('data: {"choices": [{"index": 0}]}'), UnusableReply, "no delta"),
        (stream({"tool_calls": ["x"]}), UnusableReply, "no object"),
        (stream('data: {"error": {"message": "it burns", "code": "engine_error"}}'), EngineUnavailable, "it burns"),
        (
            stream('data: {"error": {"message": "full", "code": "context_length_exceeded"}}'),
            ContextLengthExceeded,
            "full",
        ),
        (Answer({"error": {"message": "no such model"}}, 404), RequestError, "no such model"),
        (Answer({"error": {"message": "busy"}}, 429), Overloaded, "busy"),
    ],
)
def test_what_goes_wrong_is_one_of_our_errors(
    server: ScriptedServer, answer: Answer, kind: type[YunqueError], words: str
) -> None:
    server.play(answer)
    with pytest.raises(kind, match=words):
        ask(server.url, attempts=2)
    assert len(server.asked) == (2 if kind is Overloaded else 1)


def test_a_refused_stream_is_asked_for_again(server: ScriptedServer) -> None:
    server.play(Answer("", 503), stream({"content": "x"}, end("stop")))
    assert ask(server.url)[-1].message.content == "x"


def test_the_first_model_is_taken_where_none_is_named(server: ScriptedServer) -> None:
    async def name(url: str) -> str:
        client = HttpChatClient(url)
        try:
            return await client.model()
        finally:
            await client.close()

    server.play(Answer({"object": "list", "data": [{"id": "glm"}, {"id": "other"}]}))
    assert asyncio.run(name(server.url)) == "glm"
    for body in ({"data": []}, [], "<html>"):
        server.play(Answer(body))
        with pytest.raises(UnusableReply, match="list of models"):
            asyncio.run(name(server.url))


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(train_bpe(["yes and no, x y z add\n"] * 8, 400), "glm-5")


def test_the_loop_runs_over_our_own_server(renderer: Renderer) -> None:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    called = "<tool_call>add<arg_key>a</arg_key><arg_value>3</arg_value><arg_key>b</arg_key><arg_value>4</arg_value>"
    first = f"hm</think>so{called}</tool_call><|observation|>"
    served = serve(renderer, first, "easy</think>It is 7<|user|>", settings=ServeSettings(port=0))

    async def run(url: str) -> Any:
        client = HttpChatClient(url)
        try:
            return await answer(client, QUESTION, Toolset([add]), options=ChatOptions(session="s"))
        finally:
            await client.close()

    with listening(served) as url:
        done = asyncio.run(run(url))
    assistant, result, last = done.added
    assert (assistant.reasoning, assistant.content, result.content) == ("hm", "so", "7")
    assert (last.content, last.reasoning) == ("It is 7", "easy")
    second = served.engine.requests[1]
    assert "7" in renderer.tokenizer.decode(list(second.tokens))
    assert second.session == "s"


def test_leaving_a_stream_ends_the_engine_s_work(renderer: Renderer) -> None:
    served = serve(renderer, "hm</think>" + "a b " * 500, settings=ServeSettings(port=0), delay_s=0.01)

    async def run(url: str) -> None:
        client = HttpChatClient(url)
        events = client.stream(QUESTION, (), ChatOptions())
        assert await anext(events) == ReasoningDelta("h")
        await events.aclose()
        async with asyncio.timeout(10):
            while served.engine.pages_used:
                await asyncio.sleep(0.01)
        await client.close()

    with listening(served) as url:
        asyncio.run(run(url))
    assert len(served.engine.aborted) == 1

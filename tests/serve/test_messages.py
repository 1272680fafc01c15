"""The official Anthropic client against a real server with a scripted engine."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message as Reply

from yunque.core.records import Message, ToolCall, ToolSpec
from yunque.protocol.anthropic import MessagesRequest
from yunque.protocol.generation import JsonConstraint, ToolConstraint
from yunque.protocol.sse import SseDecoder
from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .scripted_engine import ScriptedEngine
from .servers import listening, wait_until
from .servers import serve as scripted

TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
ASK: dict[str, Any] = {"model": "scripted", "max_tokens": 200, "messages": [{"role": "user", "content": "Paris?"}]}
CALLS = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
    "<tool_call>get_weather<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
)
TURN = f"I need the weather.</think>Looking, naïve 東京.{CALLS}<|observation|>"
ANSWER = "Sunny it is.</think>It is sunny.<|user|>"


class Served:
    """A server, its engine, and a client."""

    def __init__(self, url: str, engine: ScriptedEngine) -> None:
        self.url = url
        self.engine = engine
        self.client = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)

    def create(self, **fields: Any) -> Reply:
        return self.client.messages.create(**(ASK | fields))

    def stream(self, **fields: Any) -> Reply:
        with self.client.messages.stream(**(ASK | fields)) as stream:
            return stream.get_final_message()


@pytest.fixture
def serve(renderer: Renderer) -> Iterator[Any]:
    """Starts servers that play the given replies; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*replies: str, settings: ServeSettings | None = None, **script: Any) -> Served:
            app = scripted(renderer, *replies, settings=settings or ServeSettings(port=0), **script)
            served = Served(stack.enter_context(listening(app)), app.engine)
            stack.callback(served.client.close)
            return served

        yield start


def without_ids(reply: Reply) -> dict[str, Any]:
    """A reply without what is drawn anew for each request."""
    dumped = reply.model_dump(exclude={"id"}, exclude_none=True)
    return dumped | {"content": [{key: block[key] for key in block if key != "id"} for block in dumped["content"]]}


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_a_streamed_reply_is_the_whole_one(serve: Any, chunk: int) -> None:
    served = serve(TURN, chunk=chunk)
    whole, streamed = served.create(tools=[TOOL]), served.stream(tools=[TOOL])
    assert without_ids(streamed) == without_ids(whole)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, first, second = (block.model_dump() for block in whole.content)
    assert (thought["thinking"], text["text"]) == ("I need the weather.", "Looking, naïve 東京.")
    assert (first["input"], second["input"]) == ({"city": "Paris"}, {"days": 2})
    assert len({first["id"], second["id"]}) == 2
    assert whole.stop_reason == "tool_use"


def test_usage_counts_every_token_once(serve: Any, renderer: Renderer) -> None:
    served = serve(TURN)
    usage = served.stream(tools=[TOOL]).usage
    prompt = len(served.engine.requests[0].tokens)
    assert (usage.cache_read_input_tokens, usage.input_tokens) == (prompt // 2, prompt - prompt // 2)
    assert usage.output_tokens == len(renderer.tokenizer.encode_with_special(TURN))
    thought = len(renderer.tokenizer.encode_with_special("I need the weather.</think>"))
    assert usage.output_tokens_details is not None
    assert usage.output_tokens_details.thinking_tokens == thought


def test_the_next_turns_prompt_begins_with_the_tokens_of_this_one(serve: Any, renderer: Renderer) -> None:
    served = serve(TURN, ANSWER)
    first = served.stream(tools=[TOOL])
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "21 degrees"}
        for block in first.content
        if block.type == "tool_use"
    ]
    history = [*ASK["messages"], {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = served.create(tools=[TOOL], messages=history)
    assert [block.type for block in second.content] == ["thinking", "text"]
    assert second.stop_reason == "end_turn"
    before, after = served.engine.requests
    held = before.tokens + tuple(renderer.tokenizer.encode_with_special(TURN))
    assert after.tokens[: len(held)] == held


def test_a_request_as_claude_code_sends_it_is_rendered_whole(serve: Any, renderer: Renderer) -> None:
    body = json.loads((Path(__file__).parent / "requests" / "claude_code.json").read_text(encoding="utf-8"))
    served = serve(ANSWER, max_model_len=100_000)
    headers = {
        "x-api-key": "secret",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    }
    reply = httpx.post(f"{served.url}/v1/messages?beta=true", json=body, headers=headers)
    events = SseDecoder().feed(reply.content)
    assert (reply.status_code, events[0].event, events[-1].event) == (200, "message_start", "message_stop")
    assert all(json.loads(event.data)["type"] == event.event for event in events)
    calls = (
        ToolCall("Read", {"file_path": "/app/a.py", "limit": 20}, "toolu_01A"),
        ToolCall("Bash", {"command": "pytest -q"}, "toolu_01B"),
    )
    expected = renderer.render(
        [
            Message("system", "You are a coding agent.\n\n# Rules\nRead before you write."),
            Message("user", "<system-reminder>\nThe folder is a git repository.\n</system-reminder>\n\nFix the test."),
            Message("assistant", "I look at both files.", "First look at it.", calls),
            Message("tool", "     1\tdef f():", tool_call_id="toolu_01A"),
            Message("tool", "Error: exit 1: one test failed", tool_call_id="toolu_01B"),
        ],
        [
            ToolSpec.from_openai(
                {
                    "type": "function",
                    "function": {
                        "name": tool["name"],
                        "description": tool["description"],
                        "parameters": tool["input_schema"],
                    },
                }
            )
            for tool in body["tools"]
        ],
        add_generation_prompt=True,
    )
    asked = served.engine.requests[0]
    assert asked.tokens == expected.tokens
    assert asked.session == body["metadata"]["user_id"]
    assert (asked.sampling.max_new_tokens, asked.sampling.temperature) == (32000, 1.0)


def test_counted_tokens_are_those_of_the_prompt(serve: Any) -> None:
    served = serve(ANSWER)
    counted = served.client.messages.count_tokens(
        model="scripted", messages=ASK["messages"], tools=[TOOL], system="Be brief."
    )
    served.create(tools=[TOOL], system="Be brief.")
    assert counted.input_tokens == len(served.engine.requests[0].tokens)
    assert len(served.engine.requests) == 1


@pytest.mark.parametrize(("thinking", "opens"), [({"type": "disabled"}, False), ({"type": "adaptive"}, True)])
def test_thinking_is_switched_by_the_request(serve: Any, renderer: Renderer, thinking: Any, opens: bool) -> None:
    served = serve(ANSWER if opens else "It is sunny.<|user|>")
    reply = served.create(thinking=thinking)
    special = renderer.tokenizer.special
    assert served.engine.requests[0].tokens[-1] == special["<think>" if opens else "</think>"]
    assert [block.type for block in reply.content] == (["thinking", "text"] if opens else ["text"])


def test_a_stop_sequence_ends_the_reply_and_is_named(serve: Any) -> None:
    served = serve("x</think>One. STOP two.<|user|>")
    for reply in (served.create(stop_sequences=["STOP"]), served.stream(stop_sequences=["STOP"])):
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "STOP")
        assert reply.content[-1].text.rstrip() == "One."


def test_a_reply_that_is_cut_says_max_tokens(serve: Any) -> None:
    served = serve(TURN)
    reply = served.stream(max_tokens=3)
    assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 3)


def test_a_call_that_breaks_off_is_text_and_never_a_call(serve: Any) -> None:
    served = serve("x</think>Look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Par<|user|>")
    whole, streamed = served.create(tools=[TOOL]), served.stream(tools=[TOOL])
    assert without_ids(streamed) == without_ids(whole)
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    assert streamed.content[1].text.startswith("Look.<tool_call>get_weather")
    assert streamed.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("choice", "required", "parallel", "num_tools"),
    [
        ({"type": "any"}, True, True, 2),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False, 2),
        ({"type": "tool", "name": "get_weather"}, True, False, 1),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, False, 2),
    ],
)
def test_tool_choice_becomes_a_constraint(
    serve: Any, choice: Any, required: bool, parallel: bool, num_tools: int
) -> None:
    served = serve(TURN)
    served.create(tools=[TOOL, TOOL | {"name": "other"}], tool_choice=choice)
    constraint = served.engine.requests[0].sampling.constraint
    assert isinstance(constraint, ToolConstraint)
    assert (constraint.required, constraint.parallel, len(constraint.tools)) == (required, parallel, num_tools)


def test_without_choice_calls_are_free_and_none_bars_them(serve: Any, renderer: Renderer) -> None:
    served = serve(ANSWER)
    served.create(tools=[TOOL], tool_choice={"type": "auto"})
    served.create(tools=[TOOL], tool_choice={"type": "none"})
    free, barred = (request.sampling for request in served.engine.requests)
    assert (free.constraint, barred.constraint, dict(free.logit_bias)) == (None, None, {})
    assert list(barred.logit_bias) == [renderer.tokenizer.special["<tool_call>"]]


def test_an_output_schema_becomes_a_constraint(serve: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    served = serve('x</think>{"a": "b"}<|user|>')
    served.create(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert served.engine.requests[0].sampling.constraint == JsonConstraint(schema)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "'image'",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"tool_choice": {"type": "tool", "name": "nope"}, "tools": [TOOL]}, "nope"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "prompt is too long"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": "The"}]}, "prefill"),
    ],
)
def test_a_bad_request_is_a_typed_error_and_starts_nothing(serve: Any, fields: dict[str, Any], part: str) -> None:
    served = serve(ANSWER)
    with pytest.raises(anthropic.BadRequestError, match=part) as refused:
        served.create(**fields)
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        served.stream(**fields)
    assert served.engine.requests == []


def test_keys_models_and_full_queues_are_typed_errors(serve: Any) -> None:
    served = serve(ANSWER, settings=ServeSettings(port=0, api_keys=("secret",)), max_live=0)
    stranger = anthropic.Anthropic(base_url=served.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        stranger.messages.create(**ASK)
    with pytest.raises(anthropic.NotFoundError) as missing:
        served.create(model="another")
    with pytest.raises(anthropic.RateLimitError) as full:
        served.create()
    kinds = [error.value.body["error"]["type"] for error in (unknown, missing, full)]  # type: ignore[index]
    assert kinds == ["authentication_error", "not_found_error", "rate_limit_error"]
    assert full.value.response.headers["retry-after"] == "3"


def test_an_engine_that_breaks_is_an_api_error_with_and_without_stream(serve: Any) -> None:
    served = serve(TURN)
    served.engine.fails_after = 4
    with pytest.raises(anthropic.InternalServerError) as whole:
        served.create()
    seen = []
    with pytest.raises(anthropic.APIStatusError, match="the script says so") as broken:  # noqa: PT012
        for event in served.client.messages.create(**ASK, stream=True):
            seen.append(event.type)
    assert whole.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    assert broken.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    assert seen[0] == "message_start"
    assert "message_stop" not in seen


def test_a_client_that_leaves_frees_its_pages(serve: Any) -> None:
    served = serve("x</think>" + "word " * 500, delay_s=0.01)
    with served.client.messages.stream(**(ASK | {"max_tokens": 2000})) as stream:
        next(iter(stream.text_stream))
        assert served.engine.pages_used > 0
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/messages", json=ASK, timeout=0.3)
    wait_until(lambda: served.engine.pages_used == 0)
    assert len(served.engine.aborted) == 2


def test_every_field_of_a_request_is_named_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    section = page.partition("## `POST /v1/messages`")[2].partition("\n## ")[0]
    assert [name for name in MessagesRequest.model_fields if f"`{name}" not in section] == []

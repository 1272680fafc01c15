"""The official OpenAI client's Responses API against a real server with a scripted engine."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from yunque.core.records import Message, ToolCall, ToolSpec
from yunque.protocol.generation import JsonConstraint, ToolConstraint
from yunque.protocol.responses import ResponsesRequest
from yunque.protocol.sse import SseDecoder
from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .scripted_engine import ScriptedEngine
from .servers import listening, wait_until
from .servers import serve as scripted

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "strict": False,
}
ASK: dict[str, Any] = {"model": "scripted", "input": "Paris?"}
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
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)

    def create(self, **fields: Any) -> Response:
        return self.client.responses.create(**(ASK | fields))

    def events(self, **fields: Any) -> list[Any]:
        return list(self.client.responses.create(**(ASK | fields), stream=True))

    def stream(self, **fields: Any) -> Response:
        with self.client.responses.stream(**(ASK | fields)) as stream:
            return stream.get_final_response()


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


def without_ids(response: Response) -> dict[str, Any]:
    """A response without what is drawn anew for each request."""
    dumped = response.model_dump(exclude={"id", "created_at"}, exclude_none=True)
    drawn = ("id", "call_id", "parsed_arguments", "parsed")
    return dumped | {"output": [{key: item[key] for key in item if key not in drawn} for item in dumped["output"]]}


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_a_streamed_response_is_the_whole_one(serve: Any, chunk: int) -> None:
    served = serve(TURN, chunk=chunk)
    whole, streamed = served.create(tools=[TOOL]), served.stream(tools=[TOOL])
    assert without_ids(streamed) == without_ids(whole)
    thought, said, first, second = whole.output
    assert (thought.type, thought.content and thought.content[0].text) == ("reasoning", "I need the weather.")
    assert (said.type, whole.output_text) == ("message", "Looking, naïve 東京.")
    assert [json.loads(call.arguments) for call in (first, second)] == [{"city": "Paris"}, {"days": 2}]
    assert len({first.call_id, second.call_id}) == 2
    assert whole.status == "completed"


def test_events_are_numbered_and_begin_and_end_as_documented(serve: Any) -> None:
    served = serve(TURN, chunk=5)
    events = served.events(tools=[TOOL])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4


def test_usage_counts_every_token_once(serve: Any, renderer: Renderer) -> None:
    served = serve(TURN)
    usage = served.stream(tools=[TOOL]).usage
    assert usage is not None
    prompt, made = len(served.engine.requests[0].tokens), len(renderer.tokenizer.encode_with_special(TURN))
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (prompt, made, prompt + made)
    assert usage.input_tokens_details.cached_tokens == prompt // 2
    thought = len(renderer.tokenizer.encode_with_special("I need the weather.</think>"))
    assert usage.output_tokens_details.reasoning_tokens == thought


@pytest.mark.parametrize("reasoning", [None, {"summary": "auto"}])
def test_the_next_turns_prompt_begins_with_the_tokens_of_this_one(
    serve: Any, renderer: Renderer, reasoning: Any
) -> None:
    served = serve(TURN, ANSWER)
    fields = {"tools": [TOOL]} | ({"reasoning": reasoning} if reasoning else {})
    first = served.stream(**fields)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "21 degrees"}
        for item in first.output
        if item.type == "function_call"
    ]
    echoed = [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in first.output]
    second = served.create(**fields, input=[{"role": "user", "content": "Paris?"}, *echoed, *results])
    assert [item.type for item in second.output] == ["reasoning", "message"]
    before, after = served.engine.requests
    held = before.tokens + tuple(renderer.tokenizer.encode_with_special(TURN))
    assert after.tokens[: len(held)] == held


def test_a_wanted_summary_is_the_thought_itself(serve: Any) -> None:
    served = serve(ANSWER)
    response = served.stream(reasoning={"summary": "auto", "effort": "low"})
    thought = response.output[0]
    assert [part.text for part in thought.summary] == ["Sunny it is."]
    assert not thought.content


def test_a_request_as_codex_sends_it_is_rendered_whole(serve: Any, renderer: Renderer) -> None:
    body = json.loads((Path(__file__).parent / "requests" / "codex.json").read_text(encoding="utf-8"))
    served = serve(ANSWER, max_model_len=100_000)
    reply = httpx.post(f"{served.url}/v1/responses", json=body, headers={"authorization": "Bearer secret"})
    events = SseDecoder().feed(reply.content)
    assert (reply.status_code, events[0].event, events[-1].event) == (200, "response.created", "response.completed")
    assert all(json.loads(event.data)["type"] == event.event for event in events)
    call = ToolCall("exec_command", {"cmd": "pytest -q", "yield_time_ms": 1000}, "call_01A")
    expected = renderer.render(
        [
            Message("system", "You are a coding agent."),
            Message("system", "<permissions>The sandbox is read-only.</permissions>"),
            Message("user", "<environment_context><cwd>/app</cwd></environment_context>"),
            Message("user", "Fix the test."),
            Message("assistant", "", "First look at it.", (call,)),
            Message("tool", "exit 1: one test failed", tool_call_id="call_01A"),
        ],
        served_tools(body),
        add_generation_prompt=True,
    )
    asked = served.engine.requests[0]
    assert asked.tokens == expected.tokens
    assert asked.session == body["prompt_cache_key"]


def served_tools(body: dict[str, Any]) -> list[ToolSpec]:
    """The tools of a request as the chat formats show them."""
    keys = ("name", "description", "parameters")
    functions = [{key: tool[key] for key in keys} for tool in body["tools"]]
    return [ToolSpec.from_openai({"type": "function", "function": function}) for function in functions]


class Answer(BaseModel):
    """A form for the answer."""

    city: str
    days: int


def test_structured_output_is_constrained_and_parsed(serve: Any) -> None:
    served = serve('x</think>{"city": "Paris", "days": 2}<|user|>')
    parsed = served.client.responses.parse(**ASK, text_format=Answer)
    assert parsed.output_parsed == Answer(city="Paris", days=2)
    constraint = served.engine.requests[0].sampling.constraint
    assert isinstance(constraint, JsonConstraint)
    assert set(constraint.schema["properties"]) == {"city", "days"}
    with served.client.responses.stream(**ASK, text_format=Answer) as stream:
        assert stream.get_final_response().output_parsed == Answer(city="Paris", days=2)


@pytest.mark.parametrize(
    ("fields", "required", "parallel", "num_tools"),
    [
        ({"tool_choice": "required"}, True, True, 2),
        ({"tool_choice": "required", "parallel_tool_calls": False}, True, False, 2),
        ({"tool_choice": {"type": "function", "name": "get_weather"}}, True, False, 1),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, False, False, 2),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"name": "get_weather"}]}},
            True,
            True,
            1,
        ),
    ],
)
def test_tool_choice_becomes_a_constraint(
    serve: Any, fields: Any, required: bool, parallel: bool, num_tools: int
) -> None:
    served = serve(TURN)
    served.create(tools=[TOOL, TOOL | {"name": "other"}], **fields)
    constraint = served.engine.requests[0].sampling.constraint
    assert isinstance(constraint, ToolConstraint)
    assert (constraint.required, constraint.parallel, len(constraint.tools)) == (required, parallel, num_tools)


def test_effort_none_switches_thinking_off(serve: Any, renderer: Renderer) -> None:
    served = serve("It is sunny.<|user|>")
    response = served.create(reasoning={"effort": "none"})
    assert [item.type for item in response.output] == ["message"]
    assert served.engine.requests[0].tokens[-1] == renderer.tokenizer.special["</think>"]


def test_a_reply_that_is_cut_is_incomplete(serve: Any) -> None:
    served = serve(TURN)
    whole, events = served.create(max_output_tokens=3), served.events(max_output_tokens=3)
    for response in (whole, events[-1].response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.usage.output_tokens == 3
    assert events[-1].type == "response.incomplete"


def test_a_call_that_breaks_off_ends_incomplete_and_is_text_in_the_response(serve: Any) -> None:
    served = serve("x</think>Look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Par<|user|>")
    whole, events = served.create(tools=[TOOL]), served.events(tools=[TOOL])
    assert without_ids(events[-1].response) == without_ids(whole)
    assert [item.type for item in whole.output] == ["reasoning", "message", "message"]
    assert whole.output_text.startswith("Look.<tool_call>get_weather")
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.status for item in done if item.type == "function_call"] == ["incomplete"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "invalid_request"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "invalid_request"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
            "invalid_request",
        ),
        ({"temperature": -1}, "temperature", "invalid_request"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_request"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "invalid_request"),
        ({"input": "word " * 9000}, "messages", "context_length_exceeded"),
    ],
)
def test_a_bad_request_is_a_typed_error_and_starts_nothing(
    serve: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    served = serve(ANSWER)
    with pytest.raises(openai.BadRequestError) as refused:
        served.create(**fields)
    assert (refused.value.param, refused.value.code) == (param, code)
    with pytest.raises(openai.BadRequestError):
        served.events(**fields)
    assert served.engine.requests == []


def test_keys_models_and_full_queues_are_typed_errors(serve: Any) -> None:
    served = serve(ANSWER, settings=ServeSettings(port=0, api_keys=("secret",)), max_live=0)
    stranger = openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.responses.create(**ASK)
    with pytest.raises(openai.NotFoundError) as missing:
        served.create(model="another")
    with pytest.raises(openai.RateLimitError) as full:
        served.create()
    assert (missing.value.code, full.value.response.headers["retry-after"]) == ("model_not_found", "3")


def test_an_engine_that_breaks_is_an_error_and_a_failed_response(serve: Any) -> None:
    served = serve(TURN)
    served.engine.fails_after = 4
    with pytest.raises(openai.InternalServerError, match="the script says so"):
        served.create()
    last = served.events()[-1]
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert "the script says so" in last.response.error.message


def test_a_client_that_leaves_frees_its_pages(serve: Any) -> None:
    served = serve("x</think>" + "word " * 500, delay_s=0.01)
    with served.client.responses.stream(**ASK) as stream:
        assert next(iter(stream)).type == "response.created"
        wait_until(lambda: served.engine.pages_used > 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/responses", json=ASK, timeout=0.3)
    wait_until(lambda: served.engine.pages_used == 0)
    assert len(served.engine.aborted) == 2


def test_every_field_of_a_request_is_named_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    section = page.partition("## `POST /v1/responses`")[2].partition("\n## ")[0]
    assert [name for name in ResponsesRequest.model_fields if f"`{name}" not in section] == []

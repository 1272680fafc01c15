"""Responses requests into conversations, and replies into events that OpenAI's own client puts together."""

import json
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from yunque.core.records import Message, ToolCall
from yunque.protocol.errors import RequestError
from yunque.protocol.generation import JsonConstraint
from yunque.protocol.responses import (
    ResponsesRequest,
    read_messages,
    read_output,
    read_sampling,
    read_template,
    read_tools,
    refuse_stateful,
)
from yunque.protocol.responses_reply import ResponseBuilder, envelope, usage

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
COUNTS = usage(prompt_tokens=10, cached_tokens=4, output_tokens=7, reasoning_tokens=2)
CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"n": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "2"}


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "m", "input": "hi"} | fields)


def messages_of(*items: dict[str, Any], **fields: Any) -> tuple[Message, ...]:
    return read_messages(request(input=list(items), **fields))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_string_an_easy_message_and_an_item_are_the_same_conversation():
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}], "status": "completed"}
    expected = (Message("system", "be brief"), Message("user", "hi"))
    for given in ("hi", [user("hi")], [item]):
        assert read_messages(request(input=given, instructions="be brief")) == expected


def test_developer_messages_are_the_systems():
    got = messages_of({"role": "developer", "content": "rules"}, user("hi"))
    assert got == (Message("system", "rules"), Message("user", "hi"))


def test_items_of_one_turn_become_one_assistant_message():
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Looking.", "annotations": []}],
    }
    second = CALL | {"call_id": "call_2", "arguments": ""}
    got = messages_of(user("hi"), thought, said, CALL, second, OUTPUT, OUTPUT | {"call_id": "call_2"}, thought)
    calls = (ToolCall("f", {"n": 1}, "call_1"), ToolCall("f", {}, "call_2"))
    assert got == (
        Message("user", "hi"),
        Message("assistant", "Looking.", "hm", calls),
        Message("tool", "2", tool_call_id="call_1"),
        Message("tool", "2", tool_call_id="call_2"),
        Message("assistant", "", "hm"),
    )


def test_a_thought_that_only_has_a_summary_is_its_summary():
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "encrypted_content": "x",
    }
    assert messages_of(user("hi"), thought, CALL, OUTPUT)[1].reasoning == "hm"
    assert messages_of(user("hi"), thought | {"summary": []}, CALL, OUTPUT)[1].reasoning is None


def test_a_call_that_broke_off_is_the_text_that_followed_it_or_its_own():
    broken = CALL | {"arguments": '{"n": '}
    said = {"role": "assistant", "content": "<tool_call>f<arg_key>n"}
    assert messages_of(user("hi"), broken, said, OUTPUT)[1] == Message("assistant", "<tool_call>f<arg_key>n")
    assert messages_of(user("hi"), broken, OUTPUT)[1] == Message("assistant", '<tool_call>f{"n": ')


@pytest.mark.parametrize(
    ("item", "param", "part"),
    [
        ({"type": "item_reference", "id": "x"}, "input.0", "item_reference"),
        ({"type": "web_search_call", "id": "x"}, "input.0", "valid: message, function_call"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input.0.content.0", "input_image"),
        (OUTPUT | {"output": [{"type": "input_file"}]}, "input.0.output.0", "reads text only"),
    ],
)
def test_what_cannot_be_read_is_refused_at_its_place(item: dict[str, Any], param: str, part: str):
    with pytest.raises(RequestError, match=part) as refused:
        messages_of(item)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields", [{"input": 5}, {"input": [{}]}, {"input": [{"role": "bot", "content": "x"}]}, {"max_output_tokens": 0}]
)
def test_a_malformed_request_does_not_validate(fields: dict[str, Any]):
    with pytest.raises(ValidationError):
        request(**fields)


def test_an_empty_conversation_is_refused():
    with pytest.raises(RequestError, match="neither input nor instructions"):
        read_messages(request(input=[]))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
    ],
)
def test_what_needs_state_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(RequestError, match="keeps no responses") as refused:
        refuse_stateful(request(**fields))
    assert refused.value.param == param
    refuse_stateful(request(store=True, include=["reasoning.encrypted_content"], truncation="auto"))


def test_functions_are_shown_in_the_chat_formats_shape():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = [
        {"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": False},
        {"type": "function", "name": "g", "parameters": None, "strict": True},
    ]
    first, second = read_tools(request(tools=tools))
    assert first.raw == {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    assert second.function == {"name": "g", "parameters": {}, "strict": True}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    assert [tool.name for tool in read_tools(request(tools=tools, tool_choice=choice))] == ["g"]


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"type": "custom", "name": "x"}, {"type": "function"}])
def test_tools_that_the_client_does_not_run_are_refused(tool: dict[str, Any]):
    with pytest.raises(RequestError) as refused:
        read_tools(request(tools=[tool]))
    assert (refused.value.param or "").startswith("tools.0")


@pytest.mark.parametrize(
    ("effort", "options"),
    [
        (None, {}),
        ("none", {"enable_thinking": False}),
        ("minimal", {"reasoning_effort": "low"}),
        ("medium", {"reasoning_effort": "high"}),
        ("high", {"reasoning_effort": "high"}),
        ("xhigh", {"reasoning_effort": "max"}),
    ],
)
def test_effort_becomes_a_template_option(effort: str | None, options: dict[str, Any]):
    assert (
        read_template(request(reasoning={"effort": effort}), enable_thinking=True)
        == {"enable_thinking": True} | options
    )


def test_text_formats_become_constraints():
    schema = {"type": "object"}
    named = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    assert read_output(request(text={"format": named})) == JsonConstraint(schema)
    assert read_output(request(text={"format": {"type": "json_object"}})) == JsonConstraint()
    assert read_output(request(text={"format": {"type": "text"}, "verbosity": "low"})) is None
    with pytest.raises(RequestError, match="needs a schema"):
        read_output(request(text={"format": {"type": "json_schema", "name": "answer"}}))


def test_sampling_settings_are_read_and_checked():
    got = read_sampling(request(temperature=0.5, top_p=0.9, max_output_tokens=7))
    assert (got.max_new_tokens, got.temperature, got.top_p) == (7, 0.5, 0.9)
    assert read_sampling(request()).max_new_tokens is None
    with pytest.raises(RequestError, match="temperature"):
        read_sampling(request(temperature=-1))


def builder_of(*, thought_as_summary: bool = False, **fields: Any) -> ResponseBuilder:
    head = envelope(request(**fields), model="m", response_id="resp_ab", created_at_s=1_700_000_000)
    return ResponseBuilder(head, thought_as_summary=thought_as_summary)


def written(builder: ResponseBuilder, size: int, *, is_void: bool = False) -> list[dict[str, Any]]:
    """A thought, text, two calls and text, in pieces of ``size`` characters; ``is_void`` spoils the second call."""

    def pieces(value: str) -> list[str]:
        return [value[start : start + size] for start in range(0, len(value), size)]

    events = builder.start()
    for write, value in ((builder.thinking, "a long thought, naïve 東京"), (builder.text, "Looking 😀.")):
        events += [event for piece in pieces(value) for event in write(piece)]
    for name, arguments in (("f", "{}"), ("g", '{"x": "a\\nb", "n": 2}')):
        events += builder.begin_call(f"call_{name}", name)
        spoiled = is_void and name == "g"
        events += [
            event for piece in pieces(arguments[:-1] if spoiled else arguments) for event in builder.arguments(piece)
        ]
        events += builder.void_call() if spoiled else builder.end_call()
    return events + [event for piece in pieces("Done.") for event in builder.text(piece)]


def final_response(events: list[dict[str, Any]]) -> Response:
    """The response that the official client ends with, having checked every event's place on the way."""
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    last: Any = None
    for event in events:
        last = state.handle_event(EVENT.validate_python(event))[-1]
    return Response.model_validate(last.response.model_dump())


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize("as_summary", [False, True])
def test_the_official_accumulator_puts_together_the_whole_reply(size: int, as_summary: bool):
    builder = builder_of(thought_as_summary=as_summary)
    events = written(builder, size) + builder.end(COUNTS, is_cut=False)
    got = final_response(events)
    assert got.model_dump(exclude_none=True) == Response.model_validate(builder.whole).model_dump(exclude_none=True)
    thought, said, first, second, last = got.output
    assert thought.type == "reasoning"
    texts = [part.text for part in (thought.summary if as_summary else thought.content or [])]
    assert texts == ["a long thought, naïve 東京"]
    assert [item.type for item in (said, first, second, last)] == [
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert got.output_text == "Looking 😀.Done."
    assert first.type == second.type == "function_call"
    assert [json.loads(call.arguments) for call in (first, second)] == [{}, {"x": "a\nb", "n": 2}]
    assert (got.status, got.usage and got.usage.total_tokens) == ("completed", 17)


def test_events_are_numbered_without_gaps_and_deltas_join_to_their_done_event():
    builder = builder_of()
    events = written(builder, 3) + builder.end(COUNTS, is_cut=False)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for kind, whole in (("output_text", "text"), ("reasoning_text", "text"), ("function_call_arguments", "arguments")):
        joined: dict[str, str] = {}
        for event in events:
            if event["type"] == f"response.{kind}.delta":
                joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
        done = {event["item_id"]: event[whole] for event in events if event["type"] == f"response.{kind}.done"}
        assert joined == done
        assert joined


def test_a_cut_reply_is_incomplete_and_so_is_its_last_item():
    builder = builder_of()
    events = [*builder.start(), *builder.text("Loo"), *builder.end(COUNTS, is_cut=True)]
    assert events[-1]["type"] == "response.incomplete"
    got = Response.model_validate(builder.whole)
    assert (got.status, got.incomplete_details and got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert builder.whole["output"][0]["status"] == "incomplete"


def test_a_failed_reply_keeps_what_came_before():
    builder = builder_of()
    events = [*builder.start(), *builder.text("Loo"), *builder.fail("engine broke")]
    got = EVENT.validate_python(events[-1])
    assert (got.type, got.response.status, got.response.error.message) == ("response.failed", "failed", "engine broke")
    assert got.response.output_text == "Loo"


def test_a_call_that_fails_ends_incomplete_and_is_not_part_of_the_whole_reply():
    builder = builder_of()
    events = written(builder, 3, is_void=True) + builder.end(COUNTS, is_cut=False)
    done = [
        event["item"]
        for event in events
        if event["type"] == "response.output_item.done" and event["item"].get("name") == "g"
    ]
    assert [(item["status"], item["arguments"]) for item in done] == [("incomplete", '{"x": "a\\nb", "n": 2')]
    assert [item.type for item in final_response(events).output] == ["reasoning", "message", "function_call", "message"]


def test_the_response_repeats_what_was_asked():
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    got = Response.model_validate(
        envelope(
            request(
                tools=[{"type": "function", "name": "f", "parameters": {}, "strict": False}],
                tool_choice={"type": "function", "name": "f"},
                text={"format": form},
                reasoning={"effort": "high", "summary": "auto"},
                metadata={"a": "b"},
                parallel_tool_calls=False,
            ),
            model="m",
            response_id="resp_1",
            created_at_s=5,
        )
    )
    assert (got.tools[0].type, got.parallel_tool_calls, got.metadata) == ("function", False, {"a": "b"})
    assert got.text is not None
    assert got.text.format is not None
    assert got.text.format.model_dump(by_alias=True)["schema"] == {"type": "object"}
    assert got.tool_choice.model_dump() == {"name": "f", "type": "function"}  # type: ignore[union-attr]
    assert (got.reasoning and got.reasoning.effort, got.created_at) == ("high", 5)

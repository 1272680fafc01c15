"""Anthropic requests into conversations, and replies into events that Anthropic's own client puts together."""

from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter, ValidationError

from yunque.core.records import Message, ToolCall
from yunque.protocol.anthropic import (
    CountTokensRequest,
    MessagesRequest,
    read_messages,
    read_output,
    read_sampling,
    read_template,
    read_tools,
)
from yunque.protocol.anthropic_reply import ReplyBuilder, signature, usage
from yunque.protocol.errors import RequestError

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
COUNTS = usage(prompt_tokens=10, cached_tokens=4, output_tokens=7, thinking_tokens=2)


def request(**fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 16, "messages": [{"role": "user", "content": "hi"}]}
    return MessagesRequest.model_validate(body | fields)


def messages_of(*messages: dict[str, Any], **fields: Any) -> tuple[Message, ...]:
    return read_messages(request(messages=list(messages), **fields))


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str, **extra: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **extra}


def result(content: Any, **extra: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **extra}


def test_a_string_and_one_text_block_are_the_same_conversation():
    plain = messages_of({"role": "user", "content": "hi"}, system="be brief")
    blocks = messages_of(user(text("hi", cache_control={"type": "ephemeral"})), system=[text("be brief")])
    assert plain == blocks == (Message("system", "be brief"), Message("user", "hi"))


def test_system_blocks_are_joined_by_an_empty_line_without_the_billing_line():
    billing = text("x-anthropic-billing-header: cc_version=2.1.37; cch=fa690;")
    system = [billing, text("You are an agent.", cache_control={"type": "ephemeral", "ttl": "1h"}), text("Rules.")]
    assert messages_of(user(text("hi")), system=system)[0] == Message("system", "You are an agent.\n\nRules.")
    assert messages_of(user(text("hi")), system=[billing]) == (Message("user", "hi"),)


def test_an_assistant_turn_comes_back_as_one_message():
    turn = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm ", "signature": "abc"},
            {"type": "redacted_thinking", "data": "xyz"},
            text("Look"),
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"n": 1, "deep": {"x": [None]}}},
            text("ing."),
        ],
    }
    got = messages_of(user(text("hi")), turn, user(result("1")))[1]
    call = ToolCall("f", {"n": 1, "deep": {"x": [None]}}, "toolu_1")
    assert got == Message("assistant", "Looking.", "hm ", (call,))


def test_consecutive_messages_of_one_role_are_one_turn():
    got = messages_of(
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    )
    assert got == (Message("user", "a\n\nb"), Message("assistant", "cd"), Message("user", "e"))


def test_results_and_text_of_a_user_message_keep_their_order():
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}]}
    blocks = (text("before"), result("one"), result([text("two"), text("lines")]), text("after"), text("it"))
    got = messages_of(user(text("hi")), call, user(*blocks))[2:]
    assert got == (
        Message("user", "before"),
        Message("tool", "one", tool_call_id="toolu_1"),
        Message("tool", "two\nlines", tool_call_id="toolu_1"),
        Message("user", "after\n\nit"),
    )


@pytest.mark.parametrize(
    ("content", "is_error", "shown"),
    [
        ("exit 1", True, "Error: exit 1"),
        ("<tool_use_error>no file</tool_use_error>", True, "<tool_use_error>no file</tool_use_error>"),
        ("exit 1", False, "exit 1"),
        (None, True, "Error"),
        ([], False, ""),
    ],
)
def test_a_failed_result_says_so_once(content: Any, is_error: bool, shown: str):
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}]}
    got = messages_of(user(text("hi")), call, user(result(content, is_error=is_error)))[-1]
    assert got == Message("tool", shown, tool_call_id="toolu_1")


@pytest.mark.parametrize(
    ("messages", "param", "part"),
    [
        ([user(text("see"), {"type": "image", "source": {}})], "messages.0.content.1", "reads text only"),
        ([user({"type": "document", "source": {}})], "messages.0.content.0", "'document' is not supported"),
        ([user(result([{"type": "image"}]))], "messages.0.content.0.content.0", "'image' is not supported"),
        ([user({"type": "thinking", "thinking": "x"})], "messages.0.content.0", "valid: text, tool_result"),
        ([{"role": "assistant", "content": [result("x")]}], "messages.0.content.0", "role 'assistant'"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "messages", "prefill"),
    ],
)
def test_what_cannot_be_read_is_refused_at_its_place(messages: list[Any], param: str, part: str):
    with pytest.raises(RequestError, match=part) as refused:
        messages_of(*messages)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 0}, {"messages": []}, {"messages": [user({"text": "x"})]}, {"messages": [{"role": "bot"}]}],
)
def test_a_malformed_request_does_not_validate(fields: dict[str, Any]):
    with pytest.raises(ValidationError):
        request(**fields)


def test_unknown_fields_are_accepted_everywhere():
    got = request(
        messages=[{"role": "user", "content": [text("hi", citations=None, new_field=1)], "id": "x"}],
        metadata={"user_id": "u", "other": 1},
        service_tier="auto",
        context_management={"edits": []},
        betas=["x"],
        thinking={"type": "enabled", "budget_tokens": 4096, "display": "summarized"},
    )
    assert read_messages(got) == (Message("user", "hi"),)
    assert got.metadata is not None
    assert got.metadata.user_id == "u"


def test_tools_are_shown_in_the_chat_formats_shape():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = [
        {"name": "f", "description": "d", "input_schema": schema, "cache_control": {"type": "ephemeral"}},
        {"type": "custom", "name": "g", "input_schema": {}, "strict": True, "defer_loading": True},
    ]
    first, second = read_tools(request(tools=tools))
    assert first.raw == {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    assert second.function == {"name": "g", "parameters": {}, "strict": True, "defer_loading": True}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"tools": [{"type": "web_search_20260318", "name": "web_search"}]}, "web_search_20260318"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [{"name": " ", "input_schema": {}}]}, "needs a name"),
        ({"tools": [{"name": "f", "input_schema": {}}] * 2}, "'f' is taken"),
        ({"mcp_servers": [{"type": "url", "url": "x"}]}, "mcp_servers"),
    ],
)
def test_tools_that_the_client_does_not_run_are_refused(fields: dict[str, Any], part: str):
    with pytest.raises(RequestError, match=part):
        read_tools(request(**fields))


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"enable_thinking": True}),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}},
            {"enable_thinking": True, "reasoning_effort": "high"},
        ),
        ({"output_config": {"effort": "xhigh"}}, {"enable_thinking": False, "reasoning_effort": "max"}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
    ],
)
def test_thinking_and_effort_become_template_options(fields: dict[str, Any], options: dict[str, Any]):
    assert read_template(request(**fields), enable_thinking=False) == options


def test_sampling_settings_are_read_and_checked():
    got = read_sampling(request(temperature=0.5, top_p=0.9, top_k=20, stop_sequences=["END"]))
    assert (got.max_new_tokens, got.temperature, got.top_p, got.top_k, got.stop) == (16, 0.5, 0.9, 20, ("END",))
    assert read_sampling(request()).temperature == 1.0
    with pytest.raises(RequestError, match="top_p"):
        read_sampling(request(top_p=1.5))


def test_an_output_schema_becomes_a_constraint():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    got = read_output(request(output_config={"format": {"type": "json_schema", "schema": schema}}))
    assert got is not None
    assert got.schema == schema
    assert read_output(request()) is None


def test_counting_needs_no_max_tokens():
    got = CountTokensRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    assert read_messages(got) == (Message("user", "hi"),)


def accumulated(events: list[dict[str, Any]]) -> AnthropicMessage:
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        snapshot = accumulate_event(event=EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers)
    return AnthropicMessage.model_validate(snapshot.model_dump())


def written(builder: ReplyBuilder, size: int, *, is_void: bool = False) -> list[dict[str, Any]]:
    """A thought, text, two calls and text, in pieces of ``size`` characters; ``is_void`` spoils the second call."""

    def pieces(value: str) -> list[str]:
        return [value[start : start + size] for start in range(0, len(value), size)]

    events = builder.start(COUNTS)
    for write, value in ((builder.thinking, "a long thought, naïve 東京"), (builder.text, "Looking 😀.")):
        events += [event for piece in pieces(value) for event in write(piece)]
    for name, arguments in (("f", "{}"), ("g", '{"x": "a\\nb", "n": 2}')):
        events += builder.begin_call(f"toolu_{name}", name)
        spoiled = is_void and name == "g"
        events += [
            event for piece in pieces(arguments[:-1] if spoiled else arguments) for event in builder.arguments(piece)
        ]
        events += builder.void_call() if spoiled else builder.end_call()
    events += [event for piece in pieces("Done.") for event in builder.text(piece)]
    return events + builder.end("tool_use", None, COUNTS)


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize("eager", [(), ("f", "g")])
def test_the_official_accumulator_puts_together_the_whole_reply(size: int, eager: tuple[str, ...]):
    builder = ReplyBuilder("msg_1", "m", eager_tools=eager)
    events = written(builder, size)
    whole = AnthropicMessage.model_validate(builder.whole)
    assert accumulated(events) == whole
    thought, answer, first, second, last = whole.content
    assert thought.type == "thinking"
    assert (thought.thinking, thought.signature) == ("a long thought, naïve 東京", signature(thought.thinking))
    assert answer.type == last.type == "text"
    assert (answer.text, last.text) == ("Looking 😀.", "Done.")
    assert first.type == second.type == "tool_use"
    assert (first.input, second.input) == ({}, {"x": "a\nb", "n": 2})
    assert (first.id, second.id, whole.stop_reason) == ("toolu_f", "toolu_g", "tool_use")


def test_blocks_open_and_close_in_order_with_their_index():
    events = written(ReplyBuilder("msg_1", "m"), 4)
    assert [event["type"] for event in events[:1] + events[-2:]] == ["message_start", "message_delta", "message_stop"]
    marks = [
        (event["type"], event["index"])
        for event in events
        if event["type"] in ("content_block_start", "content_block_stop")
    ]
    assert marks == [(f"content_block_{mark}", index) for index in range(5) for mark in ("start", "stop")]


def test_a_held_call_that_fails_was_never_shown():
    builder = ReplyBuilder("msg_1", "m")
    events = written(builder, 3, is_void=True)
    assert "toolu_g" not in str(events)
    assert accumulated(events) == AnthropicMessage.model_validate(builder.whole)
    assert [block["type"] for block in builder.whole["content"]] == ["thinking", "text", "tool_use", "text"]


def test_an_eager_call_that_fails_is_left_unfinished_and_out_of_the_whole_reply():
    builder = ReplyBuilder("msg_1", "m", eager_tools=("g",))
    events = written(builder, 3, is_void=True)
    arguments = "".join(
        event["delta"].get("partial_json", "")
        for event in events
        if event["type"] == "content_block_delta" and event["index"] == 3
    )
    assert arguments == '{"x": "a\\nb", "n": 2'
    assert [block["type"] for block in builder.whole["content"]] == ["thinking", "text", "tool_use", "text"]


def test_input_tokens_are_those_that_were_not_cached():
    assert (COUNTS["input_tokens"], COUNTS["cache_read_input_tokens"], COUNTS["output_tokens"]) == (6, 4, 7)
    start = ReplyBuilder("msg_1", "m").start(COUNTS)[0]["message"]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"], start["output_tokens"]) == (6, 4, 0)

"""``/v1/chat/completions`` over a scripted engine."""

import json
from typing import Any

import pytest

from yunque.core.records import Message
from yunque.protocol.generation import JsonConstraint, RegexConstraint, ToolConstraint
from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .servers import events, serve

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "Paris?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALLS = (
    "need it</think>Looking."
    '<tool_call>get_weather<arg_key>city</arg_key><arg_value>Pa"r\nis</arg_value></tool_call>'
    "<tool_call>get_weather<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><|observation|>"
)


def accumulate(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that a stream's chunks add up to."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", ()):
                kept = message["tool_calls"].setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                kept["id"] += call.get("id", "")
                kept["name"] += call["function"].get("name", "")
                kept["arguments"] += call["function"].get("arguments", "")
            message["finish_reason"] = choice["finish_reason"]
    return message


def test_a_whole_reply_has_thought_text_calls_and_usage(renderer: Renderer) -> None:
    served = serve(renderer, CALLS)
    body = served.post(PATH, {"messages": USER, "tools": [TOOL], "model": "scripted"}).json()
    (choice,) = body["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("need it", "Looking.")
    assert choice["finish_reason"] == "tool_calls"
    arguments = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert arguments == [{"city": 'Pa"r\nis'}, {"days": 2}]
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    prompt, made = len(served.engine.requests[0].tokens), len(served.ids(CALLS))
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
        "completion_tokens_details": {"reasoning_tokens": len(served.ids("need it</think>"))},
    }
    assert (body["object"], body["model"]) == ("chat.completion", "scripted")


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_a_stream_adds_up_to_the_whole_reply(renderer: Renderer, chunk: int) -> None:
    request = {"messages": USER, "tools": [TOOL]}
    whole = serve(renderer, CALLS).post(PATH, request).json()["choices"][0]
    response = serve(renderer, CALLS, chunk=chunk).post(PATH, {**request, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert {entry["object"] for entry in chunks} == {"chat.completion.chunk"}
    assert len({entry["id"] for entry in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("usage" not in entry for entry in chunks)
    message = accumulate(chunks)
    assert message["content"] == whole["message"]["content"]
    assert message["reasoning_content"] == whole["message"]["reasoning_content"]
    assert message["finish_reason"] == whole["finish_reason"]
    streamed = [(call["name"], call["arguments"]) for _, call in sorted(message["tool_calls"].items())]
    assert streamed == [tuple(call["function"].values()) for call in whole["message"]["tool_calls"]]
    assert all(call["id"].startswith("call_") for call in message["tool_calls"].values())


def test_usage_comes_before_the_end_where_asked_for(renderer: Renderer) -> None:
    served = serve(renderer, "a</think>b<|user|>")
    request = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(served.post(PATH, request))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(served.ids("a</think>b<|user|>"))
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_and_logprobs_are_one_per_sampled_token(renderer: Renderer, stream: bool) -> None:
    served = serve(renderer, CALLS, chunk=3)
    request = {
        "messages": USER,
        "tools": [TOOL],
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "stream": stream,
    }
    response = served.post(PATH, request)
    bodies = events(response) if stream else [response.json()]
    choices = [choice for body in bodies for choice in body["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids", ())]
    entries = [e for choice in choices if choice.get("logprobs") for e in choice["logprobs"]["content"]]
    assert ids == served.ids(CALLS)
    assert [entry["logprob"] for entry in entries] == [-(i + 1) / 4 for i in range(len(ids))]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == CALLS
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    assert [b["prompt_token_ids"] for b in bodies if "prompt_token_ids" in b] == [
        list(served.engine.requests[0].tokens)
    ]
    versions = [version for choice in choices for version in choice.get("weight_versions", ())]
    assert versions == [1] * len(ids)


def test_several_choices_have_seeds_of_their_own_and_count_the_prompt_once(renderer: Renderer) -> None:
    served = serve(renderer, "a</think>one<|user|>", "a</think>two!<|user|>", "a</think>x<|user|>")
    body = served.post(PATH, {"messages": USER, "n": 3, "seed": 10}).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["one", "two!", "x"]
    assert [request.sampling.seed for request in served.engine.requests] == [10, 11, 12]
    assert body["usage"]["prompt_tokens"] == len(served.engine.requests[0].tokens)
    served = serve(renderer, "a</think>one<|user|>", "a</think>two!<|user|>", "a</think>x<|user|>")
    chunks = events(served.post(PATH, {"messages": USER, "n": 3, "stream": True}))
    assert [accumulate(chunks, index)["content"] for index in range(3)] == ["one", "two!", "x"]


def test_a_reply_cut_by_length_says_length(renderer: Renderer) -> None:
    served = serve(renderer, "a</think>one two three<|user|>")
    for name in ("max_tokens", "max_completion_tokens"):
        body = served.post(PATH, {"messages": USER, name: 4}).json()
        assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 4)


@pytest.mark.parametrize("stop", ["END", ["zzz", "END"]])
def test_stop_strings_are_cut_and_named(renderer: Renderer, stop: Any) -> None:
    served = serve(renderer, "a</think>one END two<|user|>")
    (choice,) = served.post(PATH, {"messages": USER, "stop": stop}).json()["choices"]
    assert (choice["message"]["content"].rstrip(), choice["finish_reason"]) == ("one", "stop")
    assert choice["stop_reason"] == "END"
    chunks = events(served.post(PATH, {"messages": USER, "stop": stop, "stream": True}))
    assert accumulate(chunks)["content"].rstrip() == "one"


def test_fields_reach_the_engine(renderer: Renderer) -> None:
    served = serve(renderer, "</think>x<|user|>")
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "presence_penalty": 0.5}
    request = {"messages": USER, **sampling, "logit_bias": {"5": -2}, "min_tokens": 2, "priority": 4, "unknown": [1]}
    assert served.post(PATH, {**request, "prompt_cache_key": "k"}).status_code == 200
    assert served.post(PATH, {**request, "prompt_cache_key": "k"}, headers={"x-session-id": "s"}).status_code == 200
    first, second = served.engine.requests
    assert {name: getattr(first.sampling, name) for name in sampling} == sampling
    assert (first.sampling.logit_bias, first.sampling.min_new_tokens) == ({5: -2.0}, 2)
    assert (first.session, second.session, first.priority) == ("k", "s", -4)


def test_formats_and_choices_become_constraints(renderer: Renderer) -> None:
    served = serve(renderer, "</think>{}<|user|>")
    schema = {"type": "object"}
    json_schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"response_format": {"type": "json_object"}}, JsonConstraint()),
        ({"response_format": json_schema}, JsonConstraint(schema)),
        ({"response_format": json_schema, "tools": [TOOL], "tool_choice": "none"}, JsonConstraint(schema)),
        ({"structured_outputs": {"regex": "a+"}}, RegexConstraint("a+")),
        ({"tools": [TOOL]}, None),
    ]
    for fields, constraint in cases:
        assert served.post(PATH, {"messages": USER, **fields}).status_code == 200
        assert served.engine.requests[-1].sampling.constraint == constraint
    for choice, parallel in (("required", True), (named, False)):
        assert served.post(PATH, {"messages": USER, "tools": [TOOL], "tool_choice": choice}).status_code == 200
        constraint = served.engine.requests[-1].sampling.constraint
        assert isinstance(constraint, ToolConstraint)
        assert (constraint.required, constraint.parallel) == (True, parallel)


def test_thinking_is_switched_per_request_and_by_the_server(renderer: Renderer) -> None:
    message = (Message("user", "Paris?"),)
    on = renderer.render(message, add_generation_prompt=True).tokens
    off = renderer.render(message, add_generation_prompt=True, enable_thinking=False).tokens
    served = serve(renderer, "x<|user|>")
    quiet = serve(renderer, "x<|user|>", settings=ServeSettings(enable_thinking=False))
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    for app, fields, prompt in (
        (served, {}, on),
        (served, kwargs, off),
        (served, {"reasoning_effort": "none"}, off),
        (served, {"thinking": {"type": "disabled"}}, off),
        (quiet, {}, off),
        (quiet, {"thinking": {"type": "enabled"}}, on),
    ):
        assert app.post(PATH, {"messages": USER, **fields}).status_code == 200
        assert app.engine.requests[-1].tokens == prompt
    (choice,) = served.post(PATH, {"messages": USER, **kwargs}).json()["choices"]
    assert (choice["message"]["content"], "reasoning_content" in choice["message"]) == ("x", False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "messages"),
        ({"messages": [1]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"functions": [{}]}, "functions"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs"),
        ({"seed": 2**70}, "seed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_a_400_that_names_it(
    renderer: Renderer, fields: dict[str, Any], param: str, stream: bool
) -> None:
    served = serve(renderer, "x")
    response = served.post(PATH, {"messages": USER, "stream": stream, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert served.engine.requests == []


def test_the_codes_that_clients_act_on(renderer: Renderer) -> None:
    served = serve(renderer, "x", max_model_len=50)
    response = served.post(PATH, {"messages": [{"role": "user", "content": "x " * 200}]})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    response = served.post(PATH, {"messages": USER, "model": "other"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    full = serve(renderer, "x", max_live=0, retry_after_s=2.5)
    response = full.post(PATH, {"messages": USER, "stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["code"] == "rate_limit_exceeded"


def test_a_server_may_answer_to_any_name(renderer: Renderer) -> None:
    served = serve(renderer, "</think>x<|user|>", settings=ServeSettings(accepts_any_model=True))
    assert served.post(PATH, {"messages": USER, "model": "claude-x"}).json()["model"] == "scripted"


def test_one_refused_choice_withdraws_the_others(renderer: Renderer) -> None:
    served = serve(renderer, "x", max_live=2)
    assert served.post(PATH, {"messages": USER, "n": 3}).status_code == 429
    assert (served.engine.pages_used, len(served.engine.aborted)) == (0, 2)


def test_an_engine_that_breaks_is_a_500_or_an_error_event(renderer: Renderer) -> None:
    served = serve(renderer, "a</think>bcd<|user|>")
    served.engine.fails_after = 4
    response = served.post(PATH, {"messages": USER})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
    response = served.post(PATH, {"messages": USER, "stream": True})
    assert response.status_code == 200
    assert '"code":"engine_error"' in response.text
    assert "[DONE]" not in response.text


def test_a_failed_call_is_text_and_counted(renderer: Renderer) -> None:
    served = serve(renderer, "</think><tool_call>nope</tool_call><|user|>")
    for stream in (False, True):
        response = served.post(PATH, {"messages": USER, "tools": [TOOL], "stream": stream})
        assert response.status_code == 200
        message = accumulate(events(response)) if stream else response.json()["choices"][0]["message"]
        assert message["content"] == "<tool_call>nope</tool_call>"
        assert not message.get("tool_calls")
    assert 'yunque_malformed_total{reason="unknown tool"} 2.0' in served.call("GET", "/metrics").text

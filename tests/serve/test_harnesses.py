"""Requests in the shapes that agent harnesses send, replayed unchanged: each finds in the reply what it acts on."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from yunque.text import Renderer

from .servers import Served, events, serve

REQUESTS = Path(__file__).with_name("requests")
BASH = (
    "I look.</think>Looking."
    "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call><|observation|>"
)
CREATE = (
    "fine</think><tool_call>create_task<arg_key>user_id</arg_key><arg_value>7</arg_value>"
    "<arg_key>title</arg_key><arg_value>t</arg_value></tool_call><|observation|>"
)


def load(name: str) -> dict[str, Any]:
    return json.loads((REQUESTS / f"{name}.json").read_text(encoding="utf-8"))


def replay(served: Served, name: str, **changes: Any) -> httpx.Response:
    request = load(name)
    return served.post(request["path"], {**request["body"], **changes}, headers=request["headers"])


@pytest.mark.parametrize(
    "name", ["mini_swe_agent", "stirrup", "openhands", "tau2_bench", "verifiers_eval", "verifiers_train", "terminus_2"]
)
def test_every_recorded_request_is_answered(renderer: Renderer, name: str) -> None:
    served = serve(renderer, "a</think>b<|user|>")
    assert replay(served, name).status_code == 200
    assert len(served.engine.requests) == 1


def test_mini_swe_agent_words_its_error_by_the_finish_reason(renderer: Renderer) -> None:
    (choice,) = replay(serve(renderer, BASH), "mini_swe_agent").json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"command": "ls"}
    (cut,) = replay(serve(renderer, BASH), "mini_swe_agent", max_tokens=5).json()["choices"]
    assert (cut["finish_reason"], cut["message"].get("tool_calls")) == ("length", None)


def test_stirrup_recovers_on_the_code_of_a_full_context(renderer: Renderer) -> None:
    served = serve(renderer, "x", max_model_len=40)
    response = replay(served, "stirrup")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_stirrups_text_parts_are_the_text(renderer: Renderer) -> None:
    served = serve(renderer, "a</think>b<|user|>")
    replay(served, "stirrup")
    messages = load("stirrup")["body"]["messages"]
    plain = [{**message, "content": message["content"][0]["text"]} for message in messages]
    replay(served, "stirrup", messages=plain)
    first, second = served.engine.requests
    assert first.tokens == second.tokens
    assert first.sampling.max_new_tokens == 64_000


def test_openhands_history_without_thoughts_and_with_tool_names(renderer: Renderer) -> None:
    served = serve(renderer, "a</think>b<|user|>")
    body = replay(served, "openhands").json()
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    (request,) = served.engine.requests
    assert (request.session, request.sampling.seed, request.sampling.max_new_tokens) == ("conversation-1", 42, 8192)
    assert "1 failed" in renderer.tokenizer.decode(request.tokens)


def test_tau2_null_content_with_calls_and_a_schema_with_references(renderer: Renderer) -> None:
    served = serve(renderer, CREATE)
    (choice,) = replay(served, "tau2_bench").json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"user_id": "7", "title": "t"}, "declared text stays text"
    assert choice["message"]["content"] is None
    (request,) = served.engine.requests
    assert "None" not in renderer.tokenizer.decode(request.tokens)
    history = [*load("tau2_bench")["body"]["messages"], choice["message"]]
    replay(served, "tau2_bench", messages=[*history, {"role": "tool", "content": "ok", "tool_call_id": call["id"]}])
    sampled = served.ids(CREATE)
    assert served.engine.requests[1].tokens[: len(request.tokens) + len(sampled)] == (*request.tokens, *sampled)


def test_verifiers_null_harness_streams_with_usage(renderer: Renderer) -> None:
    chunks = events(replay(serve(renderer, BASH, chunk=2), "verifiers_eval"))
    calls = [call for chunk in chunks for c in chunk["choices"] for call in c["delta"].get("tool_calls", ())]
    assert {call["index"] for call in calls} == {0}
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"command": "ls"}
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def test_verifiers_train_client_extends_its_prompt_token_by_token(renderer: Renderer) -> None:
    """The client's own checks of a reply, and a second turn that begins with what the first one held."""
    served = serve(renderer, BASH, "done</think>4<|user|>")
    request = load("verifiers_train")
    body = replay(served, "verifiers_train").json()
    (choice,) = body["choices"]
    ids, entries = choice["token_ids"], choice["logprobs"]["content"]
    assert len(ids) == len(entries)
    for token, entry in zip(ids, entries, strict=True):
        assert entry["token"] == f"token_id:{token}"
        assert isinstance(entry["logprob"], float)
        assert entry["logprob"] <= 0
        assert entry["logprob"] != -9999.0
    tail = served.ids("<tool_response>4</tool_response><|assistant|><think>")
    second = replay(served, "verifiers_train", token_ids=[*request["body"]["token_ids"], *ids, *tail])
    assert second.json()["choices"][0]["token_ids"] == served.ids("done</think>4<|user|>")
    first_sent, second_sent = served.engine.requests
    assert second_sent.tokens[: len(first_sent.tokens) + len(ids)] == (*first_sent.tokens, *ids)
    assert (first_sent.session, second_sent.session) == ("rollout-17", "rollout-17")


def test_terminus_2_collects_ids_and_one_logprob_each(renderer: Renderer) -> None:
    served = serve(renderer, 'a</think>{"plan": "ls"}<|user|>')
    body = replay(served, "terminus_2").json()
    (choice,) = body["choices"]
    assert body["prompt_token_ids"] == list(served.engine.requests[0].tokens)
    assert choice["token_ids"] == served.ids('a</think>{"plan": "ls"}<|user|>')
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == body["usage"]["completion_tokens"]

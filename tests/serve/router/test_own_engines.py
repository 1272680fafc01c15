"""A router in front of Yunque's own servers: replies outlive their engine token for token, whatever shapes them."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from router_engines import CLIENT, until
from router_engines import Served as Routed

from yunque.serve.router.health import HeartbeatSettings
from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from ..servers import Served, listening, serve
from ..test_resuming import CHAT, PLAIN, REPLY, chat_body, read_chat

SLOW = HeartbeatSettings(interval_s=60, timeout_s=5, eject_after=50, backoff_max_s=60)
SHAPED = {"presence_penalty": 0.5, "stop": ["END", "never"]}


@pytest.fixture
def pair(
    renderer: Renderer, router: Callable[..., Routed]
) -> Iterator[Callable[..., tuple[str, list[Served], list[str]]]]:
    """Makes two servers that play a reply, and a router in front of them."""
    with contextlib.ExitStack() as stack:

        def make(reply: str, **script: Any) -> tuple[str, list[Served], list[str]]:
            settings = ServeSettings(port=0, admin_key="adm")
            servers = [serve(renderer, reply, settings=settings, **script) for _ in range(2)]
            urls = [stack.enter_context(listening(served)) for served in servers]
            return router(*urls, heartbeat=SLOW).url, servers, urls

        yield make


def ask(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, or the whole reply as the only one."""
    response = CLIENT.post(f"{url}{path}", json=body, headers={"x-session-id": "s"})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return [response.json()]
    found = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert found.pop() == "[DONE]"
    return [json.loads(data) for data in found]


def used(servers: list[Served]) -> Served:
    """The server that had the session's request."""
    (one,) = [served for served in servers if served.engine.requests]
    return one


def sglang(found: list[dict[str, Any]], *, incremental: bool) -> dict[str, Any]:
    parts = found if incremental else found[-1:]
    columns = ("output_token_logprobs", "weight_versions")
    joined = {name: [entry for part in parts for entry in part["meta_info"][name]] for name in columns}
    meta = found[-1]["meta_info"]
    joined |= {name: meta[name] for name in ("finish_reason", "prompt_tokens", "completion_tokens")}
    ids = [token for part in parts for token in part["output_ids"]]
    return {"ids": ids, "text": "".join(part["text"] for part in parts), **joined}


@pytest.mark.parametrize("how", ["whole", "cumulative", "incremental"])
@pytest.mark.parametrize("at", [1, 4, 7])
def test_generate_with_penalties_and_stop_strings_goes_on_where_the_engine_broke(pair, how, at):
    url, servers, _ = pair(PLAIN)
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 60, **SHAPED}, "return_logprob": True}
    body |= {"stream": how != "whole", "incremental_streaming_output": how == "incremental"}
    incremental = how == "incremental"
    alone = sglang(ask(url, "/generate", body), incremental=incremental)
    assert alone["finish_reason"] == {"type": "stop", "matched": "END"}
    assert (alone["text"], alone["completion_tokens"]) == (PLAIN.partition("END")[0], len(alone["ids"]))
    first = used(servers)
    first.engine.fails_after = at
    found = ask(url, "/generate", body)
    assert sglang(found, incremental=incremental) == alone
    (other,) = [served for served in servers if served is not first]
    (resumed,) = other.engine.requests
    assert (resumed.tokens, resumed.reply_start) == ((5, 6, 7, *alone["ids"][:at]), 3)
    assert (resumed.sampling.max_new_tokens, resumed.sampling.presence_penalty) == (60, 0.5)
    assert [part["tokens"] for part in found[-1]["meta_info"]["parts"]] == [at, len(alone["ids"]) - at]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at", [1, 7])
def test_vllm_s_endpoint_goes_on_with_a_constraint_and_kept_sets(pair, stream, at):
    url, servers, _ = pair(PLAIN)
    sampling = {"max_tokens": 60, "logprobs": 2, "record_kept": True, "structured_outputs": {"regex": ".*"}, **SHAPED}
    body = {"token_ids": [5, 6], "sampling_params": sampling, "stream": stream}

    def read(found: list[dict[str, Any]]) -> dict[str, Any]:
        choices = [choice for event in found for choice in event["choices"]]
        columns = ("token_ids", "weight_versions", "sampling_mask")
        joined = {name: [entry for choice in choices for entry in choice[name]] for name in columns}
        joined["entries"] = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        return joined | {"finish": choices[-1]["finish_reason"]}

    alone = read(ask(url, "/inference/v1/generate", body))
    first = used(servers)
    first.engine.fails_after = at
    found = ask(url, "/inference/v1/generate", body)
    assert read(found) == alone
    assert alone["finish"] == "stop"
    assert [part["tokens"] for part in found[-1]["parts"]] == [at, len(alone["token_ids"]) - at]
    assert [part["weight_version"] for part in found[-1]["parts"]] == [1, 1]
    if not stream:
        assert found[0]["usage"]["completion_tokens"] == len(alone["token_ids"])
        assert found[0]["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("asks_ids", [True, False])
@pytest.mark.parametrize("at", [1, 11, 30])
def test_a_streamed_chat_goes_on_through_thought_text_and_call(pair, asks_ids, at):
    url, servers, _ = pair(REPLY)
    body = chat_body(stream=True, return_token_ids=asks_ids, **SHAPED)
    alone = read_chat(ask(url, CHAT, body))
    first = used(servers)
    first.engine.fails_after = at
    assert read_chat(ask(url, CHAT, body)) == alone
    assert alone["calls"] == '{"at": "京 sky"}'
    (other,) = [served for served in servers if served is not first]
    assert [len(request.tokens) - request.num_prompt for request in other.engine.requests] == [at]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("how", ["drain", "pause"])
def test_a_text_that_is_handed_back_goes_on(pair, path, how):
    """A draining engine leaves it to the other one; a paused one has it back when it is resumed."""
    url, servers, urls = pair(REPLY, delay_s=0.01)
    body = {"prompt": "a", "max_tokens": 500} | chat_body(stream=True, logprobs=None)
    alone = ask(url, path, body)
    first = used(servers)
    at = urls[servers.index(first)]
    found: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: found.extend(ask(url, path, body)))
    asking.start()
    until(lambda: any(len(reply._made) >= 5 for reply in list(first.engine.live.values())))
    if how == "drain":
        admin(at, "drain", {"timeout_s": 0})
    else:
        admin(at, "pause", {"mode": "abort"})
        until(lambda: len(first.engine.requests) == 3)
        admin(at, "resume", {})
    asking.join(20)
    ids = [token for event in found for choice in event["choices"] for token in choice.get("token_ids", [])]
    assert ids == first.ids(REPLY)
    assert texts(found) == texts(alone)
    assert len({event["id"] for event in found}) == 1
    reasons = [(c["finish_reason"], c.get("stop_reason")) for event in found for c in event["choices"]]
    assert [reason for reason in reasons if reason[0]] == [("tool_calls" if path == CHAT else "stop", None)]
    (other,) = [served for served in servers if served is not first]
    assert (len(other.engine.requests), len(first.engine.requests)) == ((1, 2) if how == "drain" else (0, 3))


def admin(url: str, name: str, body: dict[str, Any]) -> None:
    assert CLIENT.post(f"{url}/admin/{name}", json=body, headers={"authorization": "Bearer adm"}).status_code == 200


def texts(found: list[dict[str, Any]]) -> str:
    choices = [choice for event in found for choice in event["choices"]]
    deltas = [choice.get("delta") or {"content": choice.get("text", "")} for choice in choices]
    return "".join(delta.get("reasoning_content", "") + (delta.get("content") or "") for delta in deltas)

"""Replies that begin with given ids, replies that are handed back, events that carry only what is new."""

from typing import Any

import pytest

from yunque.text import Renderer

from .servers import events, serve

CHAT, TEXT, SGLANG, VLLM = "/v1/chat/completions", "/v1/completions", "/generate", "/inference/v1/generate"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}]
CALL = "<tool_call>look<arg_key>at</arg_key><arg_value>京 sky</arg_value></tool_call>"
REPLY = f"it is é 東</think>See: {CALL}<|observation|>"
PLAIN = "naïve café 東京 END of it<|user|>"


def chat_body(**more: Any) -> dict[str, Any]:
    fields = {"return_token_ids": True, "logprobs": True, "tools": TOOLS}
    return {"messages": [{"role": "user", "content": "hello"}], **fields, **more}


def read_chat(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream."""
    seen: dict[str, Any] = {"ids": [], "versions": [], "entries": 0, "calls": "", "text": "", "thought": ""}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice["delta"]
        seen["ids"] += choice.get("token_ids", [])
        seen["versions"] += choice.get("weight_versions", [])
        seen["entries"] += len((choice.get("logprobs") or {}).get("content", []))
        seen["text"] += delta.get("content") or ""
        seen["thought"] += delta.get("reasoning_content", "")
        seen["calls"] += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", []))
        seen["finish"] = (choice["finish_reason"], choice.get("stop_reason"))
    return seen


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_chat_shows_the_given_beginning_and_goes_on(renderer: Renderer, chunk: int) -> None:
    served = serve(renderer, REPLY, chunk=chunk)
    ids = served.ids(REPLY)
    whole = read_chat(events(served.post(CHAT, chat_body(stream=True))))
    assert (whole["ids"], whole["calls"]) == (ids, '{"at": "京 sky"}')
    prompt = served.engine.requests[0].tokens
    for cut in range(1, len(ids) + 1):
        resumed = {"resume_token_ids": ids[:cut], "max_tokens": len(ids)}
        found = read_chat(events(served.post(CHAT, chat_body(stream=True, **resumed))))
        made = served.engine.requests[-1]
        assert (made.tokens, made.reply_start) == ((*prompt, *ids[:cut]), len(prompt))
        assert made.sampling.max_new_tokens == len(ids)
        assert found.pop("versions") == [None] * cut + [1] * (len(ids) - cut)
        assert found.pop("entries") == len(ids) - cut
        assert found == {key: value for key, value in whole.items() if key not in ("versions", "entries")}
    body = served.post(CHAT, chat_body(resume_token_ids=ids[:4])).json()
    (choice,) = body["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (ids, "tool_calls")
    assert choice["message"]["reasoning_content"] == whole["thought"]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (len(prompt), len(ids))
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("stop", [None, "END"])
def test_a_completion_shows_the_given_beginning_and_goes_on(renderer: Renderer, stop: str | None) -> None:
    served = serve(renderer, PLAIN)
    ids = served.ids(PLAIN)
    fields = {"prompt": "a", "stop": stop, "max_tokens": 100, "return_token_ids": True, "logprobs": 0}
    (whole,) = served.post(TEXT, fields).json()["choices"]
    assert whole["text"] == ("naïve café 東京 " if stop else "naïve café 東京 END of it")
    for cut in range(1, len(whole["token_ids"])):
        (found,) = served.post(TEXT, {**fields, "resume_token_ids": ids[:cut]}).json()["choices"]
        assert (found["text"], found["token_ids"]) == (whole["text"], whole["token_ids"])
        assert found["logprobs"]["token_logprobs"] == whole["logprobs"]["token_logprobs"][cut:]
        chunks = events(served.post(TEXT, {**fields, "resume_token_ids": ids[:cut], "stream": True}))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]


def test_a_beginning_that_ends_the_reply_asks_for_nothing_more(renderer: Renderer) -> None:
    served = serve(renderer, "x" * 50)
    ids = served.ids("xy<|user|>")
    fields = {"prompt": "a", "max_tokens": 100, "resume_token_ids": ids, "return_token_ids": True}
    (choice,) = served.post(TEXT, fields).json()["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("xy", ids, "stop")
    own = {**fields, "stop_token_ids": [ids[1]], "resume_token_ids": ids[:2]}
    assert served.post(TEXT, own).json()["choices"][0]["text"] == "x"
    (choice,) = served.post(TEXT, {**fields, "max_tokens": 2, "resume_token_ids": ids[:2]}).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("xy", "length")
    chunks = events(served.post(CHAT, chat_body(resume_token_ids=ids, stream=True, tools=None)))
    assert read_chat(chunks)["thought"] == "xy"


@pytest.mark.parametrize("stream", [False, True])
def test_token_endpoints_answer_what_follows_the_given_beginning(renderer: Renderer, stream: bool) -> None:
    served = serve(renderer, PLAIN)
    ids = served.ids(PLAIN)
    sampling = {"max_new_tokens": 90, "presence_penalty": 0.5, "stop": ["never"]}
    body = {"input_ids": [5, 6], "sampling_params": sampling, "return_logprob": True, "stream": stream}
    for cut in range(1, len(ids)):
        response = served.post(SGLANG, {**body, "resume_token_ids": ids[:cut]})
        found = events(response)[-1] if stream else response.json()
        meta = found["meta_info"]
        assert found["output_ids"] == ids[cut:]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == len(ids) - cut
        assert (meta["prompt_tokens"], meta["cached_tokens"]) == (2, min(2, (2 + cut) // 2))
        before = served.post(SGLANG, {**body, "stream": False, "sampling_params": {"max_new_tokens": cut}}).json()
        assert (before["text"] + found["text"]).replace("�", "") == PLAIN.removesuffix("<|user|>")
    fields = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 90}, "resume_token_ids": ids[:3]}
    assert served.post(VLLM, fields).json()["choices"][0]["token_ids"] == ids[3:]
    assert served.engine.requests[-1].reply_start == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body(n=2, resume_token_ids=[1])),
        (CHAT, chat_body(resume_token_ids=[10**6])),
        (TEXT, {"prompt": ["a", "b"], "resume_token_ids": [1]}),
        (TEXT, {"prompt": "a", "echo": True, "resume_token_ids": [1]}),
        (TEXT, {"prompt": "a", "resume_token_ids": ["a"]}),
        (SGLANG, {"input_ids": [1], "sampling_params": {"n": 2}, "resume_token_ids": [1]}),
        (SGLANG, {"input_ids": [[1], [2]], "resume_token_ids": [1]}),
        (VLLM, {"token_ids": [1], "sampling_params": {"n": 2}, "resume_token_ids": [1]}),
    ],
)
def test_only_one_reply_is_resumed_and_only_from_ids(renderer: Renderer, path: str, body: dict[str, Any]) -> None:
    response = serve(renderer, "x").post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "resume_token_ids")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body()),
        (TEXT, {"prompt": "a"}),
        (SGLANG, {"input_ids": [1]}),
        (VLLM, {"token_ids": [1]}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
def test_the_cache_salt_reaches_the_engine(renderer: Renderer, path: str, body: dict[str, Any]) -> None:
    served = serve(renderer, REPLY)
    assert served.post(path, {**body, "cache_salt": "tenant-1"}).status_code == 200
    assert served.post(path, body).status_code == 200
    assert [request.cache_salt for request in served.engine.requests] == ["tenant-1", None]


def test_a_reply_that_is_handed_back_says_so_beside_its_finish(renderer: Renderer) -> None:
    served = serve(renderer, REPLY)
    served.engine.hands_back_after = 5
    (choice,) = served.post(CHAT, chat_body()).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], len(choice["token_ids"])) == ("length", "partial", 5)
    assert read_chat(events(served.post(CHAT, chat_body(stream=True))))["finish"] == ("length", "partial")
    (choice,) = served.post(TEXT, {"prompt": "a"}).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "partial")
    last = events(served.post(TEXT, {"prompt": "a", "stream": True}))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("length", "partial")
    served = serve(renderer, REPLY)
    assert served.post(CHAT, chat_body(max_tokens=5)).json()["choices"][0]["stop_reason"] is None


@pytest.mark.parametrize("chunk", [1, 2, 9])
def test_incremental_events_of_generate_join_to_the_whole_reply(renderer: Renderer, chunk: int) -> None:
    served = serve(renderer, PLAIN, chunk=chunk)
    sampling = {"max_new_tokens": 90, "record_kept": True}
    body = {"input_ids": [1, 2, 3], "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    body |= {"sampling_params": sampling}
    whole = served.post(SGLANG, body).json()
    found = events(served.post(SGLANG, {**body, "stream": True, "incremental_streaming_output": True}))
    ids = [len(event["output_ids"]) for event in found]
    assert max(ids) <= chunk
    assert [event["meta_info"]["completion_tokens"] for event in found] == [sum(ids[: i + 1]) for i in range(len(ids))]
    assert [token for event in found for token in event["output_ids"]] == whole["output_ids"]
    assert "".join(event["text"] for event in found) == whole["text"]
    for name in ("output_token_logprobs", "output_top_logprobs", "output_kept_tokens", "weight_versions"):
        assert [entry for event in found for entry in event["meta_info"][name]] == whole["meta_info"][name]
    assert found[0]["meta_info"]["input_token_logprobs"] == whole["meta_info"]["input_token_logprobs"]
    assert {event["meta_info"]["cached_tokens"] for event in found} == {whole["meta_info"]["cached_tokens"]}
    assert found[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


@pytest.mark.parametrize("chunk", [1, 2, 9])
def test_the_events_of_vllm_s_endpoint_join_to_the_whole_reply(renderer: Renderer, chunk: int) -> None:
    served = serve(renderer, PLAIN, chunk=chunk)
    sampling = {"max_tokens": 90, "logprobs": 2, "prompt_logprobs": 1, "record_kept": True, "n": 2}
    body = {"token_ids": [1, 2, 3], "sampling_params": sampling, "return_token_ids": True, "request_id": "r"}
    whole = served.post(VLLM, body).json()
    found = events(served.post(VLLM, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    assert {event["request_id"] for event in found} == {"r"}
    assert (found[-1]["choices"], found[-1]["usage"]) == ([], whole["usage"])
    assert found[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert found[0]["prompt_token_ids"] == [1, 2, 3]
    for index, choice in enumerate(whole["choices"]):
        parts = [part for event in found for part in event["choices"] if part["index"] == index]
        for name in ("token_ids", "weight_versions", "sampling_mask"):
            assert [entry for part in parts for entry in part[name]] == choice[name]
        assert [entry for part in parts for entry in part["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"] == "stop"
        assert {part["finish_reason"] for part in parts[:-1]} <= {None}

"""SGLang's and vLLM's token endpoints, in the shapes that their clients check."""

from itertools import pairwise

import pytest

from yunque.protocol.generation import JsonConstraint, RegexConstraint
from yunque.text import Renderer

from .servers import events, serve

REPLY = "yz<|observation|>"


def test_sglang_reply_to_the_letter(renderer: Renderer) -> None:
    served = serve(renderer, REPLY)
    ids = served.ids(REPLY)
    request = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"temperature": 0.8, "max_new_tokens": 9, "sampling_seed": 3},
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
        "rid": "r1",
    }
    body = served.post("/generate", request).json()
    meta = body["meta_info"]
    assert (body["text"], body["output_ids"]) == ("yz", ids)
    assert meta["finish_reason"] == {"type": "stop", "matched": ids[-1]}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (
        "r1",
        3,
        len(ids),
        1,
    )
    assert meta["output_token_logprobs"] == [[-(i + 1) / 8, token, None] for i, token in enumerate(ids)]
    assert meta["input_token_logprobs"] == [[-1 / 16, 6, None], [-2 / 16, 7, None]]
    assert [[entry[1] for entry in row] for row in meta["output_top_logprobs"]] == [[token, 0] for token in ids]
    assert meta["weight_version"] == "1"
    assert (served.engine.requests[0].sampling.seed, served.engine.requests[0].sampling.max_new_tokens) == (3, 9)


def test_sglang_text_length_and_defaults(renderer: Renderer) -> None:
    served = serve(renderer, rule=lambda _: [65] * 500)
    body = served.post("/generate", {"text": "a", "return_logprob": True, "return_text_in_logprobs": True}).json()
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 128}
    assert body["meta_info"]["input_token_logprobs"] == []
    assert body["meta_info"]["output_token_logprobs"][0] == [-1 / 8, 65, renderer.tokenizer.decode([65])]
    assert served.engine.requests[0].tokens == tuple(served.ids("a"))
    assert "output_token_logprobs" not in served.post("/generate", {"text": "a"}).json()["meta_info"]


def test_sglang_lists_give_lists(renderer: Renderer) -> None:
    served = serve(renderer, REPLY)
    bodies = served.post("/generate", {"input_ids": [[1], [2, 3]], "rid": ["a", "b"]}).json()
    assert [body["meta_info"]["id"] for body in bodies] == ["a", "b"]
    assert [body["meta_info"]["prompt_tokens"] for body in bodies] == [1, 2]
    assert len(served.post("/generate", {"input_ids": [1], "sampling_params": {"n": 3}}).json()) == 3


@pytest.mark.parametrize("chunk", [1, 2, 9])
def test_a_sglang_stream_is_cumulative(renderer: Renderer, chunk: int) -> None:
    served = serve(renderer, REPLY, chunk=chunk)
    whole = served.post("/generate", {"input_ids": [1], "return_logprob": True}).json()
    found = events(served.post("/generate", {"input_ids": [1], "return_logprob": True, "stream": True}))
    assert [body["output_ids"] for body in found][-1] == whole["output_ids"]
    assert all(a["output_ids"] == b["output_ids"][: len(a["output_ids"])] for a, b in pairwise(found))
    assert found[-1]["text"] == whole["text"]
    assert found[-1]["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]
    reasons = [body["meta_info"]["finish_reason"] for body in found]
    assert reasons[:-1] == [None] * (len(found) - 1)
    assert reasons[-1]["type"] == "stop"


def test_sglang_constraints_stops_and_ignored_eos(renderer: Renderer) -> None:
    served = serve(renderer, "a STOP b<|user|>c")
    fields = {"json_schema": '{"type": "object"}', "stop": ["STOP"], "stop_token_ids": [7], "top_k": -1}
    body = served.post("/generate", {"text": "x", "sampling_params": fields}).json()
    assert (body["text"], body["meta_info"]["finish_reason"]) == ("a ", {"type": "stop", "matched": "STOP"})
    sampling = served.engine.requests[-1].sampling
    assert (sampling.constraint, sampling.top_k) == (JsonConstraint({"type": "object"}), 0)
    assert sampling.stop_ids == frozenset({7, *renderer.tokenizer.special.eos_ids})
    fields = {"regex": "a+", "ignore_eos": True, "skip_special_tokens": False}
    body = served.post("/generate", {"text": "x", "sampling_params": fields}).json()
    assert body["text"] == "a STOP b<|user|>c"
    assert served.engine.requests[-1].sampling.constraint == RegexConstraint("a+")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input_ids"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"text": []}, "text"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"text": "a", "sampling_params": {"json_schema": "[]"}}, "json_schema"),
        ({"text": "a", "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
    ],
)
def test_bad_sglang_requests_name_the_field(renderer: Renderer, body: dict[str, object], param: str) -> None:
    response = serve(renderer, "x").post("/generate", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_vllm_reply_to_the_letter(renderer: Renderer) -> None:
    served = serve(renderer, REPLY, chunk=2)
    ids = served.ids(REPLY)
    request = {
        "model": "scripted",
        "token_ids": [5, 6, 7],
        "sampling_params": {
            "stop_token_ids": [9],
            "logprobs": 1,
            "skip_special_tokens": False,
            "max_tokens": 50,
            "prompt_logprobs": 1,
        },
        "cache_salt": "s",
        "priority": 3,
    }
    body = served.post("/inference/v1/generate", request, headers={"X-Session-ID": "rollout-7"}).json()
    (choice,) = body["choices"]
    assert choice["token_ids"] == ids
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in ids]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-(i + 1) / 8 for i in range(len(ids))]
    assert choice["finish_reason"] == "stop"
    assert body["request_id"]
    assert body["prompt_logprobs"] == [None, {"6": {"logprob": -1 / 16}}, {"7": {"logprob": -2 / 16}}]
    sent = served.engine.requests[0]
    assert (sent.session, sent.priority) == ("rollout-7", -3)
    assert sent.sampling.stop_ids == frozenset({9, *renderer.tokenizer.special.eos_ids})


def test_vllm_without_logprobs_with_many_and_with_kept_sets(renderer: Renderer) -> None:
    served = serve(renderer, REPLY)
    path, ids = "/inference/v1/generate", [5]
    assert served.post(path, {"token_ids": ids}).json()["choices"][0]["logprobs"] is None
    fields = {"logprobs": 3, "n": 2, "record_kept": True}
    body = served.post(path, {"token_ids": ids, "sampling_params": fields, "return_token_ids": True}).json()
    tops = [entry["top_logprobs"] for entry in body["choices"][0]["logprobs"]["content"]]
    assert {len(top) for top in tops} == {3}
    assert all(other["token"].startswith("token_id:") for top in tops for other in top)
    assert (len(body["choices"]), body["prompt_token_ids"]) == (2, ids)
    assert served.engine.requests[-1].sampling.record_kept


def test_vllm_refuses_what_it_cannot_do(renderer: Renderer) -> None:
    served = serve(renderer, REPLY, max_model_len=20)
    path = "/inference/v1/generate"
    assert served.post(path, {"token_ids": [10**6]}).json()["error"]["param"] == "token_ids"
    assert served.post(path, {"token_ids": [1], "model": "x"}).status_code == 404
    assert served.post(path, {"token_ids": [1] * 20}).json()["error"]["code"] == "context_length_exceeded"


def test_models_tokenize_and_detokenize(renderer: Renderer) -> None:
    served = serve(renderer, REPLY, max_model_len=77)
    (card,) = served.call("GET", "/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"], card["object"]) == ("scripted", 77, "model")
    assert served.call("GET", "/v1/models/scripted").json() == card
    assert served.call("GET", "/v1/models/a/b").status_code == 404
    text = "café <|user|> 東京"
    body = served.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert (body["tokens"], body["count"], body["max_model_len"]) == (served.ids(text), len(served.ids(text)), 77)
    assert "<|user|>" in body["token_strs"]
    assert served.post("/detokenize", {"tokens": body["tokens"]}).json()["prompt"] == text
    assert served.post("/detokenize", {"tokens": []}).json()["prompt"] == ""
    messages = [{"role": "user", "content": "hi"}]
    chat = served.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert served.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    assert tuple(chat) == served.engine.requests[-1].tokens
    bare = served.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert chat[: len(bare)] == bare
    for wrong in ({}, {"prompt": "a", "messages": messages}, {"messages": []}):
        assert served.post("/tokenize", wrong).status_code == 400

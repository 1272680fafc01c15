"""Token replies over two engines look like one engine's: ids, log-probabilities, versions, counts."""

from __future__ import annotations

from copy import deepcopy

import pytest

from yunque.serve.router.continuation import CannotContinue, SglangReply, VllmReply, token_reply

PROMPT = [1, 2, 3]


def sglang_body(**sampling) -> dict:
    return {"input_ids": PROMPT, "return_logprob": True, "sampling_params": {"max_new_tokens": 10, **sampling}}


def sglang_event(ids: list[int], *, total: int | None = None, finish=None, version="v1", prompt=3, **meta) -> dict:
    return {
        "text": "".join(chr(96 + token) for token in ids),
        "output_ids": list(ids),
        "meta_info": {
            "id": f"on-{version}",
            "finish_reason": finish and {"type": finish},
            "prompt_tokens": prompt,
            "completion_tokens": len(ids) if total is None else total,
            "cached_tokens": prompt - 1,
            "weight_version": version,
            "output_token_logprobs": [[-token / 8, token, None] for token in ids],
            "output_token_versions": [version for _ in ids],
            **meta,
        },
    }


def undisturbed() -> dict:
    whole = sglang_event([4, 5, 6, 7, 8], finish="length")
    whole["meta_info"]["output_token_versions"] = ["v1", "v1", "v2", "v2", "v2"]
    whole["meta_info"]["weight_version"] = "v2"
    return whole


def without_parts(event: dict) -> dict:
    event = deepcopy(event)
    event["meta_info"].pop("parts", None)
    return event


def test_the_second_engine_is_asked_for_the_rest_with_the_sampled_ids_behind_the_prompt():
    reply = SglangReply(sglang_body(min_new_tokens=4, temperature=0.5) | {"logprob_start_len": 0, "stream": True})
    assert reply.next_body(streams=True) == reply.body
    reply.feed(sglang_event([4, 5]))
    assert reply.next_body(streams=True) == {
        "input_ids": [1, 2, 3, 4, 5],
        "return_logprob": True,
        "stream": True,
        "logprob_start_len": -1,
        "sampling_params": {"max_new_tokens": 8, "min_new_tokens": 2, "temperature": 0.5},
    }


@pytest.mark.parametrize(("sampling", "rest"), [({}, 126), ({"max_new_tokens": None}, None)])
def test_a_limit_that_is_not_said_is_sglangs(sampling, rest):
    reply = SglangReply({"input_ids": PROMPT, "sampling_params": sampling})
    reply.feed(sglang_event([4, 5]))
    assert reply.next_body(streams=False)["sampling_params"].get("max_new_tokens") == rest


def test_cumulative_events_of_two_engines_are_one_reply():
    reply = SglangReply(sglang_body())
    for ids in ([4], [4, 5]):
        event = sglang_event(ids)
        assert reply.feed(event) is event
    reply.next_body(streams=False)
    told = reply.feed(sglang_event([6, 7], version="v2", prompt=5))
    assert told["output_ids"] == [4, 5, 6, 7]
    assert told["text"] == "defg"
    last = reply.feed(sglang_event([6, 7, 8], version="v2", prompt=5, finish="length"))
    assert without_parts(last) == undisturbed()
    assert last["meta_info"]["parts"] == [
        {"tokens": 2, "weight_version": "v1"},
        {"tokens": 3, "weight_version": "v2"},
    ]
    assert reply.is_finished
    assert reply.whole() == last


def test_events_that_carry_what_is_new_stay_so_and_make_the_same_whole():
    reply = SglangReply(sglang_body())
    reply.feed(sglang_event([4], total=1))
    reply.feed(sglang_event([5], total=2))
    reply.next_body(streams=True)
    told = [reply.feed(sglang_event([6], total=1, version="v2")), reply.feed(sglang_event([7], total=2, version="v2"))]
    assert [event["output_ids"] for event in told] == [[6], [7]]
    assert [event["meta_info"]["completion_tokens"] for event in told] == [3, 4]
    reply.feed(sglang_event([8], total=3, version="v2", finish="length"))
    assert without_parts(reply.whole()) == undisturbed()


def test_an_engine_of_the_other_kind_is_told_in_the_first_ones_way():
    reply = SglangReply(sglang_body())
    reply.feed(sglang_event([4], total=1))
    reply.feed(sglang_event([5], total=2))
    reply.next_body(streams=True)
    told = [reply.feed(sglang_event(ids, version="v2")) for ids in ([6], [6, 7], [6, 7, 8])]
    assert [event["output_ids"] for event in told] == [[6], [7], [8]]
    assert [event["text"] for event in told] == ["f", "g", "h"]


@pytest.mark.parametrize("is_incremental", [True, False])
def test_after_a_single_event_the_next_engine_shows_which_kind_they_are(is_incremental):
    reply = SglangReply(sglang_body() | {"stream": True})
    reply.feed(sglang_event([4], total=1))
    reply.next_body(streams=True)
    parts = [[5], [6], [7]] if is_incremental else [[5], [5, 6], [5, 6, 7]]
    told = [reply.feed(sglang_event(ids, total=n, version="v2")) for n, ids in enumerate(parts, start=1)]
    expected = [None, [5, 6], [7]] if is_incremental else [None, [4, 5, 6], [4, 5, 6, 7]]
    assert [event and event["output_ids"] for event in told] == expected
    assert reply.whole()["output_ids"] == [4, 5, 6, 7]


def test_three_engines_make_one_reply():
    reply = SglangReply(sglang_body())
    for version, ids in (("v1", [4, 5]), ("v2", [6]), ("v3", [7, 8])):
        reply.next_body(streams=False)
        reply.feed(sglang_event(ids, version=version, finish="length" if version == "v3" else None))
    assert reply.whole()["output_ids"] == [4, 5, 6, 7, 8]
    assert [part["tokens"] for part in reply.whole()["meta_info"]["parts"]] == [2, 1, 2]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"stop_token_ids": [5]}, {"type": "stop", "matched": 5}),
        ({"max_new_tokens": 2}, {"type": "length", "length": 2}),
    ],
)
def test_a_reply_that_was_whole_when_its_engine_died_is_not_sampled_further(sampling, expected):
    reply = SglangReply(sglang_body(**sampling))
    reply.feed(sglang_event([4, 5]))
    assert reply.closing()["meta_info"]["finish_reason"] == expected
    assert reply.is_finished
    assert reply.whole()["output_ids"] == [4, 5]


def test_a_reply_with_more_to_come_has_no_closing():
    reply = SglangReply(sglang_body(stop_token_ids=[9]))
    assert reply.closing() is None
    reply.feed(sglang_event([4, 5]))
    assert reply.closing() is None


@pytest.mark.parametrize(
    "sampling",
    [{"presence_penalty": 0.1}, {"frequency_penalty": 1}, {"json_schema": "{}"}, {"regex": "a+"}, {"stop": ["END"]}],
)
def test_settings_that_look_back_at_the_reply_are_not_continued(sampling):
    reply = SglangReply(sglang_body(**sampling))
    reply.next_body(streams=True)  # nothing sampled yet: fine
    reply.feed(sglang_event([4]))
    with pytest.raises(CannotContinue, match=next(iter(sampling)).replace("stop", "stop string")):
        reply.next_body(streams=True)


def test_engines_that_do_not_record_the_same_are_not_joined():
    reply = SglangReply(sglang_body())
    reply.feed(sglang_event([4]))
    reply.feed(sglang_event([4, 5]))
    reply.next_body(streams=True)
    event = sglang_event([6])
    del event["meta_info"]["output_token_versions"]
    with pytest.raises(CannotContinue, match="output_token_versions"):
        reply.feed(event)


def test_an_engine_that_hides_ids_is_passed_on_but_not_continued():
    reply = SglangReply(sglang_body())
    event = {"text": "abc", "meta_info": {"completion_tokens": 3, "finish_reason": None}}
    assert reply.feed(event) is event
    with pytest.raises(CannotContinue, match="no token ids"):
        reply.next_body(streams=True)


def vllm_event(ids: list[int], *, finish=None, name="a", **more) -> dict:
    entries = [{"token": f"token_id:{token}", "logprob": -token / 8} for token in ids]
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": entries}, "finish_reason": finish, **more}
    return {"request_id": name, "choices": [choice]}


def test_vllm_events_of_two_engines_are_one_reply_with_counts_that_agree():
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 10, "min_tokens": 2, "prompt_logprobs": 1}}
    reply = VllmReply(body)
    assert reply.next_body(streams=True) == body | {"stream": True, "stream_options": {"include_usage": True}}
    reply.feed(vllm_event([4]))
    reply.feed(vllm_event([5, 6]))
    rest = reply.next_body(streams=True)
    assert rest["token_ids"] == [1, 2, 3, 4, 5, 6]
    assert rest["sampling_params"] == {"max_tokens": 7, "min_tokens": 0}
    assert reply.feed(vllm_event([7], name="b"))["request_id"] == "a"
    reply.feed(vllm_event([8], name="b", finish="stop", stop_reason=8))
    usage = {"prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8}
    reply.feed({"request_id": "b", "choices": [], "usage": usage})
    whole = reply.whole()
    assert whole["request_id"] == "a"
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    (choice,) = whole["choices"]
    assert choice["token_ids"] == [4, 5, 6, 7, 8]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in range(4, 9)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 8)


def test_a_vllm_reply_in_one_piece_is_left_alone_and_routed_experts_are_not_joined():
    reply = VllmReply({"token_ids": PROMPT, "sampling_params": {}})
    event = vllm_event([4], finish="length", routed_experts="AAAA")
    assert reply.feed(event) is event
    assert reply.whole() == event
    again = VllmReply({"token_ids": PROMPT, "sampling_params": {}})
    again.feed(vllm_event([4]))
    again.next_body(streams=True)
    with pytest.raises(CannotContinue, match="routed experts"):
        again.feed(vllm_event([5], routed_experts="AAAA"))


def test_a_handed_back_reply_is_told_without_its_end():
    reply = SglangReply(sglang_body())
    told = reply.feed(sglang_event([4, 5], finish="abort"))
    assert reply.is_handed_back
    assert reply.reopen(told)["meta_info"]["finish_reason"] is None
    assert told["meta_info"]["finish_reason"] == {"type": "abort"}
    assert not reply.is_finished


@pytest.mark.parametrize(
    "body",
    [
        {"text": "hello"},
        {"input_ids": []},
        {"input_ids": [[1], [2]]},
        {"input_ids": [1], "sampling_params": {"n": 2}},
        {"input_ids": [1], "sampling_params": [{}]},
        {"input_ids": [1], "sampling_params": {"max_new_tokens": "8"}},
        {"input_ids": [1, True]},
    ],
)
def test_only_one_reply_from_ids_is_followed(body):
    assert token_reply("/generate", body) is None
    assert token_reply("/generate", {"input_ids": [1]}) is not None
    assert token_reply("/v1/completions", {"input_ids": [1]}) is None

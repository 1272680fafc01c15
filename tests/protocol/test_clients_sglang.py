"""Exchanges with SGLang's ``/generate`` in its documented shape, and replies that contradict themselves."""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from yunque.core.records import ToolSpec
from yunque.protocol.clients import HttpSettings, SGLangClient
from yunque.protocol.errors import ContextLengthExceeded, EngineUnavailable, RequestError, UnusableReply
from yunque.protocol.generation import (
    Finish,
    JsonConstraint,
    RegexConstraint,
    SamplingParams,
    ToolConstraint,
    TopToken,
)

from .scripted_server import Answer, ClosingServer, ScriptedServer

T = TypeVar("T")
REPLY: dict[str, Any] = {
    "text": "",
    "output_ids": [31, 32, 7],
    "meta_info": {
        "id": "a1",
        "finish_reason": {"type": "stop", "matched": 7},
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "cached_tokens": 2,
        "weight_version": "12",
        "e2e_latency": 0.5,
        "output_token_logprobs": [[-0.5, 31, None], [-1.25, 32, None], [-0.125, 7, None]],
        "output_top_logprobs": [
            [[-0.5, 31, None], [-0.9, 5, None]],
            [[-0.2, 6, None], [-1.25, 32, None]],
            [[-0.125, 7, None], [None, 8, None]],
        ],
        "spec_draft_token_num": 6,
        "spec_accept_token_num": 2,
        "spec_verify_ct": 1,
    },
}
PROMPT = [1, 2, 3, 4]


def ask(url: str, use: Callable[[SGLangClient], Awaitable[T]], **options: Any) -> T:
    async def run() -> T:
        client = SGLangClient(url, HttpSettings(backoff_s=0), **options)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


def generate(url: str, sampling: SamplingParams | None = None, session: str | None = None, **options: Any) -> Any:
    return ask(url, lambda client: client.generate(PROMPT, sampling or SamplingParams(), session), **options)


def changed(**meta: Any) -> Answer:
    """The reply with other fields in ``meta_info``; None takes one out."""
    reply = copy.deepcopy(REPLY)
    reply["meta_info"] = {key: value for key, value in {**reply["meta_info"], **meta}.items() if value is not None}
    return Answer(reply)


def test_a_reply_becomes_a_completion_with_every_number_in_its_place(server: ScriptedServer) -> None:
    server.play(Answer(REPLY))
    found = generate(server.url, SamplingParams(num_top=2))
    assert (found.tokens, found.logprobs, found.versions) == ((31, 32, 7), (-0.5, -1.25, -0.125), (12, 12, 12))
    assert (found.finish, found.stopped_by) == (Finish.STOP, 7)
    assert (found.prompt_tokens, found.cached_tokens, found.drafted, found.accepted) == (4, 2, 6, 2)
    assert found.columns == {
        "top": (
            (TopToken(31, -0.5), TopToken(5, -0.9)),
            (TopToken(6, -0.2), TopToken(32, -1.25)),
            (TopToken(7, -0.125),),
        )
    }


def test_every_sampling_field_is_sent_under_sglang_s_name(server: ScriptedServer) -> None:
    server.play(Answer(REPLY))
    sampling = SamplingParams(
        max_new_tokens=9,
        min_new_tokens=2,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={8: -1.5},
        stop=("END",),
        stop_ids=frozenset({9, 7}),
        seed=5,
        num_top=2,
        constraint=JsonConstraint({"type": "array"}),
    )
    generate(server.url, sampling, "rollout-3", allow_inexact_logprobs=True)
    (asked,) = server.asked
    assert (asked.path, asked.headers["x-session-id"], asked.headers["x-smg-routing-key"]) == (
        "/generate",
        "rollout-3",
        "rollout-3",
    )
    assert asked.body == {
        "input_ids": PROMPT,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 2,
        "stream": False,
        "sampling_params": {
            "max_new_tokens": 9,
            "min_new_tokens": 2,
            "temperature": 0.7,
            "top_k": 5,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "logit_bias": {"8": -1.5},
            "stop": ["END"],
            "stop_token_ids": [7, 9],
            "ignore_eos": False,
            "skip_special_tokens": False,
            "sampling_seed": 5,
            "json_schema": '{"type": "array"}',
        },
    }


def test_defaults_are_spelled_out_and_eos_is_ignored_only_where_no_id_ends_a_reply(server: ScriptedServer) -> None:
    server.play(Answer(REPLY))
    generate(server.url, SamplingParams(constraint=RegexConstraint("a+")))
    fields = server.asked[0].body["sampling_params"]
    assert (fields["max_new_tokens"], fields["top_k"], fields["ignore_eos"], fields["regex"]) == (None, -1, True, "a+")
    assert not {"sampling_seed", "stop", "logit_bias"} & set(fields)


TOOL = ToolConstraint((ToolSpec("f", None, {}, {"name": "f"}),))


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(record_kept=True), "record_kept"),
        (SamplingParams(top_p=0.9), "top_p"),
        (SamplingParams(top_k=4), "top_k"),
        (SamplingParams(min_p=0.1), "min_p"),
        (SamplingParams(constraint=TOOL), "constraint"),
    ],
)
def test_what_sglang_cannot_do_is_refused_by_name_and_nothing_is_sent(
    server: ScriptedServer, sampling: SamplingParams, param: str
) -> None:
    server.play(Answer(REPLY))
    with pytest.raises(RequestError) as caught:
        generate(server.url, sampling)
    assert (caught.value.param, server.asked) == (param, [])


def test_greedy_replies_need_no_kept_set(server: ScriptedServer) -> None:
    server.play(Answer(REPLY))
    assert generate(server.url, SamplingParams(temperature=0, top_p=0.5)).tokens == (31, 32, 7)


@pytest.mark.parametrize(
    ("reason", "finish", "stopped_by"),
    [
        ({"type": "stop", "matched": "END"}, Finish.STOP, "END"),
        ({"type": "length", "length": 3}, Finish.LENGTH, None),
        ({"type": "abort", "message": "Aborted by AbortReq."}, Finish.PARTIAL, None),
        ({"type": "abort", "message": "aborted"}, Finish.ABORTED, None),
    ],
)
def test_ends(server: ScriptedServer, reason: dict[str, Any], finish: Finish, stopped_by: str | None) -> None:
    server.play(changed(finish_reason=reason))
    found = generate(server.url)
    assert (found.finish, found.stopped_by, found.tokens) == (finish, stopped_by, (31, 32, 7))


@pytest.mark.parametrize(("status", "kind"), [(400, RequestError), (503, EngineUnavailable), (500, EngineUnavailable)])
def test_an_abort_with_a_status_is_an_error(server: ScriptedServer, status: int, kind: type[Exception]) -> None:
    server.play(changed(finish_reason={"type": "abort", "message": "out of room", "status_code": status}))
    with pytest.raises(kind, match="out of room"):
        generate(server.url)


@pytest.mark.parametrize(("version", "expected"), [("default", 0), (None, 0), ("3", 3), (4, 4)])
def test_the_version_stamps_every_token(server: ScriptedServer, version: Any, expected: int) -> None:
    server.play(changed(weight_version=version))
    assert generate(server.url).versions == (expected,) * 3


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"completion_tokens": 4}, "completion_tokens"),
        ({"prompt_tokens": 5}, "prompt_tokens"),
        ({"output_token_logprobs": [[-0.5, 31, None]]}, "output_token_logprobs"),
        ({"output_token_logprobs": [[-0.5, 31, None], [-1.25, 33, None], [-0.125, 7, None]]}, "output_ids"),
        ({"output_token_logprobs": [[None, 31, None], [-1, 32, None], [-1, 7, None]]}, "output_token_logprobs.0.0"),
        ({"output_token_logprobs": [[0.5, 31, None], [-1, 32, None], [-1, 7, None]]}, "output_token_logprobs.0.0"),
        ({"output_token_logprobs": [[-0.5, -31, None], [-1, 32, None], [-1, 7, None]]}, "output_token_logprobs.0.1"),
        ({"output_token_logprobs": [[-0.5, "31", None], [-1, 32, None], [-1, 7, None]]}, "output_token_logprobs.0.1"),
        ({"output_top_logprobs": [[[-0.5, 31, None]]]}, "output_top_logprobs"),
        ({"output_top_logprobs": "x"}, "output_top_logprobs"),
        ({"finish_reason": None}, "finish_reason"),
        ({"finish_reason": {"type": "tired"}}, "tired"),
        ({"weight_version": "newest"}, "weight_version"),
        ({"cached_tokens": -1}, "cached_tokens"),
    ],
)
def test_a_reply_that_contradicts_itself_is_refused_with_the_field(
    server: ScriptedServer, meta: dict[str, Any], words: str
) -> None:
    server.play(changed(**{key: value for key, value in meta.items()}))
    with pytest.raises(UnusableReply, match=words):
        generate(server.url, SamplingParams(num_top=2))
    assert len(server.asked) == 1


@pytest.mark.parametrize("body", ["", "[]", "{}", "null", '{"meta_info": 3}', "<html>", b"\xff\xfe", '{"a": NaN}'])
def test_what_is_no_reply_at_all_is_refused(server: ScriptedServer, body: str | bytes) -> None:
    server.play(Answer(body))
    with pytest.raises(UnusableReply, match="SGLang"):
        generate(server.url)


def test_a_prompt_that_is_too_long_is_told_apart(server: ScriptedServer) -> None:
    words = "The input (4 tokens) is longer than the model's context length (3 tokens)."
    server.play(Answer({"error": {"message": words}}, 400))
    with pytest.raises(ContextLengthExceeded, match="context length"):
        generate(server.url)


@pytest.mark.parametrize(
    ("sampling", "asked"),
    [(SamplingParams(), 1), (SamplingParams(seed=1), 2), (SamplingParams(temperature=0), 2)],
)
def test_a_lost_reply_is_asked_for_again_only_where_it_would_be_the_same(sampling: SamplingParams, asked: int) -> None:
    async def run() -> int:
        async with ClosingServer(1, REPLY) as closing:
            client = SGLangClient(closing.url, HttpSettings(backoff_s=0))
            call = client.generate(PROMPT, sampling)
            if asked == 1:
                with pytest.raises(EngineUnavailable):
                    await call
            else:
                assert (await call).tokens == (31, 32, 7)
            await client.close()
            return closing.asked

    assert asyncio.run(run()) == asked


SCORED = {
    "finish_reason": {"type": "length", "length": 0},
    "completion_tokens": 0,
    "output_token_logprobs": [],
    "input_token_logprobs": [[None, 1, None], [-0.5, 2, None], [-0.25, 3, None], [-2.0, 4, None]],
}


def test_a_score_is_the_prompt_s_log_probabilities_without_the_first(server: ScriptedServer) -> None:
    server.play(changed(**SCORED))
    assert ask(server.url, lambda client: client.score(PROMPT, SamplingParams())) == (-0.5, -0.25, -2.0)
    body = server.asked[0].body
    assert (body["logprob_start_len"], body["sampling_params"]["max_new_tokens"]) == (0, 0)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[None, 1, None], [-0.5, 2, None]],
        [[None, 1, None], [-0.5, 2, None], [-0.25, 9, None], [-2.0, 4, None]],
        [[None, 1, None], [-0.5, 2, None], [None, 3, None], [-2.0, 4, None]],
    ],
)
def test_a_score_of_other_tokens_is_refused(server: ScriptedServer, rows: list[Any]) -> None:
    server.play(changed(**{**SCORED, "input_token_logprobs": rows}))
    with pytest.raises(UnusableReply, match="input_token_logprobs"):
        ask(server.url, lambda client: client.score(PROMPT, SamplingParams()))


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(temperature=0.5), "temperature"),
        (SamplingParams(top_p=0.5), "top_p"),
        (SamplingParams(logit_bias={1: 1.0}), "logit_bias"),
    ],
)
def test_a_score_under_another_distribution_is_refused(
    server: ScriptedServer, sampling: SamplingParams, param: str
) -> None:
    server.play(changed(**SCORED))
    with pytest.raises(RequestError) as caught:
        ask(server.url, lambda client: client.score(PROMPT, sampling))
    assert (caught.value.param, server.asked) == (param, [])

"""Exchanges with vLLM's token endpoint and its completions in their documented shapes."""

import asyncio
import copy
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from yunque.protocol.clients import HttpSettings, VLLMClient
from yunque.protocol.errors import ContextLengthExceeded, EngineUnavailable, RequestError, UnusableReply
from yunque.protocol.generation import Finish, JsonConstraint, RegexConstraint, SamplingParams, TopToken

from .scripted_server import Answer, ScriptedServer

T = TypeVar("T")
PROMPT = [1, 2, 3]


def _entry(token: int, logprob: float, *top: tuple[int, float]) -> dict[str, Any]:
    shown = [{"token": f"token_id:{t}", "logprob": lp, "bytes": [1]} for t, lp in top]
    return {"token": f"token_id:{token}", "logprob": logprob, "bytes": [1], "top_logprobs": shown}


GENERATED: dict[str, Any] = {
    "request_id": "generate-tokens-1",
    "choices": [
        {
            "index": 0,
            "token_ids": [31, 7],
            "finish_reason": "stop",
            "logprobs": {
                "content": [
                    _entry(31, -1.5, (31, -1.5), (5, -0.5), (6, -0.75)),
                    _entry(7, -0.25, (7, -0.25), (8, -2.0), (9, -9999.0)),
                ]
            },
        }
    ],
    "prompt_logprobs": None,
    "kv_transfer_params": None,
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 2}},
}
COMPLETED: dict[str, Any] = {
    "id": "cmpl-1",
    "object": "text_completion",
    "model": "m",
    "choices": [
        {
            "index": 0,
            "text": "",
            "finish_reason": "stop",
            "stop_reason": 7,
            "token_ids": [31, 7],
            "prompt_token_ids": PROMPT,
            "prompt_logprobs": None,
            "logprobs": {
                "tokens": ["token_id:31", "token_id:7"],
                "token_logprobs": [-1.5, -0.25],
                "top_logprobs": [
                    {"token_id:31": -1.5, "token_id:5": -0.5, "token_id:6": -0.75},
                    {"token_id:7": -0.25, "token_id:8": -2.0},
                ],
                "text_offset": [0, 0],
            },
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None},
}
ROUTES = [("generate", GENERATED, 2), ("completions", COMPLETED, 0)]


def ask(url: str, use: Callable[[VLLMClient], Awaitable[T]], **options: Any) -> T:
    async def run() -> T:
        client = VLLMClient(url, HttpSettings(backoff_s=0), **options)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


def generate(url: str, sampling: SamplingParams | None = None, session: str | None = None, **options: Any) -> Any:
    return ask(url, lambda client: client.generate(PROMPT, sampling or SamplingParams(), session), **options)


def changed(reply: dict[str, Any], path: tuple[Any, ...], value: Any) -> Answer:
    """The reply with another value at ``path``."""
    found = copy.deepcopy(reply)
    place = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return Answer(found)


@pytest.mark.parametrize(("route", "reply", "cached"), ROUTES)
def test_a_reply_of_either_route_becomes_the_same_completion(
    server: ScriptedServer, route: str, reply: dict[str, Any], cached: int
) -> None:
    server.play(Answer(reply))
    versions = iter([4, 5])
    sampling = SamplingParams(num_top=2, stop_ids=frozenset({7}))
    found = generate(server.url, sampling, route=route, version=lambda: next(versions))
    assert (found.tokens, found.logprobs, found.versions) == ((31, 7), (-1.5, -0.25), (4, 4))
    assert (found.finish, found.stopped_by, found.prompt_tokens, found.cached_tokens) == (Finish.STOP, 7, 3, cached)
    assert found.columns["top"] == (
        (TopToken(5, -0.5), TopToken(6, -0.75)),
        (TopToken(7, -0.25), TopToken(8, -2.0)),
    )


SAMPLING = SamplingParams(
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
FIELDS = {
    "max_tokens": 9,
    "min_tokens": 2,
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
    "ignore_eos": True,
    "skip_special_tokens": False,
    "seed": 5,
    "logprobs": 3,
    "structured_outputs": {"json": {"type": "array"}},
}


def test_every_sampling_field_is_sent_under_vllm_s_name(server: ScriptedServer) -> None:
    server.play(Answer(GENERATED))
    generate(server.url, SAMPLING, "rollout-3", model="m", logprobs_mode="processed_logprobs")
    (asked,) = server.asked
    assert (asked.path, asked.headers["x-session-id"]) == ("/inference/v1/generate", "rollout-3")
    assert asked.body == {"model": "m", "token_ids": PROMPT, "sampling_params": FIELDS, "stream": False}


def test_completions_take_the_same_fields_beside_the_ids(server: ScriptedServer) -> None:
    server.play(Answer(COMPLETED))
    generate(server.url, SAMPLING, route="completions", logprobs_mode="processed_logprobs")
    (asked,) = server.asked
    assert asked.path == "/v1/completions"
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True, "stream": False}
    assert asked.body == {"prompt": PROMPT, **FIELDS, **extra}


@pytest.mark.parametrize(
    ("constraint", "sent"),
    [(JsonConstraint(), {"json_object": True}), (RegexConstraint("a+"), {"regex": "a+"})],
)
def test_constraints(server: ScriptedServer, constraint: Any, sent: dict[str, Any]) -> None:
    server.play(Answer(GENERATED))
    generate(server.url, SamplingParams(constraint=constraint))
    assert server.asked[0].body["sampling_params"]["structured_outputs"] == sent
    assert server.asked[0].body["sampling_params"]["max_tokens"] is None


def test_a_server_without_the_token_endpoint_is_an_error_unless_completions_were_chosen(server: ScriptedServer) -> None:
    server.play(Answer({"detail": "Not Found"}, 404))
    with pytest.raises(RequestError, match="Not Found"):
        generate(server.url)
    assert [asked.path for asked in server.asked] == ["/inference/v1/generate"]


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(record_kept=True), "record_kept"),
        (SamplingParams(max_new_tokens=0), "max_new_tokens"),
        (SamplingParams(temperature=0.7), "temperature"),
        (SamplingParams(top_p=0.9), "top_p"),
        (SamplingParams(repetition_penalty=1.1), "repetition_penalty"),
        (SamplingParams(logit_bias={1: 2.0}), "logit_bias"),
    ],
)
def test_what_a_server_of_raw_log_probabilities_cannot_do_is_refused_by_name(
    server: ScriptedServer, sampling: SamplingParams, param: str
) -> None:
    server.play(Answer(GENERATED))
    with pytest.raises(RequestError) as caught:
        generate(server.url, sampling)
    assert (caught.value.param, server.asked) == (param, [])


def test_raw_log_probabilities_suffice_for_greedy_replies_and_where_they_are_not_needed(
    server: ScriptedServer,
) -> None:
    server.play(Answer(GENERATED))
    assert generate(server.url, SamplingParams(temperature=0, top_p=0.5)).tokens == (31, 7)
    assert generate(server.url, SamplingParams(temperature=0.7), allow_inexact_logprobs=True).tokens == (31, 7)


CHOICE = ("choices", 0)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ((*CHOICE, "token_ids"), [31], "logprobs and token_ids"),
        ((*CHOICE, "token_ids"), [31, 8], "logprobs and token_ids"),
        ((*CHOICE, "token_ids"), None, "no token_ids"),
        ((*CHOICE, "logprobs"), None, "no logprobs"),
        ((*CHOICE, "logprobs", "content", 0, "token"), "Hello", "token_id:N"),
        ((*CHOICE, "logprobs", "content", 0, "token"), "token_id:-3", "token_id:N"),
        ((*CHOICE, "logprobs", "content", 0, "logprob"), None, "logprob"),
        ((*CHOICE, "finish_reason"), "tired", "tired"),
        (("choices",), [], "choices"),
        (("choices",), GENERATED["choices"] * 2, "choices"),
    ],
)
def test_a_reply_whose_counts_or_names_disagree_is_refused(
    server: ScriptedServer, path: tuple[Any, ...], value: Any, words: str
) -> None:
    server.play(changed(GENERATED, path, value))
    with pytest.raises(UnusableReply, match=words):
        generate(server.url)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ((*CHOICE, "token_ids"), [31], "token_ids"),
        ((*CHOICE, "token_ids"), None, "too old"),
        ((*CHOICE, "prompt_token_ids"), [1, 2], "prompt_token_ids"),
        ((*CHOICE, "logprobs", "tokens"), ["token_id:31", "token_id:8"], "logprobs and token_ids"),
        ((*CHOICE, "logprobs", "token_logprobs"), [-1.5, None], "numbers"),
        ((*CHOICE, "logprobs", "top_logprobs"), [], "top_logprobs"),
    ],
)
def test_completions_whose_counts_disagree_are_refused(
    server: ScriptedServer, path: tuple[Any, ...], value: Any, words: str
) -> None:
    server.play(changed(COMPLETED, path, value))
    with pytest.raises(UnusableReply, match=words):
        generate(server.url, SamplingParams(num_top=2), route="completions")


@pytest.mark.parametrize(
    ("reason", "finish"), [("length", Finish.LENGTH), ("abort", Finish.PARTIAL), ("stop", Finish.STOP)]
)
def test_ends(server: ScriptedServer, reason: str, finish: Finish) -> None:
    server.play(changed(GENERATED, (*CHOICE, "finish_reason"), reason))
    found = generate(server.url, SamplingParams(stop=("END",)))
    assert (found.finish, found.stopped_by) == (finish, "END" if finish is Finish.STOP else None)


def test_failures_of_the_engine_and_prompts_that_are_too_long_are_told_apart(server: ScriptedServer) -> None:
    server.play(changed(GENERATED, (*CHOICE, "finish_reason"), "error"))
    with pytest.raises(EngineUnavailable, match="engine failed"):
        generate(server.url)
    words = "This model's maximum context length is 2 tokens. However, your request has 3 input tokens."
    server.play(Answer({"error": {"message": words, "type": "BadRequestError", "param": "input_tokens"}}, 400))
    with pytest.raises(ContextLengthExceeded, match="maximum context length"):
        generate(server.url)


ROWS = [None, {"2": {"logprob": -0.5, "rank": 1}, "9": {"logprob": -3.0}}, {"3": {"logprob": -9999.0}}]


@pytest.mark.parametrize(
    ("route", "answer"),
    [
        ("generate", changed(GENERATED, ("prompt_logprobs",), ROWS)),
        ("completions", changed(COMPLETED, (*CHOICE, "prompt_logprobs"), ROWS)),
    ],
)
def test_a_score_reads_every_prompt_token_by_its_id(server: ScriptedServer, route: str, answer: Answer) -> None:
    server.play(answer)
    assert ask(server.url, lambda client: client.score(PROMPT, SamplingParams()), route=route) == (-0.5, -math.inf)
    body = server.asked[0].body
    fields = body["sampling_params"] if route == "generate" else body
    assert (fields["prompt_logprobs"], fields["max_tokens"]) == (1, 1)


@pytest.mark.parametrize("rows", [None, [None, None, None], [None, {"2": {"logprob": -1}}], [None, {}, {}]])
def test_a_score_of_other_tokens_is_refused(server: ScriptedServer, rows: Any) -> None:
    server.play(changed(GENERATED, ("prompt_logprobs",), rows))
    with pytest.raises(UnusableReply, match="prompt_logprobs"):
        ask(server.url, lambda client: client.score(PROMPT, SamplingParams()))


def test_a_score_under_another_distribution_is_refused(server: ScriptedServer) -> None:
    with pytest.raises(RequestError, match="temperature"):
        ask(server.url, lambda client: client.score(PROMPT, SamplingParams(temperature=0.5)))

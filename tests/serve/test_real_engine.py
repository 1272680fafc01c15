"""A tiny real model behind the real server, over a connection: what is said of it over HTTP is what it does."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch

from yunque.engine import Engine, EngineSettings
from yunque.model import Transformer
from yunque.model.batch import PackedBatch
from yunque.model.cache import PackedView
from yunque.serve.app import create_app
from yunque.serve.settings import ServeSettings
from yunque.text import Renderer
from yunque.weights import save_model

from ..model.builders import build, draw_config
from .servers import Served, listening, wait_until

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}}
TALK: list[Any] = [{"role": "system", "content": "The assistant answers."}, {"role": "user", "content": "def f(x)?"}]
CALM = {"chat_template_kwargs": {"enable_thinking": False}}
ADMIN = {"authorization": "Bearer adm"}
PROMPT = list(range(40, 77))


def make_model(renderer: Renderer, seed: int) -> Transformer:
    config = draw_config(
        5, num_nextn_predict_layers=1, vocab_size=renderer.tokenizer.vocab_size, max_position_embeddings=4096
    )
    return build(config, seed).double()


@contextmanager
def real_server(renderer: Renderer, *, num_pages: int = 1024) -> Iterator[tuple[str, Engine]]:
    settings = ServeSettings(port=0, admin_key="adm")
    engine_settings = EngineSettings(num_drafts=1, max_running=32)
    model = make_model(renderer, 5)
    with Engine(model, engine_settings, num_pages=num_pages, tokenizer=renderer.tokenizer, model_name="tiny") as engine:
        app = create_app(engine, renderer, settings)
        with listening(Served(renderer, engine, app, settings)) as url:  # type: ignore[arg-type] - a real engine
            yield url, engine


@pytest.fixture(scope="module")
def real(renderer: Renderer) -> Iterator[tuple[str, Engine]]:
    with real_server(renderer) as found:
        yield found


@pytest.fixture
def url(real: tuple[str, Engine]) -> str:
    return real[0]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60) as client:
        yield client


def post(url: str, path: str, body: dict[str, Any], **options: Any) -> Any:
    response = httpx.post(f"{url}{path}", json=body, timeout=60, **options)
    assert response.status_code == 200, response.text
    return response.json()


def training_logprobs(model: Transformer, tokens: list[int]) -> list[float]:
    """Of every token but the first, by the pass that trains."""
    batch = PackedBatch.from_documents([tokens])
    logits = model.logits(model(batch.tokens_T, PackedView(batch)).hidden_TD).detach()
    rows = torch.log_softmax(logits, -1)[:-1]
    return rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def test_the_official_client_reads_the_same_reply_streamed_and_whole(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": TALK, "max_tokens": 60, "seed": 3, "logprobs": True}
    whole = client.chat.completions.create(**fields, extra_body={"return_token_ids": True})
    text = thought = ""
    ids: list[int] = []
    numbers: list[float] = []
    for chunk in client.chat.completions.create(**fields, stream=True, extra_body={"return_token_ids": True}):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        thought += getattr(choice.delta, "reasoning_content", None) or ""
        ids += getattr(choice, "token_ids", None) or []
        numbers += [entry.logprob for entry in (choice.logprobs.content or [] if choice.logprobs else [])]
    (expected,) = whole.choices
    assert len(ids) == 60
    assert ids == expected.model_extra["token_ids"]
    assert text == expected.message.content
    assert thought == expected.message.model_extra["reasoning_content"]
    assert numbers == pytest.approx([entry.logprob for entry in expected.logprobs.content], abs=1e-9)


def test_logprobs_are_those_of_the_training_forward(real: tuple[str, Engine]) -> None:
    url, engine = real
    sampling = {"max_new_tokens": 50, "temperature": 1.0, "sampling_seed": 8, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    found = post(url, "/generate", body)
    expected = training_logprobs(engine._core.model, PROMPT + found["output_ids"])
    made = [entry[0] for entry in found["meta_info"]["output_token_logprobs"]]
    given = [entry[0] for entry in found["meta_info"]["input_token_logprobs"]]
    assert (len(made), given[0]) == (50, None)
    assert given[1:] + made == pytest.approx(expected, abs=1e-5)
    echoed = post(url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0})
    assert echoed["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(given[1:], abs=1e-5)


def test_usage_counts_what_the_prefix_cache_had(real: tuple[str, Engine], client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "seed": 1, "extra_body": {"cache_salt": "usage"}}
    talk = [*TALK, {"role": "user", "content": "naïve café? " * 12}]
    first = client.chat.completions.create(messages=talk, **fields).usage
    second = client.chat.completions.create(messages=talk, **fields).usage
    other = client.chat.completions.create(messages=talk, **{**fields, "extra_body": {"cache_salt": "another"}}).usage
    page = real[1]._core.settings.page_size
    assert (first.prompt_tokens_details.cached_tokens, other.prompt_tokens_details.cached_tokens) == (0, 0)
    assert second.prompt_tokens_details.cached_tokens == (second.prompt_tokens - 1) // page * page > page


def test_a_client_that_leaves_frees_its_pages_at_once(real: tuple[str, Engine]) -> None:
    url, engine = real
    body = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True, "return_token_ids": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(10):
            next(lines)
        assert engine.stats().running == 1
    begin_s = time.monotonic()
    wait_until(lambda: engine.stats().running == 0)
    assert time.monotonic() - begin_s < 1
    stats = engine.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def test_sixteen_seeded_requests_at_once_are_the_same_ones_alone(url: str) -> None:
    def ask(number: int) -> tuple[list[int], list[float]]:
        sampling = {"max_new_tokens": 10 + 3 * number, "temperature": 0.9, "top_p": 0.95, "sampling_seed": number}
        prompt = PROMPT[: 5 + 2 * number]
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        found = post(url, "/generate", body)
        return found["output_ids"], [entry[0] for entry in found["meta_info"]["output_token_logprobs"]]

    alone = [ask(number) for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    assert [ids for ids, _ in together] == [ids for ids, _ in alone]
    for (_, found), (_, expected) in zip(together, alone, strict=True):
        assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_required_call_and_a_json_answer_validate(client: openai.OpenAI, seed: int) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": TALK, "seed": seed, "max_tokens": 400, "extra_body": CALM}
    reply = client.chat.completions.create(**fields, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = reply.choices[0].message.tool_calls
    assert (reply.choices[0].finish_reason, call.function.name) == ("tool_calls", "get_weather")
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    form = {"type": "json_schema", "json_schema": {"name": "stay", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(**fields, response_format=form).choices[0]
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    both = client.chat.completions.create(**fields, response_format=form, tools=[TOOL]).choices[0]
    calls = both.message.tool_calls or []
    for written in [call.function.arguments for call in calls] or [both.message.content]:
        jsonschema.validate(json.loads(written), SCHEMA)


def test_weights_are_exchanged_in_the_middle_of_a_stream(renderer: Renderer, tmp_path: Path) -> None:
    other = make_model(renderer, 6)
    save_model(tmp_path / "other", other.config, other.state_dict())
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True, "return_token_ids": True}
    exchange = {"version": 7, "source": str(tmp_path / "other")}
    versions: list[int] = []
    with real_server(renderer) as (url, _):
        before = httpx.get(f"{url}/admin/weight_hashes", headers=ADMIN).json()
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            asking: threading.Thread | None = None
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                versions += json.loads(data)["choices"][0]["weight_versions"]
                if asking is None and len(versions) > 3:
                    asking = threading.Thread(target=lambda: post(url, "/admin/load_weights", exchange, headers=ADMIN))
                    asking.start()
        assert asking is not None
        asking.join(20)
        after = httpx.get(f"{url}/admin/weight_hashes", headers=ADMIN).json()
        assert (before["version"], after["version"]) == (0, 7)
        assert len(versions) == 1500
        assert versions == sorted(versions)
        assert set(versions) == {0, 7}
        assert before["sha256"].keys() == after["sha256"].keys()
        assert sum(before["sha256"][name] != digest for name, digest in after["sha256"].items()) > 10
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 9}, "return_logprob": True}
        found = post(url, "/generate", body)
        expected = training_logprobs(other, PROMPT + found["output_ids"])[len(PROMPT) - 1 :]
        made = [entry[0] for entry in found["meta_info"]["output_token_logprobs"]]
        assert (made, found["meta_info"]["weight_version"]) == (pytest.approx(expected, abs=1e-5), "7")


def test_a_paused_reply_waits_and_goes_on_as_if_nothing_had_been(real: tuple[str, Engine]) -> None:
    url, engine = real
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 600, "sampling_seed": 4, "ignore_eos": True}}
    whole = post(url, "/generate", body)["output_ids"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, url, "/generate", body)
        wait_until(lambda: engine.stats().running == 1)
        post(url, "/admin/pause", {"mode": "keep"}, headers=ADMIN)
        assert httpx.get(f"{url}/health").status_code == 503
        steps = engine.stats().steps
        time.sleep(0.1)
        assert engine.stats().steps == steps
        assert not asked.done()
        post(url, "/admin/resume", {}, headers=ADMIN)
        assert asked.result()["output_ids"] == whole
    assert httpx.get(f"{url}/health").status_code == 200


def test_what_a_pause_hands_back_is_resumed_to_the_reply_it_would_have_been(real: tuple[str, Engine]) -> None:
    url, engine = real
    sampling = {"max_tokens": 800, "seed": 6, "presence_penalty": 0.3, "stop": ["\u0000\u0001"]}
    body = {"messages": TALK, "return_token_ids": True, **sampling}
    whole = post(url, "/v1/chat/completions", body)["choices"][0]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, url, "/v1/chat/completions", body)
        wait_until(lambda: engine.stats().running == 1)
        post(url, "/admin/pause", {"mode": "abort"}, headers=ADMIN)
        cut = asked.result()["choices"][0]
    post(url, "/admin/resume", {}, headers=ADMIN)
    assert (cut["finish_reason"], cut["stop_reason"]) == ("length", "partial")
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert len(cut["token_ids"]) < len(whole["token_ids"])
    found = post(url, "/v1/chat/completions", {**body, "resume_token_ids": cut["token_ids"]})["choices"][0]
    for name in ("token_ids", "message", "finish_reason"):
        assert found[name] == whole[name]


def test_hostile_schemas_do_not_hold_up_another_stream(real: tuple[str, Engine]) -> None:
    url, _ = real

    def hostile(number: int) -> dict[str, Any]:
        limits = ({"type": "number", "minimum": (i + number) / 7, "maximum": 1e9 + i} for i in range(500))
        schema = {"type": "object", "properties": {f"p{i}": limit for i, limit in enumerate(limits)}}
        form = {"type": "json_schema", "json_schema": {"name": "wide", "schema": schema}}
        return {"messages": TALK, "response_format": form, "max_tokens": 1, **CALM}

    async def run() -> tuple[float, float]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True, "return_token_ids": True}
            gaps: list[float] = []
            async with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)

                async def listen() -> None:
                    last_s = time.monotonic()
                    async for _ in lines:
                        gaps.append(time.monotonic() - last_s)
                        last_s = time.monotonic()

                task = asyncio.ensure_future(listen())
                begin_s = time.monotonic()
                for number in range(6):
                    reply = await client.post("/v1/chat/completions", json=hostile(number))
                    assert reply.status_code == 200, reply.text
                seconds = time.monotonic() - begin_s
                assert not task.done(), "the stream was over before the schemas were"
                task.cancel()
            return seconds, max(gaps)

    seconds, gap_s = asyncio.run(run())
    assert seconds > 0.3, "these schemas are not hostile"
    assert gap_s < max(0.1, seconds / 5)


def test_a_draining_server_hands_back_what_runs_and_refuses_what_comes(renderer: Renderer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "return_token_ids": True}
    with real_server(renderer) as (url, engine), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, url, "/v1/completions", body)
        wait_until(lambda: engine.stats().generated_tokens > 20)
        post(url, "/admin/drain", {"timeout_s": 0.1}, headers=ADMIN)
        (choice,) = asked.result()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "partial")
        assert 20 <= len(choice["token_ids"]) < 3000
        refused = httpx.post(f"{url}/v1/completions", json=body, timeout=20)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        stats = engine.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total

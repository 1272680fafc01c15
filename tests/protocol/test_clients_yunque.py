"""The client of our own server against that server, over a real connection."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from yunque.core.records import ToolSpec
from yunque.engine import Engine, EngineSettings, LocalPolicyClient
from yunque.model import Transformer, init_weights, preset
from yunque.protocol.clients import HttpSettings, SGLangClient, VLLMClient, YunqueClient
from yunque.protocol.errors import ContextLengthExceeded, EngineUnavailable, Overloaded, RequestError, UnusableReply
from yunque.protocol.generation import Finish, SamplingParams, ToolConstraint, TopToken
from yunque.serve.app import create_app
from yunque.serve.settings import ServeSettings
from yunque.text import Renderer, train_bpe

from ..serve.scripted_engine import ScriptedEngine
from ..serve.servers import Served, listening, serve
from .scripted_server import Answer, ScriptedServer

T = TypeVar("T")
PROMPT = [5, 6, 7, 8]
FREE = ServeSettings(port=0)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(train_bpe(["yes and no, x y z\n"] * 8, 320), "glm-5")


@pytest.fixture
def served(renderer: Renderer) -> Served:
    return serve(renderer, "xyz<|user|>", settings=FREE, retry_after_s=3.0, max_model_len=64)


@pytest.fixture
def url(served: Served) -> Iterator[str]:
    with listening(served) as address:
        yield address


def ask(client: Any, use: Callable[[Any], Awaitable[T]]) -> T:
    async def run() -> T:
        made = client()
        try:
            return await use(made)
        finally:
            await made.close()

    return asyncio.run(run())


def generate(url: str, sampling: SamplingParams, session: str | None = None, **settings: Any) -> Any:
    fields = {"backoff_s": 0.0, **settings}
    return ask(
        lambda: YunqueClient(url, HttpSettings(**fields)), lambda client: client.generate(PROMPT, sampling, session)
    )


def test_a_reply_over_http_has_all_that_the_engine_said(served: Served, url: str) -> None:
    ids = served.ids("xyz<|user|>")
    sampling = SamplingParams(
        stop_ids=frozenset({ids[-1]}), num_top=2, record_kept=True, temperature=0.7, top_p=0.9, seed=4, stop=("END",)
    )
    found = generate(url, sampling, "rollout-1")
    (request,) = served.engine.requests
    assert (request.sampling, request.tokens, request.session) == (sampling, tuple(PROMPT), "rollout-1")
    assert found.tokens == tuple(ids)
    assert found.logprobs == tuple(-(i + 1) / 8 for i in range(len(ids)))
    assert found.versions == (1,) * len(ids)
    assert found.columns["kept"] == tuple((token,) for token in ids)
    assert found.columns["top"][0] == (TopToken(ids[0], -0.25), TopToken(0, -9.0))
    assert (found.finish, found.stopped_by) == (Finish.STOP, ids[-1])
    assert (found.prompt_tokens, found.cached_tokens) == (4, 2)


def test_ids_end_where_the_sampling_says_and_nowhere_else(served: Served, url: str) -> None:
    generate(url, SamplingParams())
    assert served.engine.requests[0].sampling == SamplingParams()


@pytest.mark.parametrize("field", [{"min_p": 0.1}, {"top_k": 3}, {"min_new_tokens": 2}, {"logit_bias": {3: -2.5}}])
@pytest.mark.parametrize("more", [{"repetition_penalty": 1.5}, {"presence_penalty": 1.0, "frequency_penalty": -1.0}])
def test_sampling_arrives_as_it_was_given(
    served: Served, url: str, field: dict[str, Any], more: dict[str, Any]
) -> None:
    sampling = SamplingParams(max_new_tokens=2, **field, **more)
    generate(url, sampling)
    assert served.engine.requests[0].sampling == sampling


def test_every_token_keeps_its_own_version(server: ScriptedServer) -> None:
    meta = {
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "weight_versions": [3, 4],
        "output_token_logprobs": [[-1.0, 9, None], [-2.0, 8, None]],
    }
    server.play(Answer({"output_ids": [9, 8], "meta_info": meta}))
    assert generate(server.url, SamplingParams()).versions == (3, 4)
    for versions in ([3], None):
        server.play(Answer({"output_ids": [9, 8], "meta_info": {**meta, "weight_versions": versions}}))
        with pytest.raises(UnusableReply, match="versions and tokens"):
            generate(server.url, SamplingParams())
    server.play(Answer({"output_ids": [9, 8], "meta_info": meta}))
    with pytest.raises(UnusableReply, match="kept sets were asked for"):
        generate(server.url, SamplingParams(record_kept=True))


def test_a_score_is_made_without_drawing_a_token(served: Served, url: str) -> None:
    sampling = SamplingParams(temperature=0.5, top_p=0.9, max_new_tokens=7)
    scores = ask(lambda: YunqueClient(url), lambda client: client.score(PROMPT, sampling))
    assert scores == (-1 / 16, -2 / 16, -3 / 16)
    request = served.engine.requests[0]
    assert (request.sampling.max_new_tokens, request.sampling.temperature, request.sampling.top_p) == (0, 0.5, 0.9)
    assert request.prompt_logprobs
    assert served.engine.stats().generated_tokens == 0


def test_other_clients_find_their_shape_here_too(served: Served, url: str) -> None:
    ids = tuple(served.ids("xyz<|user|>"))
    sampling = SamplingParams(num_top=3, stop_ids=frozenset({ids[-1]}))
    for client in (
        lambda: SGLangClient(url),
        lambda: VLLMClient(url, model="scripted"),
    ):
        found = ask(client, lambda client: client.generate(PROMPT, sampling))
        assert (found.tokens, found.logprobs[0], found.stopped_by) == (ids, -1 / 8, ids[-1])
        assert [len(top) for top in found.columns["top"]] == [3] * len(ids)
        assert ask(client, lambda client: client.score(PROMPT, sampling)) == (-1 / 16, -2 / 16, -3 / 16)


def test_refusals_are_the_engine_s_own(served: Served, url: str) -> None:
    with pytest.raises(ContextLengthExceeded, match="the context 64"):
        ask(lambda: YunqueClient(url), lambda client: client.generate([1] * 80, SamplingParams()))
    with pytest.raises(RequestError, match="vocabulary"):
        ask(lambda: YunqueClient(url), lambda client: client.generate([10**6], SamplingParams()))
    tool = ToolConstraint((ToolSpec("f", None, {}, {"name": "f"}),))
    with pytest.raises(RequestError, match="constraint"):
        generate(url, SamplingParams(constraint=tool))
    assert served.engine.requests == []


def test_a_full_engine_says_when_to_come_back(renderer: Renderer) -> None:
    full = serve(renderer, "x", settings=FREE, max_live=0, retry_after_s=3.0)
    with listening(full) as url, pytest.raises(Overloaded) as caught:
        generate(url, SamplingParams(), attempts=1)
    assert caught.value.retry_after_s == 3


def test_an_engine_that_breaks_is_unavailable_and_is_not_asked_twice(renderer: Renderer) -> None:
    broken = serve(renderer, "xyz", settings=FREE)
    broken.engine.fails_after = 1
    with listening(broken) as url, pytest.raises(EngineUnavailable, match="the script says so"):
        generate(url, SamplingParams(seed=1))
    assert len(broken.engine.requests) == 1


def test_a_key_opens_a_server_that_has_one(renderer: Renderer) -> None:
    closed = serve(renderer, "x", settings=ServeSettings(port=0, api_keys=("k",)))
    with listening(closed) as url:
        with pytest.raises(RequestError, match="401"):
            generate(url, SamplingParams())
        assert generate(url, SamplingParams(), api_key="k").tokens


def test_a_cancelled_request_frees_its_pages(renderer: Renderer) -> None:
    slow = serve(renderer, rule=ScriptedEngine.echo, settings=FREE, delay_s=0.2)

    async def run(url: str) -> None:
        client = YunqueClient(url)
        call = asyncio.ensure_future(client.generate([1] * 100, SamplingParams()))
        async with asyncio.timeout(10):
            while not slow.engine.pages_used:
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            while slow.engine.pages_used:
                await asyncio.sleep(0.01)
        await client.close()

    with listening(slow) as url:
        asyncio.run(run(url))
    assert len(slow.engine.aborted) == 1


def test_an_engine_over_http_is_the_engine_in_process(renderer: Renderer) -> None:
    config = replace(preset("nano"), vocab_size=renderer.tokenizer.vocab_size)
    model = init_weights(Transformer(config), torch.Generator().manual_seed(0)).eval()
    drafts = 1 if config.num_nextn_predict_layers else 0
    sampling = SamplingParams(
        max_new_tokens=24, temperature=0.8, top_p=0.7, seed=11, num_top=3, record_kept=True, stop_ids=frozenset({9})
    )
    tokens = list(range(20, 60))

    async def both(url: str, engine: Engine) -> None:
        near, far = LocalPolicyClient(engine), YunqueClient(url)
        expected, found = await near.generate(tokens, sampling), await far.generate(tokens, sampling)
        assert (found.tokens, found.versions, found.finish) == (expected.tokens, expected.versions, expected.finish)
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
        assert found.columns["kept"] == expected.columns["kept"]
        assert found.stopped_by == expected.stopped_by
        tops = [[top.token for top in place] for place in found.columns["top"]]
        assert tops == [[top.token for top in place] for place in expected.columns["top"]]
        assert (found.drafted, found.accepted) == (expected.drafted, expected.accepted)
        assert found.cached_tokens >= expected.cached_tokens
        for law in (sampling, SamplingParams(), SamplingParams(temperature=0.3, top_k=5)):
            assert await far.score(tokens, law) == pytest.approx(await near.score(tokens, law), abs=1e-6)
        await far.close()

    settings = ServeSettings(port=0)
    with Engine(
        model, EngineSettings(num_drafts=drafts), num_pages=64, tokenizer=renderer.tokenizer, model_name="nano"
    ) as engine:
        app = create_app(engine, renderer, settings)
        with listening(Served(renderer, engine, app, settings)) as url:  # type: ignore[arg-type] - a real engine
            asyncio.run(both(url, engine))

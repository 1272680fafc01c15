"""The engine's thread: calls from threads and event loops, weights between steps, health, failure."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from builders import build, random_documents
from builders_engine import engine_config

from yunque.engine import Engine, EngineSettings, GenerationRequest, LocalPolicyClient, SamplingParams
from yunque.engine.engine import Reply
from yunque.model.generate import Sampling, generate
from yunque.model.transformer import Transformer
from yunque.protocol.errors import EngineUnavailable, Overloaded, RequestError
from yunque.protocol.generation import Finish, JsonConstraint
from yunque.text import train_bpe
from yunque.weights import save_model

GREEDY = SamplingParams(temperature=0, max_new_tokens=12)


@pytest.fixture
def engine() -> Iterator[Engine]:
    model = build(engine_config(0), 0).double()
    with Engine(model, EngineSettings(page_size=4, max_waiting=4, max_running=4), num_pages=64) as engine:
        yield engine


def write(model: Transformer, folder: Path) -> None:
    save_model(folder, model.config, model.state_dict())


def expected(engine: Engine, prompt: list[int], count: int = 12) -> tuple[int, ...]:
    return tuple(generate(engine._core.model, prompt, Sampling(max_new_tokens=count)))


def test_threads_and_event_loops_share_one_batch(engine):
    prompts = random_documents(engine._core.model.config, [5, 9, 20, 3], 0)
    found: dict[int, tuple[int, ...]] = {}

    def call(i: int) -> None:
        found[i] = engine.generate(prompts[i], GREEDY).tokens

    threads = [threading.Thread(target=call, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()

    async def together() -> list[tuple[int, ...]]:
        return [c.tokens for c in await asyncio.gather(*(engine.generate_async(p, GREEDY) for p in prompts[2:]))]

    replies = asyncio.run(together())
    for thread in threads:
        thread.join()
    assert [found[0], found[1], *replies] == [expected(engine, p) for p in prompts]


def test_streamed_equals_whole(engine):
    prompt = [1, 2, 3, 4, 5]

    async def stream() -> list[int]:
        request = GenerationRequest("a", tuple(prompt), GREEDY)
        return [token async for delta in engine.submit(request) for token in delta.tokens]

    assert tuple(asyncio.run(stream())) == engine.generate(prompt, GREEDY).tokens


def test_leaving_early_frees_the_pages(engine):
    async def leave() -> None:
        long = SamplingParams(max_new_tokens=200)
        unread = engine.submit(GenerationRequest("unread", (1, 2), long))
        read = engine.submit(GenerationRequest("read", (1, 2, 3), long))
        await anext(read)
        await unread.aclose()
        await read.aclose()
        task = asyncio.create_task(engine.generate_async([5, 6], long))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(200):
            stats = engine.stats()
            if stats.running + stats.waiting == 0:
                break
            await asyncio.sleep(0.01)
        assert stats.running + stats.waiting == 0
        assert stats.pages_free + stats.pages_cached == stats.pages_total

    asyncio.run(leave())


def test_too_many_requests_are_refused_at_once_and_the_others_go_on(engine):
    async def crowd() -> None:
        replies: list[Reply] = []
        for i in range(8):
            replies.append(engine.submit(GenerationRequest(str(i), (1, i), GREEDY)))
        long = (GenerationRequest(str(i), (1, 2), SamplingParams(max_new_tokens=100)) for i in range(8, 100))
        with pytest.raises(Overloaded):
            replies.extend(map(engine.submit, long))
        with pytest.raises(RequestError, match="in use"):
            engine._start(GenerationRequest("7", (1, 2), GREEDY), replies[7])
        for i, reply in enumerate(replies[:8]):
            tokens = tuple([token async for delta in reply for token in delta.tokens])
            assert tokens == expected(engine, [1, i])
        for reply in replies[8:]:
            await reply.aclose()

    asyncio.run(crowd())


def test_paused_engine_keeps_or_hands_back_what_is_in_flight_and_is_not_healthy(engine):
    async def scenario() -> None:
        assert engine.health().ok
        kept = engine.submit(GenerationRequest("kept", (1, 2, 3), SamplingParams(temperature=0, max_new_tokens=60)))
        first = await anext(kept)
        await engine.pause()
        assert not engine.health().ok
        assert "paused" in engine.health().reason
        await engine.resume()
        assert engine.health().ok
        rest = [token async for delta in kept for token in delta.tokens]
        assert (*first.tokens, *rest) == expected(engine, [1, 2, 3], 60)
        partial = engine.submit(GenerationRequest("partial", (1, 2), SamplingParams(max_new_tokens=200)))
        await anext(partial)
        await engine.pause("abort")
        deltas = [delta async for delta in partial]
        assert deltas[-1].finish is Finish.PARTIAL
        await engine.resume()

    asyncio.run(scenario())


def test_exchanged_weights_come_from_the_folder_bit_for_bit(engine, tmp_path):
    model = engine._core.model
    other = build(model.config, 9).double()
    write(other, tmp_path / "other")
    prompt = [1, 2, 3]

    async def scenario() -> None:
        before = engine.generate(prompt, GREEDY)
        assert set(before.versions) == {0}
        await engine.load_weights(3, str(tmp_path / "other"))
        after = await engine.generate_async(prompt, GREEDY)
        assert set(after.versions) == {3}
        assert engine.info.version == 3
        assert after.tokens == tuple(generate(other, prompt, Sampling(max_new_tokens=12)))
        served = await engine.weight_hashes()
        for name, tensor in other.state_dict().items():
            assert served[name] == hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()

    asyncio.run(scenario())


def test_weights_that_do_not_fit_change_nothing(engine, tmp_path):
    write(build(engine_config(3), 3), tmp_path / "wrong")
    prompt = [1, 2, 3]
    before = engine.generate(prompt, GREEDY).tokens

    async def scenario() -> None:
        for source in (tmp_path / "wrong", tmp_path / "nothing"):
            with pytest.raises((ValueError, OSError)):
                await engine.load_weights(4, str(source))

    asyncio.run(scenario())
    assert engine.health().ok
    assert engine.info.version == 0
    assert engine.generate(prompt, GREEDY).tokens == before


def test_weights_read_in_part_make_the_engine_unhealthy_until_whole_ones_come(engine, tmp_path):
    other = build(engine._core.model.config, 9).double()
    write(other, tmp_path / "torn")
    write(other, tmp_path / "whole")
    (shard,) = (tmp_path / "torn").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-8])

    async def scenario() -> None:
        with pytest.raises((ValueError, OSError)):
            await engine.load_weights(4, str(tmp_path / "torn"))
        if not engine.health().ok:
            with pytest.raises(EngineUnavailable, match="in part"):
                engine.generate([1], GREEDY)
        await engine.load_weights(5, str(tmp_path / "whole"))
        assert engine.health().ok
        assert (await engine.generate_async([1], GREEDY)).tokens == tuple(
            generate(other, [1], Sampling(max_new_tokens=12))
        )

    asyncio.run(scenario())


def test_draining_refuses_new_requests_and_lets_the_old_ones_end(engine):
    async def scenario() -> None:
        reply = engine.submit(GenerationRequest("a", (1, 2, 3), GREEDY))
        await engine.drain(10.0)
        tokens = [token async for delta in reply for token in delta.tokens]
        assert tuple(tokens) == expected(engine, [1, 2, 3])
        with pytest.raises(EngineUnavailable, match="draining"):
            engine.submit(GenerationRequest("b", (1, 2, 3), GREEDY))

    asyncio.run(scenario())


def test_a_failing_step_ends_every_reply_with_the_reason_and_the_health(engine):
    """The failure is a real one: a weight of a shape that cannot be multiplied."""
    threading.excepthook, hook = (lambda _: None), threading.excepthook
    try:
        engine._core.model.lm_head.weight.data = torch.zeros(3, 2, dtype=torch.float64)
        with pytest.raises(EngineUnavailable, match="the engine failed"):
            engine.generate([1, 2, 3], GREEDY)
        assert "the engine failed" in engine.health().reason
        with pytest.raises(EngineUnavailable):
            engine.generate([1, 2, 3], GREEDY)
    finally:
        threading.excepthook = hook


def test_local_client_scores_what_it_generated(engine):
    async def scenario() -> None:
        client = LocalPolicyClient(engine)
        sampling = SamplingParams(temperature=0.7, top_k=5, seed=3, max_new_tokens=10)
        completion = await client.generate((1, 2, 3), sampling)
        scores = await client.score((1, 2, 3, *completion.tokens), sampling)
        torch.testing.assert_close(torch.tensor(scores[2:]), torch.tensor(completion.logprobs), rtol=0, atol=1e-5)

    asyncio.run(scenario())


def test_loading_sizes_the_cache_and_says_so(tmp_path, caplog):
    model = build(engine_config(0), 0)
    folder: Path = tmp_path / "model"
    write(model, folder)
    settings = EngineSettings(max_running=2, num_drafts=1)
    with caplog.at_level("INFO"), Engine.load(folder, settings) as engine:
        stats = engine.stats()
        assert stats.pages_total == 2 * 256 // 16
        assert engine.info.max_model_len == 256
        assert "bytes a token" in caplog.text
    with pytest.raises(ValueError, match="fewer than max_model_len 256"):
        Engine.load(folder, cache_bytes=10_000)


def test_a_constraint_is_prepared_beside_the_event_loop_and_then_submitted_at_once():
    tokenizer = train_bpe(["the page of a tree " * 20], 400)
    model = build(engine_config(0, vocab_size=tokenizer.vocab_size), 0)
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^a{1,30}$"} for i in range(500)}}
    sampling = SamplingParams(max_new_tokens=1, constraint=JsonConstraint(schema))

    async def run(engine: Engine) -> tuple[float, float, float]:
        await engine.prepare(JsonConstraint({}))
        loop, gaps = asyncio.get_running_loop(), [0.0]

        async def tick() -> None:
            while True:
                begin_s = loop.time()
                await asyncio.sleep(0.001)
                gaps.append(loop.time() - begin_s)

        ticking = asyncio.ensure_future(tick())
        begin_s = loop.time()
        await engine.prepare(JsonConstraint(schema))
        compile_s = loop.time() - begin_s
        ticking.cancel()
        begin_s = loop.time()
        reply = engine.submit(GenerationRequest("a", (1, 2), sampling))
        submit_s = loop.time() - begin_s
        await reply.aclose()
        with pytest.raises(RequestError, match="compiled"):
            await engine.prepare(JsonConstraint({"type": "no such type"}))
        return compile_s, max(gaps), submit_s

    with Engine(model, EngineSettings(page_size=4), num_pages=64, tokenizer=tokenizer) as engine:
        compile_s, gap_s, submit_s = asyncio.run(run(engine))
    assert gap_s < compile_s / 2, "the loop went on while the grammar was compiled"
    assert submit_s < compile_s / 2, "and the grammar was there"

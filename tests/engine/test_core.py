"""The engine makes the tokens that the model makes, whatever batch, chunk, page, preemption or draft it uses."""

from __future__ import annotations

import random

import pytest
import torch
from builders import build, random_documents
from builders_engine import (
    complete,
    engine_config,
    finish,
    make_core,
    submit,
    training_logits,
    training_logprobs,
)

from yunque.model.generate import Sampling, generate
from yunque.protocol.errors import ContextLengthExceeded, Overloaded, RequestError
from yunque.protocol.generation import Finish

SETTINGS = {
    "plain": {},
    "small chunks": {"chunk_tokens": 5, "max_step_tokens": 64},
    "drafts": {"num_drafts": 3},
    "drafts and small chunks": {"num_drafts": 2, "chunk_tokens": 3, "max_step_tokens": 64},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_replies_are_those_of_plain_generation(seed, settings):
    """Many prompts at once, longer than index_topk, across page boundaries."""
    config = engine_config(seed)
    model = build(config, seed).double()
    prompts = random_documents(config, [3, 17, 1, 40, 9], seed)
    core = make_core(model, **settings)
    collectors = [submit(core, str(i), p, temperature=0, max_new_tokens=24) for i, p in enumerate(prompts)]
    for prompt, completion in zip(prompts, finish(core, *collectors), strict=True):
        expected = tuple(generate(model, prompt, Sampling(max_new_tokens=24)))
        assert completion.tokens == expected
        assert completion.finish is Finish.LENGTH
        expected_logprobs = training_logprobs(model, prompt, expected)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected_logprobs, rtol=0, atol=1e-6)
    assert core.allocator.num_used == core.tree.num_cached_pages


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_sampled_logprobs_are_the_training_forward_s(acceptance):
    model = build(engine_config(1), 1).double()
    core = make_core(model, num_drafts=2, acceptance=acceptance, chunk_tokens=7)
    prompts = random_documents(model.config, [5, 30, 12], 1)
    collectors = [submit(core, str(i), p, temperature=0.8, seed=i, max_new_tokens=20) for i, p in enumerate(prompts)]
    for prompt, completion in zip(prompts, finish(core, *collectors), strict=True):
        logits = training_logits(model, [*prompt, *completion.tokens])[len(prompt) - 1 : -1]
        tokens = torch.tensor(completion.tokens)[:, None]
        for told, scale in ((completion.logprobs, 0.8), (completion.columns["model_logprobs"], 1.0)):
            expected = torch.log_softmax(logits / scale, -1).gather(1, tokens)[:, 0]
            torch.testing.assert_close(torch.tensor(told).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_s_reply_depends_on_nothing_but_its_request(seed):
    """Alone or among others, with or without drafts, in small chunks, after a prefix hit, after preemption."""
    model = build(engine_config(seed), seed).double()
    prompts = random_documents(model.config, [11, 25, 8, 19], seed)
    asked = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 16}
    alone = [complete(make_core(model), p, seed=i, **asked).tokens for i, p in enumerate(prompts)]
    for core in (
        make_core(model),
        make_core(model, num_drafts=3),
        make_core(model, chunk_tokens=3, max_running=3, max_step_tokens=16),
        make_core(model, num_pages=16, num_drafts=2, watermark_pages=0),
    ):
        for _ in range(2):  # the second time prefixes are cached
            collectors = [submit(core, str(i), p, seed=i, **asked) for i, p in enumerate(prompts)]
            assert [c.tokens for c in finish(core, *collectors)] == alone
    assert core.stats().preemptions > 0


def test_prefix_hits_spare_computing_and_change_nothing():
    model = build(engine_config(2), 2).double()
    (prompt,) = random_documents(model.config, [37], 2)
    core = make_core(model, num_drafts=1)
    first = complete(core, prompt, temperature=0, max_new_tokens=9)
    second = complete(core, prompt, temperature=0, max_new_tokens=9)
    longer = complete(core, [*prompt, *first.tokens, 1, 2], temperature=0, max_new_tokens=9)
    assert first.cached_tokens == 0
    assert second.cached_tokens == 36
    assert longer.cached_tokens == 44
    assert second.tokens == first.tokens
    expected = tuple(generate(model, [*prompt, *first.tokens, 1, 2], Sampling(max_new_tokens=9)))
    assert longer.tokens == expected


def test_requests_of_different_salts_share_nothing():
    core = make_core(0)
    cached = [
        complete(core, [1] * 20, temperature=0, max_new_tokens=2, cache_salt=salt).cached_tokens
        for salt in (None, "a", "a", "b", None)
    ]
    assert cached == [0, 0, 16, 0, 16]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_batch_invariant_logprobs_are_the_training_forward_s_to_the_bit(seed, temperature):
    """fp32, through neighbours, chunked prefill, prefix hits, preemption, page boundaries and drafts."""
    model = build(engine_config(seed), seed, batch_invariant=True)
    prompts = random_documents(model.config, [13, 29, 6], seed)
    asked = {"temperature": temperature, "max_new_tokens": 12}
    alone = [complete(make_core(model), p, seed=7 + i, **asked) for i, p in enumerate(prompts)]
    for prompt, completion in zip(prompts, alone, strict=True):
        expected = training_logprobs(model, prompt, completion.tokens)
        assert completion.logprobs == tuple(expected.tolist())
    for core in (
        make_core(model, chunk_tokens=4, max_step_tokens=64),
        make_core(model, num_drafts=2),
        make_core(model, num_pages=14, num_drafts=2, watermark_pages=0),
    ):
        for _ in range(2):  # the second time prefixes are cached
            collectors = [submit(core, str(i), p, seed=7 + i, **asked) for i, p in enumerate(prompts)]
            for among, one in zip(finish(core, *collectors), alone, strict=True):
                assert among.tokens == one.tokens
                assert among.logprobs == one.logprobs
    assert core.stats().preemptions > 0
    assert core.stats().cached_tokens > 0


def test_drafts_of_a_model_that_repeats_itself_are_accepted():
    """Where the prediction layer is right, a step gains several tokens."""
    model = build(engine_config(1), 1).double()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token ties: the lowest id wins, for the target and for the drafts
    core = make_core(model, num_drafts=3)
    completion = complete(core, [1, 2, 3], temperature=0, max_new_tokens=21)
    assert completion.tokens == (0,) * 21
    assert completion.accepted == completion.drafted > 0
    assert core.stats().steps <= 1 + 6


def test_abort_frees_pages_at_once_in_every_state():
    core = make_core(0, max_running=1, max_step_tokens=8, chunk_tokens=8)
    running = submit(core, "running", list(range(20)), max_new_tokens=50)
    waiting = submit(core, "waiting", [1, 2], max_new_tokens=5)
    core.step()
    assert core.allocator.num_used > 0
    assert core.abort("waiting")
    assert core.abort("running")
    assert not core.abort("running")
    assert [c.deltas[-1].finish for c in (running, waiting)] == [Finish.ABORTED] * 2
    assert core.allocator.num_used == core.tree.num_cached_pages
    assert not core.has_work


def test_stop_ids_and_lengths_end_a_reply():
    model = build(engine_config(1), 1).double()
    free = complete(make_core(model), [1, 2, 3], temperature=0, max_new_tokens=30)
    stop = free.tokens[6]
    first = free.tokens.index(stop)
    stopped = complete(make_core(model), [1, 2, 3], temperature=0, max_new_tokens=30, stop_ids=frozenset({stop}))
    assert stopped.tokens == free.tokens[: first + 1]
    assert (stopped.finish, stopped.stopped_by) == (Finish.STOP, stop)
    barred = complete(
        make_core(model), [1, 2, 3], temperature=0, max_new_tokens=30, stop_ids=frozenset({stop}), min_new_tokens=30
    )
    assert stop not in barred.tokens
    assert barred.finish is Finish.LENGTH


def test_prompt_logprobs_are_the_training_forward_s_even_when_the_prompt_is_cached():
    model = build(engine_config(0), 0).double()
    (prompt,) = random_documents(model.config, [33], 0)
    core = make_core(model, chunk_tokens=6, max_step_tokens=64)
    complete(core, prompt, max_new_tokens=1)
    scored = complete(core, prompt, max_new_tokens=1, prompt_logprobs=True)
    expected = training_logprobs(model, prompt[:1], prompt[1:])
    assert scored.prompt_logprobs is not None
    torch.testing.assert_close(torch.tensor(scored.prompt_logprobs).double(), expected, rtol=0, atol=1e-6)


def test_prompt_logprobs_of_a_request_that_is_restarted_are_complete():
    model = build(engine_config(0), 0).double()
    (prompt,) = random_documents(model.config, [33], 0)
    core = make_core(model, chunk_tokens=6, max_step_tokens=6, max_running=2)
    collector = submit(core, "a", prompt, max_new_tokens=0, prompt_logprobs=True)
    core.step()
    core.step()
    core.drop_cache()
    (completion,) = finish(core, collector)
    expected = training_logprobs(model, prompt[:1], prompt[1:])
    assert completion.tokens == ()
    torch.testing.assert_close(torch.tensor(completion.prompt_logprobs).double(), expected, rtol=0, atol=1e-6)


def test_new_weights_are_used_from_the_next_step_on_and_tokens_say_which():
    model = build(engine_config(0), 0).double()
    other = build(engine_config(0), 5).double()
    core = make_core(model)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    collector = submit(core, "a", prompt, temperature=0, max_new_tokens=12)
    while sum(len(d.tokens) for d in collector.deltas) < 5:
        core.step()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(other.state_dict()[name])
    core.version = 1
    core.drop_cache()
    (completion,) = finish(core, collector)
    assert completion.versions == (0,) * 5 + (1,) * 7
    expected = tuple(generate(other, [*prompt, *completion.tokens[:5]], Sampling(max_new_tokens=7)))
    assert completion.tokens[5:] == expected


def test_requests_that_cannot_be_served_are_refused_by_name():
    core = make_core(0, num_pages=8, max_running=1, max_waiting=1)
    vocab_size = core.model.config.vocab_size
    for tokens, sampling, error, words in (
        ([], {}, RequestError, "no tokens"),
        ([0, vocab_size], {}, RequestError, f"token id {vocab_size}"),
        ([0] * 32, {}, ContextLengthExceeded, "context of 32"),
        ([0] * 5, {"max_new_tokens": 28}, ContextLengthExceeded, "context of 32"),
        ([0], {"stop": ("x",)}, RequestError, "tokenizer"),
        ([0], {"logit_bias": {vocab_size: 1.0}}, RequestError, "logit_bias"),
    ):
        with pytest.raises(error, match=words):
            submit(core, "x", tokens, **sampling)
    submit(core, "a", [1])
    with pytest.raises(RequestError, match="in use"):
        submit(core, "a", [1])
    submit(core, "b", [1])
    with pytest.raises(Overloaded):
        submit(core, "c", [1])


@pytest.mark.parametrize("seed", range(2))
def test_pages_come_back_after_random_arrivals_aborts_and_preemptions(seed):
    draw, core = random.Random(seed), make_core(seed, num_pages=24, num_drafts=2, chunk_tokens=8, max_running=6)
    live = []
    for i in range(120):
        if draw.random() < 0.4:
            prompt = [draw.randrange(8) for _ in range(draw.randint(1, 40))]
            live.append((str(i), submit(core, str(i), prompt, max_new_tokens=draw.randint(1, 20), seed=i)))
        if live and draw.random() < 0.1:
            core.abort(draw.choice(live)[0])
        core.step()
        stats = core.stats()
        assert stats.pages_free + core.allocator.num_used == stats.pages_total
    finish(core, *(collector for _, collector in live))
    assert core.allocator.num_used == core.tree.num_cached_pages
    core.tree.clear()
    assert core.allocator.num_used == 0

"""Generation: greedy is the argmax of a full pass, sampling follows its distribution, limits hold."""

from importlib import import_module

import pytest
import torch
from builders import build, draw_config, run

from yunque.model.batch import PackedBatch
from yunque.model.generate import Sampling, generate, sample


def test_greedy_tokens_are_the_argmax_of_a_full_pass():
    config = draw_config(3, index_topk=4)
    model, prompt = build(config, 3), [1, 5, 2, 8, 3]
    tokens = list(generate(model, prompt, Sampling(max_new_tokens=20)))
    whole = [*prompt, *tokens]
    with torch.no_grad():
        logits = model.logits(run(model, PackedBatch.from_documents([whole])).hidden_TD)
    assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == tokens
    assert len(tokens) == 20


def test_prompts_longer_than_a_chunk_give_the_same_tokens(monkeypatch):
    config = draw_config(3, index_topk=4)
    model, prompt = build(config, 3), [i % 30 for i in range(25)]
    expected = list(generate(model, prompt, Sampling(max_new_tokens=10)))
    monkeypatch.setattr(import_module("yunque.model.generate"), "PREFILL_CHUNK", 7)
    assert list(generate(model, prompt, Sampling(max_new_tokens=10))) == expected


def test_the_stop_token_ends_and_is_yielded():
    model = build(draw_config(3), 3)
    tokens = list(generate(model, [1, 2], Sampling(max_new_tokens=20)))
    stop = tokens[5]
    stopped = list(generate(model, [1, 2], Sampling(max_new_tokens=20, stop_ids=frozenset({stop}))))
    assert stopped == tokens[: tokens.index(stop) + 1]


def test_the_generator_decides_the_draws():
    model, settings = build(draw_config(1), 1), Sampling(temperature=1.0, max_new_tokens=30)
    one, again, other = (
        list(generate(model, [1], settings, torch.Generator().manual_seed(seed))) for seed in (0, 0, 1)
    )
    assert one == again != other


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.7)])
def test_draws_follow_the_sampling_distribution(temperature, top_p):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    probabilities = (logits / temperature).softmax(0)
    if top_p < 1:
        kept = probabilities.cumsum(0) - probabilities < top_p
        probabilities = probabilities * kept / (probabilities * kept).sum()
    generator = torch.Generator().manual_seed(0)
    draws = [sample(logits, Sampling(temperature=temperature, top_p=top_p), generator) for _ in range(3000)]
    shares = torch.bincount(torch.tensor(draws), minlength=4) / 3000
    assert (shares - probabilities).abs().max() < 0.03
    assert not shares[probabilities == 0].any()


def test_a_small_top_p_keeps_the_best_token_and_ties_go_to_the_lowest():
    assert {sample(torch.tensor([0.0, 3.0, 3.0]), Sampling(temperature=1.0, top_p=1e-6)) for _ in range(20)} == {1}
    assert sample(torch.tensor([0.0, 3.0, 3.0]), Sampling()) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_impossible_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**values)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "no tokens"), ([1, -1], "run from -1 to 1"), ([1000], "1000"), ([1] * 300, "context of 256")],
)
def test_impossible_prompts_are_refused_at_once(prompt, message):
    with pytest.raises(ValueError, match=message):
        generate(build(draw_config(0)), prompt, Sampling())

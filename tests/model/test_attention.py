"""Latent attention in its absorbed and expanded forms, over the batch and over a cache."""

import math

import pytest
import torch
from builders import build, draw_config, largest_difference, random_batch, random_documents, run, run_in_steps

from yunque.model.attention import Attention
from yunque.model.batch import PackedBatch
from yunque.model.cache import PackedView
from yunque.model.forward import ForwardMode, Replay, Step
from yunque.ops.rotary import rotary_phases
from yunque.ops.visibility import Selection


@pytest.fixture(params=[True, False], ids=["absorbed", "expanded"])
def form(request, monkeypatch):
    """Every layer takes this form, whatever it costs."""
    monkeypatch.setattr(Attention, "_latent_is_cheaper", lambda *_: request.param)
    return request.param


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", [{}, {"attention": "dense"}], ids=["sparse", "dense"])
def test_both_forms_agree_over_a_cache_and_a_batch(seed, mode, form):
    """sglang-jax#1036: expanded attention over a latent cache repeated itself."""
    config = draw_config(seed, index_topk=5)
    model, documents = build(config, seed).double(), random_documents(config, [17, 6], seed)
    with torch.no_grad():
        out = run(model, PackedBatch.from_documents(documents), **mode)
    packed = model.logits(out.hidden_TD).log_softmax(-1)
    stepped = run_in_steps(model, documents, [[8, 2], [1, 1], [3, 3], [5, 0]], **mode)
    assert largest_difference(torch.cat(stepped), packed) < 1e-11
    assert form in (True, False)


def test_forms_give_the_same_output_and_gradients(monkeypatch):
    config = draw_config(4, index_topk=5)
    model, batch = build(config, 4).double(), random_batch(config, [17, 6, 30])
    results = []
    for absorbed in (True, False):
        monkeypatch.setattr(Attention, "_latent_is_cheaper", lambda *_, absorbed=absorbed: absorbed)
        for mode in ({}, {"attention": "dense"}):
            out = run(model, batch, **mode).hidden_TD
            grads = torch.autograd.grad(out.square().sum(), model.model.layers[0].self_attn.kv_b_proj.weight)
            results.append((out.detach(), *grads))
    for one, other in ((0, 2), (1, 3)):
        for a, b in zip(results[one], results[other], strict=True):
            assert largest_difference(a, b) < 1e-11


def test_one_head_and_two_tokens_by_hand():
    """transformers#46372: the last dimensions of query and key turn; scale 1 / sqrt(nope + rope)."""
    config = draw_config(
        0,
        hidden_size=4,
        num_attention_heads=1,
        q_lora_rank=4,
        kv_lora_rank=2,
        qk_nope_head_dim=2,
        qk_rope_head_dim=2,
        v_head_dim=2,
        index_head_dim=2,
        index_topk=8,
        rope_theta=100.0,
    )
    attention = Attention(config, 0, invariant=False)
    with torch.no_grad():
        attention.q_a_proj.weight.copy_(torch.eye(4))
        attention.q_b_proj.weight.copy_(torch.eye(4))
        attention.kv_a_proj_with_mqa.weight.copy_(torch.eye(4))
        attention.kv_b_proj.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [2, 0], [0, 3]]))
        attention.o_proj.weight.copy_(torch.eye(4)[:, :2])
        for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
            norm.weight.fill_(1.0)
    x = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, 0]])
    view = PackedView(PackedBatch.from_documents([[0, 0]]))
    phase = rotary_phases(view.positions_T, width=2, theta=100.0, dtype=torch.float32)
    out = attention(x, Step(view, phase, ForwardMode(attention="dense"), num_tokens=2, index_grad=True), None)

    query = x[1] / math.sqrt(3 / 4)  # RMS of (1, -1, 1, 0)
    keys = [(1.0, 1.0), (1.0, -1.0)]  # latents of RMS 1
    cos, sin = math.cos(1), math.sin(1)
    turned_query = (query[2] * cos - query[3] * sin, query[3] * cos + query[2] * sin)
    turned_keys = [(1.0, 1.0), (1 * cos - 0 * sin, 0 * cos + 1 * sin)]
    logits = torch.tensor(
        [
            (query[0] * k[0] + query[1] * k[1] + turned_query[0] * r[0] + turned_query[1] * r[1]) / math.sqrt(4)
            for k, r in zip(keys, turned_keys, strict=True)
        ]
    )
    weight = logits.softmax(0)
    expected = [2 * (weight[0] + weight[1]), 3 * (weight[0] - weight[1])]
    torch.testing.assert_close(out.out_TD[1, :2], torch.stack(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.out_TD[0, :2], torch.tensor([2.0, 3.0]), rtol=1e-4, atol=1e-4)


def test_selection_of_another_length_is_attended_to_exactly():
    """What a replay imposes is what is used: one kept key gives that key's value."""

    config = draw_config(2, num_hidden_layers=2, indexer_types=("full", "full"), first_k_dense_replace=2)
    model, batch = build(config, 2), random_batch(config, [10])
    own = Selection(torch.arange(10, dtype=torch.int32)[:, None])
    out = model(batch.tokens_T, PackedView(batch), ForwardMode(trace=True, replay=Replay({0: own, 1: own})))
    alone = torch.cat([run(model, PackedBatch.from_documents([[int(token)]])).hidden_TD for token in batch.tokens_T])
    assert largest_difference(out.hidden_TD, alone) < 1e-5

"""Latent attention in its absorbed and expanded forms, over the batch and over a cache."""

import math

import pytest
import torch
from builders import (
    build,
    draw_config,
    gradients,
    largest_difference,
    random_batch,
    random_documents,
    run,
    run_in_steps,
)

from yunque.model.attention import Attention
from yunque.model.batch import PackedBatch
from yunque.model.cache import PackedView, SequenceCache
from yunque.model.forward import ForwardMode, Replay, Step
from yunque.model.transformer import Transformer
from yunque.ops.blockwise.index_kl import index_kl
from yunque.ops.reference.index_kl import AttentionTarget
from yunque.ops.rotary import rotary_phases, rotate
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


# ---- imposed selections


def index_queries(model: Transformer) -> list[int]:
    """Layers in the order in which their indexers form queries, from now on."""
    asked: list[int] = []
    for number, layer in enumerate(model.model.layers):
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.wq_b.register_forward_hook(lambda *_, number=number: asked.append(number))
    return asked


def test_an_imposed_layer_gives_equal_output_and_neither_scores_nor_selects(monkeypatch):
    """Index queries are formed for the KL loss alone; the layer without an imposed selection goes on choosing."""
    config = draw_config(7, num_hidden_layers=3, indexer_types=("full", "shared", "full"), index_topk=4)
    model, batch = build(config, 7), random_batch(config, [30, 9])
    weights_T = torch.ones(batch.num_tokens)
    free, asked = run(model, batch, index_loss_T=weights_T), index_queries(model)
    chosen = free.trace.selections
    assert torch.equal(run(model, batch, replay=Replay({0: chosen[0]})).hidden_TD, free.hidden_TD)
    assert asked == [2]
    monkeypatch.setattr(Attention, "_select", lambda *_: pytest.fail("an imposed layer selects"))
    everything = Replay({0: chosen[0], 2: chosen[2]})
    for always_score in (False, True):
        out = run(model, batch, replay=everything, always_score=always_score)
        assert torch.equal(out.hidden_TD, free.hidden_TD)
        assert out.trace.selections == {0: chosen[0], 1: chosen[0], 2: chosen[2]}
    assert asked == [2]
    out = run(model, batch, replay=everything, index_loss_T=weights_T)
    assert asked == [2, 0, 2]
    assert torch.equal(out.hidden_TD, free.hidden_TD)
    assert torch.equal(out.side.index_kl, free.side.index_kl)


@pytest.mark.parametrize("is_joined", [False, True])
@torch.no_grad()
def test_an_imposed_layer_writes_the_index_keys_that_later_tokens_choose_from(is_joined):
    config = draw_config(3, num_hidden_layers=3, indexer_types=("full", "shared", "full"), index_topk=4)
    model = build(config, 3).double()
    tokens = torch.tensor(random_documents(config, [40])[0])
    if is_joined:
        model.join_projections()
    results, replay = [], None
    for _ in range(2):
        cache = SequenceCache(config, num_sequences=1, capacity=40, dtype=torch.float64)
        first = model(tokens[:25], cache.step([25]), ForwardMode(trace=True, replay=replay))
        second = model(tokens[25:], cache.step([15]), ForwardMode(trace=True))
        results.append((first, second))
        replay = Replay(first.trace.selections)
    free, imposed = results
    for before, after in zip(free, imposed, strict=True):
        assert largest_difference(after.hidden_TD, before.hidden_TD) < 1e-12
        for layer, selection in before.trace.selections.items():
            assert torch.equal(after.trace.selections[layer].positions_TK, selection.positions_TK)


def test_the_kl_of_an_imposed_layer_is_index_kl_over_the_imposed_keys():
    """A window of the last keys, which no indexer chose; index_kl is called with queries, keys and rows made here."""
    config = draw_config(4, num_hidden_layers=1, first_k_dense_replace=1, index_topk=4)
    model, batch = build(config, 4).double(), random_batch(config, [30, 9, 2])
    weights_T = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    window_TK = batch.positions_T[:, None] + torch.arange(-3, 1)
    window_TK = window_TK.masked_fill(window_TK < 0, 99).sort(dim=1).values
    window = Selection(window_TK.masked_fill(window_TK == 99, -1).int())

    block, view = model.model.layers[0], PackedView(batch)
    attention, layout = block.self_attn, config.rope_interleave
    phase = rotary_phases(view.positions_T, width=config.qk_rope_head_dim, theta=config.rope_theta, dtype=torch.float64)
    x = block.input_layernorm(model.model.embed_tokens(batch.tokens_T))
    latent = attention.q_a_layernorm(attention.q_a_proj(x))
    nope, rope = (
        attention.q_b_proj(latent).unflatten(1, (-1, config.qk_head_dim)).tensor_split([-config.qk_rope_head_dim], -1)
    )
    up = attention.kv_b_proj.weight.unflatten(0, (config.num_attention_heads, -1))[:, : config.qk_nope_head_dim]
    folded = torch.cat((torch.einsum("thn,hnc->thc", nope, up), rotate(rope, phase, interleaved=layout)), -1)
    low, k_rope = attention.kv_a_proj_with_mqa(x).tensor_split([config.kv_lora_rank], -1)
    rows = torch.cat((attention.kv_a_layernorm(low), rotate(k_rope[:, None], phase, interleaved=layout)[:, 0]), -1)
    query, keys = attention.indexer.queries(x, latent, phase), attention.indexer.keys(x, phase)
    target = AttentionTarget(folded.detach(), rows.detach(), config.qk_head_dim**-0.5)
    expected = index_kl(
        query.q_TJd, keys, query.w_TJ, [target], view.visibility, weights_T=weights_T, selection=window
    ).sum
    expected.backward()
    right = gradients(model)

    got = run(model, batch, replay=Replay({0: window}), index_loss_T=weights_T).side.index_kl
    assert got.item() == pytest.approx(expected.item(), rel=1e-12)
    got.backward()
    mine = gradients(model)
    assert mine.keys() == right.keys()
    assert all(".indexer." in name for name in mine)
    for name, gradient in right.items():
        assert largest_difference(mine[name], gradient) < 1e-12, name
    chosen = run(model, batch, index_loss_T=weights_T).side.index_kl
    assert abs(chosen.item() - got.item()) > 1e-2

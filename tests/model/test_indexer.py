"""The lightning indexer by its formula, its rotary layout, and its precision in narrow models."""

import math

import pytest
import torch
from builders import build, draw_config, random_batch, run

from yunque.model.indexer import Indexer
from yunque.ops.reference.selection import index_scores
from yunque.ops.rotary import rotary_phases


def identity_indexer(interleaved: bool) -> Indexer:
    """One head of width 8, rotary width 4, whose projections copy their input."""
    config = draw_config(
        0,
        hidden_size=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        index_n_heads=1,
        index_head_dim=8,
        indexer_rope_interleave=interleaved,
        rope_theta=100.0,
    )
    indexer = Indexer(config, invariant=False)
    with torch.no_grad():
        indexer.wq_b.weight.copy_(torch.eye(8))
        indexer.wk.weight.copy_(torch.eye(8))
        indexer.k_norm.weight.fill_(1)
        indexer.k_norm.bias.zero_()
        indexer.weights_proj.weight.fill_(1)
    return indexer


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_first_dimensions_turn_in_the_layout_of_the_key(interleaved):
    """transformers#46842, ik_llama.cpp#2099: one layout was hard-coded, right or wrong."""
    indexer = identity_indexer(interleaved)
    phase = rotary_phases(torch.tensor([1]), width=4, theta=100.0, dtype=torch.float32)
    latent = torch.arange(1.0, 9.0)[None]
    query = indexer.queries(latent, latent, phase)
    (c0, s0), (c1, s1) = ((math.cos(a), math.sin(a)) for a in (1.0, 0.1))
    if interleaved:
        turned = [1 * c0 - 2 * s0, 2 * c0 + 1 * s0, 3 * c1 - 4 * s1, 4 * c1 + 3 * s1]
    else:
        turned = [1 * c0 - 3 * s0, 2 * c1 - 4 * s1, 3 * c0 + 1 * s0, 4 * c1 + 2 * s1]
    torch.testing.assert_close(query.q_TJd[0, 0], torch.tensor([*turned, 5.0, 6.0, 7.0, 8.0]))
    # Head weight: the sum of the inputs by 1 / sqrt(heads) and 1 / sqrt(width).
    assert query.w_TJ.item() == pytest.approx(36 / math.sqrt(8), rel=1e-6)


def test_keys_are_normed_by_mean_and_variance_before_they_turn():
    """ik_llama.cpp#2063: the key norm is a LayerNorm with epsilon 1e-6, not an RMSNorm."""
    indexer = identity_indexer(True)
    still = rotary_phases(torch.tensor([0]), width=4, theta=100.0, dtype=torch.float32)
    x = 1e-3 * torch.arange(1.0, 9.0)[None]
    variance = x.var(correction=0)
    torch.testing.assert_close(indexer.keys(x, still), (x - x.mean()) / (variance + 1e-6).sqrt())


def test_scores_are_the_weighted_relu_products():
    config = draw_config(4, index_n_heads=3)
    model, batch = build(config, 4).double().requires_grad_(False), random_batch(config, [12])
    indexer = model.model.layers[0].self_attn.indexer
    x = torch.randn(12, config.hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    latent = torch.randn(12, config.q_lora_rank, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    phase = rotary_phases(
        batch.positions_T, width=config.qk_rope_head_dim, theta=config.rope_theta, dtype=torch.float64
    )
    query, keys = indexer.queries(x, latent, phase), indexer.keys(x, phase)
    scores = index_scores(query.q_TJd, keys, query.w_TJ)
    scale = config.index_n_heads**-0.5 * config.index_head_dim**-0.5
    weight = x @ indexer.weights_proj.weight.T
    for t in (0, 5, 11):
        for s in (0, 3, 11):
            total = sum(float(weight[t, j]) * max(float(query.q_TJd[t, j] @ keys[s]), 0.0) for j in range(3))
            assert scores[t, s].item() == pytest.approx(total * scale, rel=1e-10, abs=1e-12)


def test_the_indexer_sends_no_gradient_to_its_inputs():
    indexer = identity_indexer(True)
    x = torch.randn(3, 8).requires_grad_()
    phase = rotary_phases(torch.arange(3), width=4, theta=100.0, dtype=torch.float32)
    query = indexer.queries(x, x, phase)
    (query.q_TJd.sum() + query.w_TJ.sum() + indexer.keys(x, phase).sum()).backward()
    assert x.grad is None
    assert indexer.wq_b.weight.grad is not None


def test_head_weights_are_an_fp32_product_in_narrow_models():
    """axolotl#3832: rounding the product to bf16 flips near-ties between keys."""
    config = draw_config(6, index_n_heads=16, hidden_size=32)
    model = build(config, 6).bfloat16()
    indexer = model.model.layers[0].self_attn.indexer
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    latent = torch.randn(40, config.q_lora_rank, generator=torch.Generator().manual_seed(1)).bfloat16()
    phase = rotary_phases(torch.arange(40), width=config.qk_rope_head_dim, theta=1e4, dtype=torch.bfloat16)
    got = indexer.queries(x, latent, phase).w_TJ
    scale = 16**-0.5 * config.index_head_dim**-0.5
    expected = x.double() @ indexer.weights_proj.weight.double().T * scale
    rounded = (x @ indexer.weights_proj.weight.T).double() * scale
    assert got.dtype == torch.float32
    assert (got.double() - expected).abs().max() < 1e-6
    assert (rounded - expected).abs().max() > 1e-4


def test_narrow_models_select_what_fp32_head_weights_select():
    """axolotl#3832: the selected sets of a bf16 model, against whole-matrix scores with fp32 head weights."""
    config = draw_config(6, index_n_heads=16, index_topk=6, indexer_types=())
    model, batch = build(config, 6).bfloat16(), random_batch(config, [50])
    out = run(model, batch)
    attention = model.model.layers[0].self_attn
    x = model.model.layers[0].input_layernorm(model.model.embed_tokens(batch.tokens_T))
    latent = attention.q_a_layernorm(attention.q_a_proj(x))
    phase = rotary_phases(batch.positions_T, width=config.qk_rope_head_dim, theta=config.rope_theta, dtype=x.dtype)
    query, keys = attention.indexer.queries(x, latent, phase), attention.indexer.keys(x, phase)
    weight = x.float() @ attention.indexer.weights_proj.weight.float().T
    assert keys.dtype == query.q_TJd.dtype == torch.bfloat16
    scores = torch.einsum("tj,tjs->ts", weight, torch.einsum("tjd,sd->tjs", query.q_TJd.float(), keys.float()).relu())
    for t in range(50):
        best = sorted(range(t + 1), key=lambda s, t=t: (-scores[t, s].item(), s))[:6]
        kept = out.trace.selections[0].positions_TK[t]
        assert sorted(best) == kept[kept >= 0].tolist()

"""Agreement with transformers on drawn architectures: logits, layers, selections, gradients, to 1e-5 in fp32.

Their selection is imposed on ours where it breaks a near-tie otherwise. Their indexer has no gradient and their model
no prediction layer: those are checked against the second model of this folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import build, draw_config, gradients, largest_difference, random_documents, run, run_in_steps
from near_ties import Theirs, agreed_selections

from yunque.model.batch import PackedBatch
from yunque.model.config import ModelConfig
from yunque.model.transformer import Transformer

pytestmark = pytest.mark.xdist_group("transformers")

TOLERANCE = 1e-5


def drawn(seed: int, **fixed: Any) -> ModelConfig:
    """An architecture that transformers has too; ties among 16 index heads are rare."""
    heads = 16 if seed % 2 else 32
    fixed = {"index_n_heads": heads, "num_nextn_predict_layers": 0, "latent_norm_eps": 1e-6} | fixed
    return draw_config(seed, **fixed)


def compare(ours: Transformer, batch: PackedBatch) -> tuple[int, int]:
    """All comparisons on one batch; (rows whose selection was imposed, rows compared)."""
    theirs = Theirs.of(ours)
    logits = theirs.logits(batch)
    replay, num_imposed, compared = agreed_selections(ours, theirs, batch)
    out = run(ours, batch, replay=replay)
    for layer, hidden in enumerate(theirs.layers):
        assert largest_difference(out.trace.hidden[layer], hidden) < TOLERANCE, f"layer {layer}"
    got = ours.logits(out.hidden_TD)
    assert largest_difference(got, logits) < TOLERANCE

    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) / logits.shape[1]
    (got * upstream).sum().backward()
    (logits * upstream).sum().backward()
    mine, right = gradients(ours), gradients(theirs.model)
    assert mine.keys() == right.keys()
    assert not any(".indexer." in name for name in mine)
    for name, gradient in right.items():
        assert largest_difference(mine[name], gradient) < TOLERANCE, name
    return num_imposed, compared


def lengths_around(topk: int) -> Iterator[Sequence[int]]:
    """Single documents shorter than, equal to and longer than index_topk, and several packed into one row."""
    yield from ([max(topk - 1, 1)], [topk], [topk + 1], [3 * topk + 2])
    yield [topk + 4, 1, 2 * topk + 1, topk - 1]


def test_drawn_architectures_agree_in_logits_layers_selections_and_gradients(record_property):
    """mlx-lm#1453: parity at three times index_topk. ik_llama.cpp#2099, 1bit-MONSTER#2421: and at a topk of 2."""
    num_imposed = compared = 0
    for seed in range(12):
        config = drawn(seed, **({"index_topk": 2} if seed == 0 else {}))
        ours = build(config, seed)
        for number, lengths in enumerate(lengths_around(config.index_topk)):
            batch = PackedBatch.from_documents(random_documents(config, lengths, seed + number))
            counts = compare(ours, batch)
            num_imposed, compared = num_imposed + counts[0], compared + counts[1]
    record_property("selections_imposed", f"{num_imposed} of {compared}")
    print(f"selections imposed: {num_imposed} of {compared} (token, layer) pairs")
    assert num_imposed <= 0.01 * compared


def test_structural_ties_agree_once_their_choice_is_imposed():
    """With few index heads many scores are exactly 0, and their top-k keeps any of them."""
    num_imposed = 0
    for seed in range(4):
        config = drawn(seed, index_n_heads=2, index_topk=4)
        num_imposed += compare(build(config, seed), PackedBatch.from_documents(random_documents(config, [40])))[0]
    assert num_imposed > 0


@pytest.mark.parametrize("lengths", [[20], [9, 17]])
@pytest.mark.parametrize(
    "fixed",
    [
        {"num_hidden_layers": 4, "indexer_types": ("full", "shared", "shared", "full")},
        {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 3},
        {"num_attention_heads": 7, "qk_nope_head_dim": 12, "v_head_dim": 5},
        {"num_attention_heads": 1, "qk_nope_head_dim": 4, "v_head_dim": 24},
        {"norm_topk_prob": False, "n_shared_experts": 3, "first_k_dense_replace": 0},
    ],
    ids=["shared indexers", "groups", "seven heads", "wide values", "plain weights"],
)
def test_named_shapes_agree(fixed, lengths):
    """ik_llama.cpp#2063: shared layers attend to the selection of the full layer below."""
    config = drawn(5, index_topk=6, **fixed)
    batch = PackedBatch.from_documents(random_documents(config, lengths, 3))
    assert compare(build(config, 5), batch)[0] <= 1


@pytest.mark.parametrize("seed", range(3))
def test_packed_row_agrees_with_their_separate_rows(seed):
    config = drawn(seed, index_topk=5)
    ours, documents = build(config, seed), random_documents(config, [13, 4, 1, 22], seed)
    theirs = Theirs.of(ours)
    with torch.no_grad():
        separate = [theirs.logits(PackedBatch.from_documents([document])) for document in documents]
        batch = PackedBatch.from_documents(documents)
        assert largest_difference(theirs.logits(batch), torch.cat(separate)) < TOLERANCE
        replay, num_imposed, _ = agreed_selections(ours, theirs, batch)
        got = ours.logits(run(ours, batch, replay=replay).hidden_TD)
    assert num_imposed <= 1
    assert largest_difference(got, torch.cat(separate)) < TOLERANCE


def test_decoding_over_our_cache_agrees_with_their_one_pass():
    """sglang-jax#1036: expanded attention over a latent cache. transformers#44052: more than one token a step."""
    config = drawn(3, index_topk=5)
    ours, documents = build(config, 3), random_documents(config, [23, 11], 3)
    theirs = Theirs.of(ours)
    got = run_in_steps(ours, documents, [[9, 4], [1, 1], [3, 0], [2, 2], [1, 1], [1, 3], [6, 0]])
    for document, mine in zip(documents, got, strict=True):
        with torch.no_grad():
            right = theirs.logits(PackedBatch.from_documents([document])).log_softmax(-1)
        assert largest_difference(mine, right) < TOLERANCE


@pytest.mark.parametrize("seed", range(4))
def test_deepseek_shaped_configs_agree_with_the_half_split_indexer(seed):
    """transformers#46842, ik_llama.cpp#2099: which layout the indexer turns is a key of the config; without the key
    it is half-split."""
    from transformers import DeepseekV32Config

    drawn_config = drawn(seed, index_topk=4, indexer_types=(), model_type="deepseek_v32")
    settings = drawn_config.to_hf() | {"indexer_rope_interleave": None}
    config = ModelConfig.from_hf(DeepseekV32Config(**settings).to_dict())
    config = replace(config, latent_norm_eps=1e-6)
    assert config == replace(drawn_config, indexer_rope_interleave=False, indexer_types=config.indexer_types)
    batch = PackedBatch.from_documents(random_documents(config, [21, 6], seed))
    assert compare(build(config, seed), batch)[0] <= 1


def test_their_class_ignores_keys_that_ours_obeys():
    """Their GLM class turns the indexer's pairs as neighbours whatever the config says; ours does what it says."""
    shape = {"qk_rope_head_dim": 8, "index_head_dim": 16, "index_topk": 3, "indexer_types": ()}
    config = drawn(1, indexer_rope_interleave=False, **shape)
    ours, batch = build(config, 1), PackedBatch.from_documents(random_documents(config, [30], 1))
    theirs = Theirs.of(ours)
    with torch.no_grad():
        logits = theirs.logits(batch)
        obedient = ours.logits(run(ours, batch).hidden_TD)
        ignorant = build(replace(config, indexer_rope_interleave=True), 1)
        assert largest_difference(ignorant.logits(run(ignorant, batch).hidden_TD), logits) < TOLERANCE
    assert largest_difference(obedient, logits) > 1e-3


def test_latent_epsilon_is_a_choice():
    """transformers#48762, vllm#35515: their latent norms use 1e-6, the trainer and the servers rms_norm_eps."""
    config = drawn(2, index_topk=3, rms_norm_eps=1e-5)
    ours, batch = build(config, 2), PackedBatch.from_documents(random_documents(config, [12], 1))
    with torch.no_grad():
        for block in ours.model.layers:
            block.self_attn.kv_a_proj_with_mqa.weight.mul_(3e-3)
        logits = Theirs.of(ours).logits(batch)
        assert largest_difference(ours.logits(run(ours, batch).hidden_TD), logits) < TOLERANCE
        served = Transformer(replace(config, latent_norm_eps=None))
        served.load_state_dict(ours.state_dict())
        assert largest_difference(served.logits(run(served, batch).hidden_TD), logits) > 1e-3

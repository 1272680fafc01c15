"""Every impossible shape is refused by name; released configs are read and written without loss."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from builders import draw_config

from yunque.core.errors import ConfigError
from yunque.model.config import ModelConfig, index_share_schedule
from yunque.model.presets import PRESETS, preset

NANO = preset("nano")

#: The keys of GLM-5.2's released config.json that decide its numbers.
GLM_5_2 = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 3,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0; it must be at least 1"),
        ({"index_topk": -1}, "index_topk is -1"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2; valid: 0, 1"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace 4 is outside 0..3"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace -1 is outside 0..3"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ({"index_head_dim": 4}, "index_head_dim 4 is below qk_rope_head_dim 8"),
        ({"n_routed_experts": 7}, "n_routed_experts 7 is not divisible by n_group 2"),
        ({"topk_group": 3}, r"topk_group 3 is outside 1..2 \(n_group\)"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 is outside 1..4 reachable experts"),
        ({"latent_norm_eps": 0.0}, "latent_norm_eps is 0.0; it must be a number above 0"),
        ({"indexer_types": ("full",)}, "indexer_types has 1 entries for 3 layers"),
        ({"indexer_types": ("shared", "full", "full")}, r"indexer_types\[0\] is 'shared'"),
    ],
)
def test_impossible_shapes_are_refused_with_value_and_choices(values, message):
    with pytest.raises(ConfigError, match=message):
        replace(NANO, **values)


def test_released_config_is_read_as_the_preset():
    assert ModelConfig.from_hf(GLM_5_2) == preset("glm-5.2")
    older = {key: value for key, value in GLM_5_2.items() if not key.startswith(("index_topk_f", "index_skip"))}
    older |= {"rope_parameters": {"rope_theta": 1e6}, "max_position_embeddings": 202752}
    del older["index_share_for_mtp_iteration"]
    assert ModelConfig.from_hf(older).indexer_types == ("full",) * 78
    assert replace(ModelConfig.from_hf(older), indexer_types=()) == preset("glm-5")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_the_round_trip_through_json(name):
    config = preset(name)
    back = ModelConfig.from_hf(json.loads(json.dumps(config.to_hf())))
    types = tuple("full" if config.has_indexer(i) else "shared" for i in range(config.num_hidden_layers))
    assert back == replace(config, indexer_types=types)
    assert back.to_hf() == config.to_hf()


@pytest.mark.parametrize("seed", range(20))
def test_drawn_configs_survive_the_round_trip_through_json(seed):
    config = draw_config(seed, latent_norm_eps=[None, 1e-6][seed % 2], indexer_rope_interleave=seed % 3 == 0)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_written_config_names_every_field():
    written = NANO.to_hf()
    elsewhere = {"rope_theta", "latent_norm_eps"}
    assert {f.name for f in fields(NANO)} - elsewhere <= set(written)
    assert written["rope_parameters"]["rope_theta"] == NANO.rope_theta
    assert written["head_dim"] == NANO.qk_rope_head_dim
    assert "latent_norm_eps" not in written
    assert replace(NANO, latent_norm_eps=1e-6).to_hf()["latent_norm_eps"] == 1e-6


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; this model supports 'sigmoid' only"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype is 'bfloat16'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 40}}, "rope type 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, "rope type 'yarn'"),
        ({"indexer_types": ["full", "fulll"]}, "indexer type 'fulll' is unknown; valid: F, S, full, shared"),
        ({"index_topk_pattern": "FXS"}, "indexer type 'X'"),
        ({"mlp_layer_types": ["sparse"] + ["dense"] * 77}, "dense layers followed by sparse"),
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 77}, "first_k_dense_replace 3 disagrees"),
        ({"model_type": "glm5_next"}, "model_type is 'glm5_next'; valid: glm_moe_dsa, deepseek_v32"),
        ({"vocab_size": None, "hidden_size": None}, "config lacks vocab_size, hidden_size"),
        ({"num_hidden_layers": None}, "config lacks num_hidden_layers"),
        # Readers disagree about a missing base (10,000 or 1,000,000) and a missing count (3 or 1): neither is guessed.
        ({"rope_parameters": None}, "config lacks rope_theta"),
        ({"first_k_dense_replace": None}, "config lacks first_k_dense_replace"),
    ],
)
def test_keys_that_ask_for_other_numbers_are_refused_not_ignored(values, message):
    data = {key: value for key, value in (GLM_5_2 | values).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(data)


def read(**values: Any) -> ModelConfig:
    return ModelConfig.from_hf({key: value for key, value in (GLM_5_2 | values).items() if value is not None})


def test_keys_that_other_readers_ignore_are_obeyed():
    assert read(indexer_rope_interleave=False).indexer_rope_interleave is False
    assert read(rope_interleave=False).rope_interleave is False
    assert read(index_share_for_mtp_iteration=False).index_share_for_mtp_iteration is False
    assert read(num_nextn_predict_layers=0).num_nextn_predict_layers == 0
    assert read(rope_parameters=None, rope_theta=5e5).rope_theta == 5e5
    assert read(n_group=4, topk_group=2).topk_group == 2


def test_absent_keys_mean_what_their_family_computes():
    """transformers#46842: GLM's indexer turns neighbouring pairs, DeepSeek's halves, and DeepSeek has no key."""
    assert read(indexer_rope_interleave=None).indexer_rope_interleave is True
    assert read(indexer_rope_interleave=None, model_type="deepseek_v32").indexer_rope_interleave is False
    assert read(num_nextn_predict_layers=None).num_nextn_predict_layers == 0
    assert read(eos_token_id=None).eos_token_id == ()
    assert read(eos_token_id=7).eos_token_id == (7,)


def test_misleading_head_dim_is_not_read():
    """prime-rl#2851: GLM-5.2's config carries a head_dim of 192; the rotary width is qk_rope_head_dim."""
    assert read(head_dim=192) == read(head_dim=64) == read(head_dim=None)


def test_shared_indexers_by_list_then_pattern_then_schedule():
    """MaxText#4832 had 0, 4, 8, ...; the released pattern is 0, 1, 2, 6, 10, ..., 74."""
    full = [i for i, kind in enumerate(index_share_schedule(78, freq=4, offset=3)) if kind == "full"]
    assert full == [0, 1, *range(2, 78, 4)]
    assert len(full) == 21
    assert read().indexer_types == index_share_schedule(78, freq=4, offset=3)
    assert read(index_topk_freq=None, index_skip_topk_offset=None).indexer_types == ("full",) * 78
    assert read(index_skip_topk_offset=None).indexer_types == index_share_schedule(78, freq=4, offset=2)
    short = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "index_topk_pattern": "FSSF"}
    assert read(**short).indexer_types == ("full", "shared", "shared", "full")
    explicit = ["full", "full", "shared", "shared"]
    assert read(**short, indexer_types=explicit).indexer_types == tuple(explicit)


def test_layers_know_their_kind():
    config = replace(NANO, indexer_types=("full", "shared", "full"))
    assert [config.has_indexer(i) for i in range(4)] == [True, False, True, True]
    assert [config.is_dense(i) for i in range(4)] == [True, False, False, False]
    assert (config.qk_head_dim, config.latent_dim, config.num_layers_with_mtp) == (16, 24, 4)
    assert config.latent_eps == config.rms_norm_eps
    assert replace(config, latent_norm_eps=1e-6).latent_eps == 1e-6

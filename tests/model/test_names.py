"""Every tensor has one role and one shape, in the checkpoint and in the module."""

from math import prod

import pytest
from builders import draw_config

from yunque.model.names import FP32_ROLES, Role, module_specs, role_of, tensor_specs
from yunque.model.transformer import Transformer


@pytest.mark.parametrize("seed", range(10))
def test_module_state_equals_the_specification_on_drawn_architectures(seed):
    config = draw_config(seed, num_nextn_predict_layers=seed % 2)
    state = Transformer(config).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        name: spec.shape for name, spec in module_specs(config).items()
    }
    per_expert, stacked = tensor_specs(config), module_specs(config)
    assert sum(prod(s.shape) for s in per_expert.values()) == sum(prod(s.shape) for s in stacked.values())


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.embed_tokens.weight", Role.EMBEDDING),
        ("lm_head.weight", Role.HEAD),
        ("model.norm.weight", Role.NORM),
        ("model.layers.3.input_layernorm.weight", Role.NORM),
        ("model.layers.3.self_attn.kv_a_layernorm.weight", Role.NORM),
        ("model.layers.3.self_attn.q_b_proj.weight", Role.Q_UP),
        ("model.layers.3.self_attn.kv_b_proj.weight", Role.KV_UP),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", Role.ATTENTION),
        ("model.layers.3.self_attn.indexer.wq_b.weight", Role.INDEXER),
        ("model.layers.3.self_attn.indexer.weights_proj.weight", Role.INDEXER_HEADS),
        ("model.layers.3.self_attn.indexer.k_norm.bias", Role.INDEXER_NORM),
        ("model.layers.3.mlp.gate.weight", Role.ROUTER),
        ("model.layers.3.mlp.gate.e_score_correction_bias", Role.ROUTER_BIAS),
        ("model.layers.3.mlp.gate_proj.weight", Role.MLP),
        ("model.layers.3.mlp.experts.17.down_proj.weight", Role.EXPERT),
        ("model.layers.3.mlp.experts.gate_up_proj", Role.EXPERT),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", Role.SHARED_EXPERT),
        ("model.layers.78.eh_proj.weight", Role.MTP_PROJECTION),
        ("model.layers.78.shared_head.norm.weight", Role.NORM),
        ("model.layers.78.enorm.weight", Role.NORM),
    ],
)
def test_roles(name, role):
    assert role_of(name) is role


def test_a_name_of_another_model_has_no_role():
    # ATOM#451, sglang-jax#1111: the FP8 release excludes a module of this name, which does not exist.
    with pytest.raises(KeyError, match="indexers_proj"):
        role_of("model.layers.3.self_attn.indexers_proj")


def test_only_the_router_stays_fp32():
    assert {Role.ROUTER, Role.ROUTER_BIAS} == FP32_ROLES
    kept = [name for name, spec in tensor_specs(draw_config(0)).items() if spec.keeps_fp32]
    assert all(".mlp.gate." in name for name in kept)

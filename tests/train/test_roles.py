"""One table decides what happens to each parameter."""

from __future__ import annotations

import pytest

from yunque.core.errors import ConfigError
from yunque.model.names import Role, module_specs
from yunque.model.presets import preset
from yunque.train.roles import BACKBONE_ROLES, INDEXER_ROLES, MatrixLayout, OptimizerConfig, assign, by_role

GLM5 = preset("glm-5")


def _layouts(optimizer: OptimizerConfig) -> dict[str, MatrixLayout | None]:
    return {a.name.removeprefix("model.layers.3."): a.layout for a in assign(module_specs(GLM5), optimizer, GLM5)}


def test_muon_split_cuts_the_up_projections_of_glm5_into_the_blocks_of_the_report() -> None:
    layouts = _layouts(OptimizerConfig())
    assert layouts["self_attn.q_b_proj.weight"] == MatrixLayout(64, (256,), 2048)
    assert layouts["self_attn.kv_b_proj.weight"] == MatrixLayout(64, (192, 256), 512)
    assert str(layouts["self_attn.kv_b_proj.weight"]) == "64 x [192, 512] + 64 x [256, 512]"
    assert layouts["self_attn.o_proj.weight"] == MatrixLayout(1, (6144,), 64 * 256)


def test_without_split_the_up_projections_are_whole_matrices() -> None:
    layouts = _layouts(OptimizerConfig(muon_split=False))
    assert layouts["self_attn.q_b_proj.weight"] == MatrixLayout(1, (64 * 256,), 2048)
    assert layouts["self_attn.kv_b_proj.weight"] == MatrixLayout(1, (64 * 448,), 512)


def test_every_expert_is_a_matrix_of_its_own_with_gate_and_up_apart() -> None:
    layouts = _layouts(OptimizerConfig())
    assert layouts["mlp.experts.gate_up_proj"] == MatrixLayout(512, (2048,), 6144)
    assert layouts["mlp.experts.down_proj"] == MatrixLayout(256, (6144,), 2048)


def test_muon_takes_all_but_embedding_vectors_and_what_the_config_keeps_from_it() -> None:
    rows = {row.role: row for row in by_role(assign(module_specs(GLM5), OptimizerConfig(), GLM5))}
    adamw = {role for role, row in rows.items() if row.method == "adamw"}
    assert adamw == {Role.EMBEDDING, Role.HEAD, Role.NORM, Role.ROUTER, Role.INDEXER_NORM}
    assert {role for role, row in rows.items() if row.weight_decay == 0} == {Role.NORM, Role.INDEXER_NORM}
    assert Role.ROUTER_BIAS not in rows
    assert sum(row.parameters for row in rows.values()) == pytest.approx(753.9e9, rel=1e-3)


def test_options_move_experts_head_and_router_and_adamw_takes_everything() -> None:
    moved = OptimizerConfig(experts="adamw", head="muon", router="muon")
    rows = {row.role: row.method for row in by_role(assign(module_specs(GLM5), moved, GLM5))}
    assert (rows[Role.EXPERT], rows[Role.HEAD], rows[Role.ROUTER]) == ("adamw", "muon", "muon")
    assert {a.method for a in assign(module_specs(GLM5), OptimizerConfig(kind="adamw"), GLM5)} == {"adamw"}


@pytest.mark.parametrize("trainable", [INDEXER_ROLES, BACKBONE_ROLES])
def test_roles_outside_the_stage_are_frozen(trainable: frozenset[Role]) -> None:
    rows = assign(module_specs(preset("nano")), OptimizerConfig(), preset("nano"), trainable)
    assert all((a.method != "frozen") == (a.role in trainable) for a in rows)
    assert all(a.weight_decay == 0 for a in rows if a.method == "frozen")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ],
)
def test_impossible_constants_are_refused_by_name(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**values)

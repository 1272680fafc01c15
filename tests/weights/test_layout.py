"""Per-expert tensors are views that cover the stacked parameters exactly."""

from __future__ import annotations

import pytest
import torch
from sample_checkpoints import NANO, SHARED, random_state

from yunque.core.errors import CheckpointError
from yunque.model.names import tensor_specs
from yunque.weights.layout import checkpoint_views, keeps_fp32


@pytest.mark.parametrize("config", [NANO, SHARED], ids=["own indexers", "shared indexers"])
def test_views_have_exactly_the_checkpoints_names_and_shapes(config):
    views = {name: tuple(view.shape) for name, _, view in checkpoint_views(random_state(config))}
    assert views == {name: spec.shape for name, spec in tensor_specs(config).items()}


def test_views_cover_every_element_once():
    state = {name: torch.zeros_like(tensor) for name, tensor in random_state(NANO).items()}
    for _, _, view in checkpoint_views(state):
        view += 1
    assert all(torch.all(tensor == 1) for tensor in state.values())


def test_gate_is_the_first_half_of_the_stacked_rows():
    gate_up_EID = torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)
    state = {"l.mlp.experts.gate_up_proj": gate_up_EID, "l.mlp.experts.down_proj": torch.zeros(2, 3, 2)}
    views = {name: view for name, _, view in checkpoint_views(state)}
    assert torch.equal(views["l.mlp.experts.1.gate_proj.weight"], gate_up_EID[1, :2])
    assert torch.equal(views["l.mlp.experts.1.up_proj.weight"], gate_up_EID[1, 2:])


def test_half_of_the_experts_is_refused():
    with pytest.raises(CheckpointError, match=r"without 'l\.mlp\.experts\.down_proj'"):
        list(checkpoint_views({"l.mlp.experts.gate_up_proj": torch.zeros(1, 2, 1)}))


def test_only_router_and_its_bias_stay_float32():
    kept = {name.split(".mlp.")[-1] for name in tensor_specs(NANO) if keeps_fp32(name)}
    assert kept == {"gate.weight", "gate.e_score_correction_bias"}
    assert not keeps_fp32("a name that no model has")

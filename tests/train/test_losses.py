"""A stage's losses: cut where weights change, and reaching only what the stage trains."""

from __future__ import annotations

import pytest
import torch
from training_runs import nano_run

from yunque.model.batch import PackedBatch
from yunque.model.init import init_weights
from yunque.model.names import module_specs
from yunque.model.objectives import IndexerWarmupLoss, LanguageModelLoss
from yunque.model.transformer import Transformer
from yunque.train.gradients import GradientSum
from yunque.train.losses import compared_attentions, held_out_losses, segments, stage_loss
from yunque.train.optimizer import Optimizer
from yunque.train.roles import assign
from yunque.train.settings import RunConfig, run_from_mapping
from yunque.train.state import TrainState
from yunque.train.step import train_step


def _run(**stage_changes) -> RunConfig:
    base = nano_run()
    base["stage"][0] |= stage_changes
    return run_from_mapping(base)


def _batch() -> PackedBatch:
    documents = [[(7 * i * n) % 500 for i in range(1, n)] for n in (30, 21, 14)]
    return PackedBatch.from_documents(documents)


def test_segments_end_where_weights_change_and_cover_the_stage() -> None:
    """512 tokens in steps of 128; a change at 200 tokens holds from the third step, one at 384 from the
    fourth."""
    stage = _run(mtp_weight=[[0, 0.3], [200, 0.1]], router_bias_rate=[[0, 1e-3], [384, 0.0]]).stage[0]
    found = [(s.end_step, s.weights.mtp, s.weights.router_bias_rate) for s in segments(stage)]
    assert found == [(2, 0.3, 1e-3), (3, 0.1, 1e-3), (4, 0.1, 0.0)]


def test_a_change_beyond_the_budget_never_comes() -> None:
    stage = _run(mtp_weight=[[0, 0.3], [9999, 0.1]]).stage[0]
    assert [s.end_step for s in segments(stage)] == [4, 4]
    assert next(iter(segments(stage))).weights.mtp == 0.3


def test_each_stage_gets_its_loss_and_attention() -> None:
    run = run_from_mapping(nano_run())
    losses = [stage_loss(stage, stage.weights_at(0)) for stage in run.stage]
    assert [type(loss) for loss in losses] == [
        LanguageModelLoss, LanguageModelLoss, IndexerWarmupLoss, LanguageModelLoss, LanguageModelLoss
    ]  # fmt: skip
    configs = [loss.config for loss in losses if isinstance(loss, LanguageModelLoss)]
    assert [c.attention for c in configs] == ["dense", "dense", "sparse", "sparse"]
    assert [c.index_kl_weight for c in configs] == [0.0, 0.0, 1.0, 0.0]
    compared = [compared_attentions(stage) for stage in run.stage]
    assert compared == [("dense",), ("dense",), ("dense", "sparse"), ("dense", "sparse"), ("sparse",)]


@pytest.mark.parametrize("index", range(5))
def test_every_trainable_parameter_gets_a_gradient_and_no_other(index: int) -> None:
    run = run_from_mapping(nano_run())
    stage, model = run.stage[index], Transformer(run.model)
    init_weights(model, torch.Generator().manual_seed(0))
    optimizer = Optimizer(
        model, assign(module_specs(run.model), run.optimizer, run.model, stage.trainable), run.optimizer
    )
    gradients = GradientSum(optimizer.parameters)
    stage_loss(stage, stage.weights_at(0))(model, _batch()).sum.backward()
    gradients.collect()
    got = {name for name, gradient in gradients.tensors().items() if gradient.abs().max() > 0}
    assert got == set(optimizer.parameters)
    assert all(p.grad is None for n, p in model.named_parameters() if n not in optimizer.parameters)


@pytest.mark.parametrize("index", [0, 3])
def test_a_real_step_moves_the_model_and_its_router_biases(index: int) -> None:
    run = run_from_mapping(nano_run())
    stage, model = run.stage[index], Transformer(run.model)
    init_weights(model, torch.Generator().manual_seed(0))
    optimizer = Optimizer(
        model, assign(module_specs(run.model), run.optimizer, run.model, stage.trainable), run.optimizer
    )
    state = TrainState(
        model=model,
        optimizer=optimizer,
        schedule=stage.schedule,
        pace=stage.pace,
        total_tokens=stage.tokens,
        router_bias_rate=1e-3,
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = train_step(state, [_batch(), _batch()], stage_loss(stage, stage.weights_at(0)))
    after = model.state_dict()
    frozen = {name for name in before if name in dict(model.named_parameters())} - set(optimizer.parameters)
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3  # two main layers with experts and the MTP layer
    for name in biases:
        assert set((after[name] - before[name]).abs().mul(1000).round().tolist()) <= {0.0, 1.0}
        assert (after[name] != before[name]).any()
    assert report.loss == pytest.approx(6.24, abs=0.1)
    assert report.objective > report.loss
    assert report.step_tokens == 2 * _batch().num_tokens


def test_held_out_losses_are_named_by_attention_and_leave_no_gradient() -> None:
    model = Transformer(run_from_mapping(nano_run()).model)
    init_weights(model, torch.Generator().manual_seed(0))
    losses = held_out_losses(model, [_batch()], ("dense", "sparse"), chunk_tokens=32)
    assert set(losses) == {"heldout_dense", "heldout_sparse"}
    assert losses["heldout_dense"] == pytest.approx(6.24, abs=0.1)
    assert losses["heldout_dense"] != losses["heldout_sparse"]  # documents are longer than index_topk = 8
    assert all(p.grad is None for p in model.parameters())

"""The optimiser against torch's, its fp32 state, and its continuation to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from toy_training import ToyModel, toy_config

from yunque.core.errors import CheckpointError, ConfigError
from yunque.model import LanguageModelLoss, LossConfig, PackedBatch, Transformer, init_weights, preset
from yunque.model.names import module_specs
from yunque.train.optimizer import Optimizer
from yunque.train.roles import BACKBONE_ROLES, OptimizerConfig, assign
from yunque.weights import load_model, save_model


def _optimizer(model: ToyModel, **values) -> Optimizer:
    config = OptimizerConfig(**values)
    return Optimizer(model, assign(model.specs(), config, toy_config()), config)


def _gradients(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}


def test_adamw_equals_torch_bit_for_bit_over_five_steps() -> None:
    ours, theirs = ToyModel(), ToyModel()
    optimizer = _optimizer(ours, kind="adamw", weight_decay=0.1)
    decayed = [p for p in theirs.parameters() if p.ndim > 1]
    plain = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for seed in range(5):
        gradients = _gradients(ours, seed)
        optimizer.step(gradients, lr=1e-2)
        for name, parameter in theirs.named_parameters():
            parameter.grad = gradients[name]
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_muon_agrees_with_torch_up_to_its_bf16_products() -> None:
    ours, theirs = ToyModel(), ToyModel()
    optimizer = _optimizer(ours, muon_split=False, weight_decay=0.1)
    names = [a.name for a in optimizer.assignments if a.method == "muon"]
    parameters = dict(theirs.named_parameters())
    reference = torch.optim.Muon(
        [parameters[n] for n in names],
        lr=0.1,
        weight_decay=0.1,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    before = {n: p.detach().clone() for n, p in parameters.items()}
    for seed in range(3):
        gradients = _gradients(ours, seed)
        optimizer.step(gradients, lr=0.1)
        for name in names:
            parameters[name].grad = gradients[name]
        reference.step()
    for name in names:
        mine, other = dict(ours.named_parameters())[name] - before[name], parameters[name] - before[name]
        assert (mine - other).norm() < 0.02 * other.norm()


def test_weight_decay_is_decoupled() -> None:
    """With a zero gradient Muon and AdamW only shrink the weights, by lr x decay = 0.1 x 0.5."""
    model = ToyModel()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = _optimizer(model, weight_decay=0.5)
    optimizer.step({n: torch.zeros_like(p) for n, p in model.named_parameters()}, lr=0.1)
    for name, parameter in model.named_parameters():
        factor = 1.0 if parameter.ndim == 1 else 0.95
        assert (parameter - before[name] * factor).abs().max() < 1e-7


def test_state_continues_bit_for_bit_and_refuses_another_model() -> None:
    straight, resumed = ToyModel(), ToyModel()
    first = _optimizer(straight)
    for seed in range(3):
        first.step(_gradients(straight, seed), lr=0.05)
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    resumed.load_state_dict({n: t.clone() for n, t in straight.state_dict().items()})
    second = _optimizer(resumed)
    second.restore(saved)
    for seed in range(3, 6):
        first.step(_gradients(straight, seed), lr=0.05)
        second.step(_gradients(resumed, seed), lr=0.05)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    del saved["lm_head.weight.exp_avg"]
    with pytest.raises(CheckpointError, match=r"lacks 'lm_head\.weight\.exp_avg'"):
        second.restore(saved)


def test_bf16_parameters_keep_fp32_masters_that_collect_small_updates() -> None:
    """1,000 AdamW steps of 1e-5 move a bf16 weight of 1 by 1e-2; without a master each would round away."""
    model = ToyModel(dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.fill_(1.0)
    optimizer = _optimizer(model, kind="adamw", weight_decay=0.0)
    gradient = {"lm_head.weight": torch.ones(model.lm_head.weight.shape)}
    for _ in range(1000):
        optimizer.step(gradient, lr=1e-5)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert optimizer.state()["lm_head.weight.master"].mean().item() == pytest.approx(0.99, abs=1e-4)
    assert model.lm_head.weight[0, 0].item() == pytest.approx(0.99, abs=4e-3)
    assert {t.dtype for t in optimizer.state().values()} == {torch.float32, torch.int64}


def test_a_frozen_indexer_stays_out_of_the_optimiser_and_survives_save_and_load(tmp_path: Path) -> None:
    """PrimeIntellect-ai/prime-rl#2799: a frozen indexer must not enter the optimiser, and must survive save
    and load."""
    architecture, config = preset("nano"), OptimizerConfig()
    model = init_weights(Transformer(architecture), torch.Generator().manual_seed(0))
    roles = assign(module_specs(architecture), config, architecture, BACKBONE_ROLES)
    optimizer = Optimizer(model, roles, config)
    indexer = {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert indexer
    assert not indexer & set(optimizer.parameters)
    assert not any(slot.startswith(tuple(indexer)) for slot in optimizer.state())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = PackedBatch.from_documents([list(range(40))])
    LanguageModelLoss(LossConfig())(model, batch).sum.backward()
    parameters = dict(model.named_parameters())
    assert all(parameters[name].grad is None for name in indexer)
    optimizer.step({n: p.grad for n, p in optimizer.parameters.items() if p.grad is not None}, lr=0.01)
    loaded = load_model(save_model(tmp_path / "saved", architecture, model.state_dict())).state_dict()
    assert all(torch.equal(loaded[name], before[name]) for name in indexer)
    assert not torch.equal(loaded["lm_head.weight"], before["lm_head.weight"])


def test_carry_takes_what_fits_and_leaves_the_rest_fresh() -> None:
    model = ToyModel()
    first = _optimizer(model)
    first.step(_gradients(model, 0), lr=0.05)
    other = _optimizer(model, head="muon")
    carried = other.carry(first.state())
    assert carried == len(list(model.parameters())) - 1
    assert torch.equal(other.state()["model.norm.weight.exp_avg"], first.state()["model.norm.weight.exp_avg"])
    assert other.state()["lm_head.weight.momentum"].abs().max() == 0


def test_a_table_of_another_model_is_refused() -> None:
    model = ToyModel()
    config = OptimizerConfig()
    rows = assign(model.specs(), config, toy_config())[1:]
    with pytest.raises(ConfigError, match="disagree on 1 parameters"):
        Optimizer(model, rows, config)

"""One step: gradients as of one big batch, one division, clipping, balancing, and nothing on a non-finite
number."""

from __future__ import annotations

import math

import pytest
import torch
from toy_training import ToyLoader, ToyModel, toy_loss, toy_state

from yunque.core.errors import DataError
from yunque.model.batch import PackedBatch
from yunque.train.balance import imbalance, router_biases, update_router_biases
from yunque.train.gradients import GradientSum, global_norm
from yunque.train.loop import fit, take
from yunque.train.schedule import BatchRamp, Decay, Pace
from yunque.train.state import TrainState
from yunque.train.step import NonFiniteError, train_step


def _documents(*lengths: int) -> PackedBatch:
    return PackedBatch.from_documents([[(3 * n + i) % 32 for i in range(n)] for n in lengths])


def test_microbatches_of_unequal_size_equal_one_big_batch() -> None:
    """5 + 2 loss tokens: the global mean is over 7, not the mean of two means."""
    parts, whole = toy_state(), toy_state()
    a = train_step(parts, [_documents(6), _documents(3)], toy_loss)
    b = train_step(whole, [_documents(6, 3)], toy_loss)
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    assert a.metrics["loss"] == pytest.approx(a.objective, rel=1e-6)
    for p, q in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-6
    assert (a.step, a.tokens, a.step_tokens) == (1, 9, 9)


def test_clipping_scales_the_whole_gradient_to_the_limit() -> None:
    """Adam's first moment after one step is 0.1 of the gradient it got: 0.1 of the limit in norm, same
    direction."""
    moments = {}
    for limit in (1e9, 0.25):
        state = toy_state(clip=limit)
        report = train_step(state, [_documents(9)], toy_loss)
        moments[limit] = {n: t for n, t in state.optimizer.state().items() if n.endswith(".exp_avg")}
    assert report.grad_norm > 0.25
    assert global_norm(moments[1e9]) == pytest.approx(0.1 * report.grad_norm, rel=1e-5)
    assert global_norm(moments[0.25]) == pytest.approx(0.1 * 0.25, rel=1e-5)
    for name, moment in moments[1e9].items():
        assert (moment * (0.25 / report.grad_norm) - moments[0.25][name]).abs().max() < 1e-7


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_non_finite_number_stops_before_anything_moves_and_names_the_place(where: str) -> None:
    state = toy_state(place=lambda back: f"corpus:{20 - back}")
    train_step(state, [_documents(8)], toy_loss)
    before = {n: t.clone() for n, t in state.model.state_dict().items()}
    moments = {n: t.clone() for n, t in state.optimizer.state().items()}

    def poisoned(model: ToyModel, batch: PackedBatch):
        output = toy_loss(model, batch)
        weight = model.lm_head.weight
        # sqrt at 0 has a finite value and an infinite gradient
        extra = weight.sum() * math.nan if where == "loss" else (weight - weight.detach()).abs().sum().sqrt()
        if batch.num_tokens != 5:
            return output
        return type(output)(output.sum + extra, output.count, output.metrics, output.expert_load_LE)

    with pytest.raises(NonFiniteError) as error:
        train_step(state, [_documents(8), _documents(5)], poisoned)
    message = str(error.value)
    assert "step 2 after 8 tokens" in message
    assert "corpus:19" in message
    assert ("corpus:18" in message) == (where == "gradient")
    assert ("microbatch 2 of 2" in message and "objective = nan" in message) or "lm_head.weight" in message
    assert state.step == 1
    assert all(torch.equal(t, before[n]) for n, t in state.model.state_dict().items())
    assert all(torch.equal(t, moments[n]) for n, t in state.optimizer.state().items())


def test_a_step_without_loss_tokens_is_refused() -> None:
    batch = PackedBatch.from_documents([[1, 2, 3]], [[0.0, 0.0, 0.0]])
    with pytest.raises(DataError, match="no token counts in the loss"):
        train_step(toy_state(), [batch], toy_loss)


def test_router_bias_moves_by_the_sign_of_the_missing_load() -> None:
    """Loads 6, 2, 4, 4 around a mean of 4: the busy expert's bias falls, the idle one's rises, the others
    stay."""
    model = ToyModel()
    update_router_biases(model, torch.tensor([[6, 2, 4, 4]]), rate=0.001)
    assert model.bias_E.tolist() == pytest.approx([-0.001, 0.001, 0.0, 0.0])
    assert imbalance(torch.tensor([[6, 2, 4, 4], [4, 4, 4, 4]])) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="2 layers, the model 1"):
        update_router_biases(model, torch.ones(2, 4), rate=0.001)


def test_the_step_adds_up_loads_over_microbatches_and_a_rate_of_zero_freezes() -> None:
    """Tokens 0..3 once, then 0 four times: loads 5, 1, 1, 1."""
    batches = [PackedBatch.from_documents([[0, 1, 2, 3]]), PackedBatch.from_documents([[0, 4, 8, 12]])]
    state = toy_state(router_bias_rate=0.01)
    report = train_step(state, batches, toy_loss)
    assert router_biases(state.model)[0].tolist() == pytest.approx([-0.01, 0.01, 0.01, 0.01])
    assert report.metrics["expert_imbalance"] == pytest.approx(5 / 2 - 1)
    frozen = toy_state()
    train_step(frozen, batches, toy_loss)
    assert router_biases(frozen.model)[0].abs().max() == 0


def test_router_biases_come_in_order_of_their_layer_number() -> None:
    """Layer 10 after layer 9, whatever order the module lists them in."""
    layers = torch.nn.ModuleDict()
    for number in (10, 9):
        gate = torch.nn.Module()
        gate.register_buffer("e_score_correction_bias", torch.full((2,), float(number)))
        layers[str(number)] = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"gate": gate})})
    model = torch.nn.ModuleDict({"layers": layers})
    assert [bias[0].item() for bias in router_biases(model)] == [9.0, 10.0]


def test_bf16_gradients_are_summed_in_fp32() -> None:
    """256 + 1, 255 times: bf16 would stay at 256, where 1 is half its spacing; the sum is 511."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    gradients = GradientSum({"w": parameter})
    for value in [256.0] + [1.0] * 255:
        parameter.grad = torch.full((3,), value, dtype=torch.bfloat16)
        gradients.collect()
    assert gradients.tensors()["w"].tolist() == [511.0] * 3
    assert parameter.grad is None


def test_bf16_model_learns_as_the_fp32_one_does() -> None:
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        state = toy_state(ToyModel(dtype=dtype), lr=0.01)
        fit(state, iter(ToyLoader()), toy_loss, steps=60)
        losses[dtype] = train_step(state, take(iter(ToyLoader(seed=99)), 1), toy_loss).loss
    assert losses[torch.float32] < 1.5
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.1)


def test_fit_follows_the_ramp_and_the_schedule_and_runs_hooks_in_order() -> None:
    """Steps of 1, 2 and 3 microbatches of 24 tokens; linear decay over 144 tokens from 1e-2 to 0."""
    calls: list[tuple[str, int, int, float]] = []

    class Record:
        def __init__(self, name: str) -> None:
            self.name = name

        def after_step(self, state: TrainState, report) -> None:
            calls.append((self.name, state.step, report.step_tokens, report.lr))

    pace = Pace(microbatch_tokens=24, microbatches=3, ramp=BatchRamp(start_tokens=24, over_tokens=48))
    schedule = Decay(kind="linear", lr_peak=0.01)
    state = toy_state(pace=pace, schedule=schedule, total_tokens=144)
    assert pace.steps(144) == 3
    fit(state, iter(ToyLoader()), toy_loss, steps=3, hooks=[Record("a"), Record("b")])
    assert [(name, step, tokens) for name, step, tokens, _ in calls] == [
        ("a", 1, 24), ("b", 1, 24), ("a", 2, 48), ("b", 2, 48), ("a", 3, 72), ("b", 3, 72)
    ]  # fmt: skip
    assert [lr for name, *_, lr in calls if name == "a"] == pytest.approx([0.01 * (1 - 24 / 144), 0.005, 0.0])


def test_fit_stops_with_a_reason_when_the_data_ends() -> None:
    with pytest.raises(DataError, match="ended 1 batch"):
        fit(toy_state(), iter([_documents(8)]), toy_loss, steps=2)


def test_two_fits_in_a_row_equal_one() -> None:
    straight, cut = toy_state(), toy_state()
    fit(straight, iter(ToyLoader()), toy_loss, steps=6)
    batches = iter(ToyLoader())
    fit(cut, batches, toy_loss, steps=2)
    fit(cut, batches, toy_loss, steps=6)
    for a, b in zip(straight.model.parameters(), cut.model.parameters(), strict=True):
        assert torch.equal(a, b)

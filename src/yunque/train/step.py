"""One optimiser step: gradients of sums over microbatches, one division, clipping, the update, the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from yunque.core.errors import DataError, YunqueError
from yunque.model.batch import PackedBatch
from yunque.model.objectives import LossFn, LossOutput
from yunque.train.balance import imbalance, update_router_biases
from yunque.train.gradients import GradientSum, global_norm, scale_
from yunque.train.state import TrainState

# Shapes: L layers with experts, E experts.


class NonFiniteError(YunqueError):
    """A loss or gradient is not a number or infinite; the optimiser has not moved."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step did. ``step`` and ``tokens`` count it in; ``objective`` is what was minimised, per loss
    token.

    ``metrics`` are the loss's own ratios over the whole step, "loss" among them where there is a next-token
    loss; ``grad_norm`` is before clipping.
    """

    step: int
    tokens: int
    objective: float
    lr: float
    grad_norm: float
    step_tokens: int
    seconds: float
    metrics: Mapping[str, float]

    @property
    def tokens_per_s(self) -> float:
        return self.step_tokens / max(self.seconds, 1e-9)

    @property
    def loss(self) -> float:
        """The next-token loss; the objective where the stage has none (the indexer's warm-up)."""
        return self.metrics.get("loss", self.objective)

    def values(self) -> dict[str, float]:
        """The report as one flat mapping for metric sinks."""
        own = {"objective": self.objective, "lr": self.lr, "grad_norm": self.grad_norm, "tokens": float(self.tokens)}
        return own | dict(self.metrics) | {"tokens_per_s": self.tokens_per_s, "seconds": self.seconds}


def train_step(state: TrainState, batches: Sequence[PackedBatch], loss: LossFn) -> StepReport:
    """Train once on ``batches`` together, as if they were one batch, and advance ``state``.

    Raises ``NonFiniteError`` before anything has moved when a loss, a metric or the gradient norm is not
    finite, and ``DataError`` when no token of the step counts in the loss.
    """
    start = state.clock()
    gradients = GradientSum(state.optimizer.parameters)
    outputs: list[LossOutput] = []
    for batch in batches:
        output = loss(state.model, batch)
        output.sum.backward()
        gradients.collect()
        outputs.append(_detached(output))
    totals = _totals(outputs)
    step_tokens = sum(batch.num_tokens for batch in batches)
    _check_outputs(state, outputs, totals)

    moving = gradients.tensors()
    scale_(moving, 1.0 / totals.count)
    norm = global_norm(moving)
    if not math.isfinite(norm):
        raise NonFiniteError(_place(state, len(batches)) + _bad_gradients(moving))
    clip = state.optimizer.config.clip_norm
    if norm > clip:
        scale_(moving, clip / norm)
    lr = state.lr_after(state.tokens + step_tokens)
    state.optimizer.step(moving, lr)
    if totals.expert_load_LE is not None and state.router_bias_rate:
        update_router_biases(state.model, totals.expert_load_LE, state.router_bias_rate)
    gradients.clear()
    state.step += 1
    state.tokens += step_tokens
    return StepReport(
        step=state.step,
        tokens=state.tokens,
        objective=totals.objective,
        lr=lr,
        grad_norm=norm,
        step_tokens=step_tokens,
        seconds=state.clock() - start,
        metrics=totals.metrics,
    )


@dataclass(frozen=True)
class _Totals:
    objective: float
    count: float
    metrics: dict[str, float]
    expert_load_LE: Tensor | None


def _detached(output: LossOutput) -> LossOutput:
    """The same numbers without the graph, so that only one microbatch's activations live at a time."""
    return LossOutput(output.sum.detach(), output.count.detach(), output.metrics, output.expert_load_LE)


def _totals(outputs: Sequence[LossOutput]) -> _Totals:
    """Sums over microbatches, divided once."""
    count = float(sum(float(o.count) for o in outputs))
    total = sum(float(o.sum) for o in outputs)
    metrics = {}
    for name in dict.fromkeys(name for o in outputs for name in o.metrics):
        ratios = [o.metrics[name] for o in outputs if name in o.metrics]
        bottom = sum(float(r.count) for r in ratios)
        if bottom > 0:
            metrics[name] = sum(float(r.sum) for r in ratios) / bottom
    loads = [o.expert_load_LE for o in outputs if o.expert_load_LE is not None]
    load_LE = torch.stack(loads).sum(dim=0) if loads else None
    if load_LE is not None and load_LE.numel():
        metrics["expert_imbalance"] = imbalance(load_LE)
    return _Totals(total / count if count else math.nan, count, metrics, load_LE)


def _check_outputs(state: TrainState, outputs: Sequence[LossOutput], totals: _Totals) -> None:
    if totals.count <= 0:
        raise DataError(f"{_place(state, len(outputs))}: no token counts in the loss, so there is nothing to learn")
    if math.isfinite(totals.objective) and all(map(math.isfinite, totals.metrics.values())):
        return
    for index, output in enumerate(outputs):
        values = {"objective": output.sum} | {name: ratio.sum for name, ratio in output.metrics.items()}
        bad = [f"{name} = {float(value)}" for name, value in values.items() if not math.isfinite(float(value))]
        if bad:
            raise NonFiniteError(f"{_place(state, len(outputs), index)}: {', '.join(bad)}; the optimiser has not moved")
    raise NonFiniteError(
        f"{_place(state, len(outputs))}: the sum over microbatches overflows; the optimiser has not moved"
    )


def _place(state: TrainState, microbatches: int, index: int | None = None) -> str:
    """Which step, and where its data came from: of one microbatch, or of all where it may be any."""
    backs = [microbatches - index] if index is not None else range(microbatches, 0, -1)
    which = "" if index is None else f"microbatch {index + 1} of {microbatches}, "
    return f"step {state.step + 1} after {state.tokens:,} tokens, {which}{'; '.join(map(state.place, backs))}"


def _bad_gradients(gradients: Mapping[str, Tensor]) -> str:
    bad = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    if not bad:
        return ": the gradient norm overflows; the optimiser has not moved"
    names = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
    return f": the loss is finite but the gradient of {names} is not; the optimiser has not moved"

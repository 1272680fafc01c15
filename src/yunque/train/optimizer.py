"""The optimiser of a model: Muon and AdamW side by side, with fp32 state kept by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from yunque.core.errors import CheckpointError, ConfigError
from yunque.train.muon import lookahead, orthogonalise_all_
from yunque.train.roles import Assignment, OptimizerConfig

#: Slots of a parameter's state; ``master`` exists where the parameter itself is not fp32.
SLOTS: Mapping[str, tuple[str, ...]] = {
    "muon": ("momentum",),
    "adamw": ("exp_avg", "exp_avg_sq", "step"),
    "frozen": (),
}


class Optimizer:
    """Moves the parameters of ``model`` as ``assignments`` say; frozen ones lose their gradient for good.

    State is created at once, in fp32 on the parameter's device, so that its memory is known from the first
    step and a snapshot always has the same names: ``state()`` maps ``"<parameter>.<slot>"`` to a plain
    tensor.
    """

    def __init__(self, model: nn.Module, assignments: Sequence[Assignment], config: OptimizerConfig) -> None:
        parameters = dict(model.named_parameters())
        named = {a.name for a in assignments}
        if named != set(parameters):
            stray = sorted(named ^ set(parameters))
            raise ConfigError(f"optimiser table and model disagree on {len(stray)} parameters, first {stray[:3]}")
        self.config = config
        self.assignments = tuple(assignments)
        self.parameters = {a.name: parameters[a.name] for a in assignments if a.method != "frozen"}
        for a in assignments:
            parameters[a.name].requires_grad_(a.method != "frozen")
            parameters[a.name].grad = None
        self._state = {a.name: _fresh(parameters[a.name], a.method) for a in assignments if a.method != "frozen"}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """One update from fp32 ``gradients`` by parameter name; a parameter without one stays as it is."""
        moving = [a for a in self.assignments if a.name in gradients]
        self._step_muon([a for a in moving if a.method == "muon"], gradients, lr)
        for a in moving:
            if a.method == "adamw":
                self._step_adamw(a, gradients[a.name], lr)
        for a in moving:
            parameter = self.parameters[a.name]
            if parameter.dtype != torch.float32:
                parameter.copy_(self._state[a.name]["master"])

    def _step_muon(self, moving: Sequence[Assignment], gradients: Mapping[str, Tensor], lr: float) -> None:
        config = self.config
        directions = [
            lookahead(
                gradients[a.name],
                self._state[a.name]["momentum"],
                beta=config.momentum,
                nesterov=config.nesterov,
            )
            for a in moving
        ]
        layouts = [a.layout for a in moving if a.layout is not None]
        orthogonalise_all_(directions, layouts, rms=config.update_rms, steps=config.newton_schulz_steps)
        for a, direction in zip(moving, directions, strict=True):
            self._values(a.name).mul_(1 - lr * a.weight_decay).add_(direction, alpha=-lr)

    def _step_adamw(self, a: Assignment, gradient: Tensor, lr: float) -> None:
        """Adam with decoupled weight decay (Loshchilov and Hutter 2019), in the operations of
        ``torch.optim``."""
        (beta1, beta2), slots = self.config.betas, self._state[a.name]
        slots["step"] += 1
        step = int(slots["step"])
        values = self._values(a.name)
        values.mul_(1 - lr * a.weight_decay)
        slots["exp_avg"].lerp_(gradient, 1 - beta1)
        slots["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        spread = slots["exp_avg_sq"].sqrt().div_((1 - beta2**step) ** 0.5).add_(self.config.eps)
        values.addcdiv_(slots["exp_avg"], spread, value=-lr / (1 - beta1**step))

    def _values(self, name: str) -> Tensor:
        """The fp32 values that the update moves: the parameter itself or its master copy."""
        return self._state[name].get("master", self.parameters[name])

    def state(self) -> dict[str, Tensor]:
        """Every state tensor as ``"<parameter>.<slot>"``, not copied: what a snapshot stores."""
        return {f"{name}.{slot}": tensor for name, slots in self._state.items() for slot, tensor in slots.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over ``state`` exactly; raises ``CheckpointError`` naming what is missing, extra or
        misshapen."""
        own = self.state()
        stray = sorted(own.keys() ^ state.keys())
        if stray:
            side = "lacks" if stray[0] in own else "has unknown"
            raise CheckpointError(f"optimiser state {side} {stray[0]!r} ({len(stray)} names differ)")
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise CheckpointError(
                    f"optimiser state {name!r} has shape {list(state[name].shape)}, expected {list(tensor.shape)}"
                )
            tensor.copy_(state[name])

    @torch.no_grad()
    def carry(self, state: Mapping[str, Tensor]) -> int:
        """Take from an earlier stage's ``state`` what fits; returns how many parameters kept theirs.

        A master copy is not taken: the parameter's present value is the truth between stages.
        """
        carried = 0
        for name, slots in self._state.items():
            found = {slot: state.get(f"{name}.{slot}") for slot in slots if slot != "master"}
            if all(other is not None and other.shape == slots[slot].shape for slot, other in found.items()):
                for slot, other in found.items():
                    assert other is not None
                    slots[slot].copy_(other)
                carried += 1
        return carried


def _fresh(parameter: nn.Parameter, method: str) -> dict[str, Tensor]:
    slots = {}
    for slot in SLOTS[method]:
        if slot == "step":
            slots[slot] = torch.zeros((), dtype=torch.int64)
        else:
            slots[slot] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
    if parameter.dtype != torch.float32:
        slots["master"] = parameter.detach().to(torch.float32)
    return slots

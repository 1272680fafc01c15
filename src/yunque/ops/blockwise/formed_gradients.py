"""A scalar whose gradients were formed together with it: its backward only scales them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def with_gradients(value: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None], *, name: str) -> Tensor:
    """The scalar ``value`` as a function of ``inputs`` with the derivatives ``gradients`` (None: not wanted).

    A loss computed in tiles knows d loss / d inputs when it has the tile; forming it then saves recomputing
    the tile in the backward, or keeping it. A second derivative is refused in the name of ``name``.
    """
    return _WithGradients.apply(name, value, len(inputs), *inputs, *gradients)


def wants_gradient(tensor: Tensor) -> bool:
    """Whether a backward may ask for this tensor's gradient."""
    return torch.is_grad_enabled() and tensor.requires_grad


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, value: Tensor, num_inputs: int, *tensors: Tensor | None) -> Tensor:
        ctx.name = name
        ctx.save_for_backward(*tensors[num_inputs:])
        return value.clone()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, factor: Tensor
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{ctx.name} has no second derivative: its gradients are formed in the forward pass; "
                "call backward without create_graph"
            )
        scaled = [None if grad is None else _scaled(grad, factor) for grad in ctx.saved_tensors]
        return (None, None, None, *scaled, *(None for _ in scaled))


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """``grad * factor``, without a copy where the factor is known to be 1, as it is for a plain sum."""
    return grad if factor.device.type == "cpu" and factor.item() == 1.0 else grad * factor.to(grad.dtype)

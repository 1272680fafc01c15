"""Sums of gradients over microbatches, in fp32 whatever the parameters' own type."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

# fp32 parameters let autograd do the adding; others move each microbatch's gradient into an fp32 buffer,
# where adding many small numbers to a large one does not lose them.


class GradientSum:
    """The gradients of ``parameters`` since the last ``clear``."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._wide: dict[str, Tensor] = {}
        self.clear()

    def clear(self) -> None:
        """Forget everything and free the memory."""
        self._wide = {}
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def collect(self) -> None:
        """Take what the last backward pass left; call it after every microbatch."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None or parameter.dtype == torch.float32:
                continue
            if name in self._wide:
                self._wide[name].add_(parameter.grad)
            else:
                self._wide[name] = parameter.grad.to(torch.float32)
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The fp32 sums by parameter name, to be changed in place; parameters that got no gradient are
        absent."""
        sums: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            gradient = self._wide.get(name, parameter.grad)
            if gradient is not None:
                sums[name] = gradient
        return sums


@torch.no_grad()
def scale_(gradients: Mapping[str, Tensor], factor: float) -> None:
    """Multiply every gradient by ``factor`` in place."""
    for gradient in gradients.values():
        gradient.mul_(factor)


@torch.no_grad()
def global_norm(gradients: Mapping[str, Tensor]) -> float:
    """The Euclidean norm of all gradients taken as one vector; 0 without any."""
    if not gradients:
        return 0.0
    return float(nn.utils.get_total_norm(list(gradients.values())))

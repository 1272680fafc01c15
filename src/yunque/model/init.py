"""Initial weights."""

from __future__ import annotations

import torch

from yunque.model.names import Role, role_of
from yunque.model.transformer import Transformer


@torch.no_grad()
def init_weights(model: Transformer, generator: torch.Generator) -> Transformer:
    """Normal(0, ``initializer_range``) for every matrix, ones for norms, zeros for biases; returns the model.

    Tensors are drawn in order of their names from ``generator`` (a CPU generator), so that the same seed gives the
    same model on every device. Raises ``ValueError`` when a tensor is still on the meta device.
    """
    std = model.config.initializer_range
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        if tensor.is_meta:
            raise ValueError(f"{name} has no storage; move the model off the meta device with to_empty first")
        role = role_of(name)
        if role is Role.ROUTER_BIAS or name.endswith(".bias"):
            tensor.zero_()
        elif role in (Role.NORM, Role.INDEXER_NORM):
            tensor.fill_(1.0)
        else:
            tensor.copy_(torch.empty(tensor.shape).normal_(0.0, std, generator=generator))
    return model

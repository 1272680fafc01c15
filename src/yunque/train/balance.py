"""Loss-free balancing: the router's selection bias moves by a sign rule, not by a gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from yunque.model.names import Role, role_of

# Shapes: L layers with experts (lowest first, the MTP layer last), E experts.


def router_biases(model: nn.Module) -> list[Tensor]:
    """The selection biases [E] of all layers with experts, lowest layer first."""
    named = [(name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert all(role_of(name) is Role.ROUTER_BIAS for name, _ in named)
    return [bias for _, bias in sorted(named, key=lambda item: _layer_number(item[0]))]


def _layer_number(name: str) -> int:
    return int(name.split("layers.", 1)[1].split(".", 1)[0])


@torch.no_grad()
def update_router_biases(model: nn.Module, load_LE: Tensor, rate: float) -> None:
    """b <- b + rate sign(mean load - load), expert by expert (DeepSeek-V3, section 2.1.2; rate 0.001 in
    GLM-4.5).

    ``load_LE`` counts the tokens that chose each expert during the whole step. A step that did not run the
    MTP layer has one row less; its bias then stays.
    """
    biases = router_biases(model)
    if load_LE.shape[0] > len(biases):
        raise ValueError(f"expert load has {load_LE.shape[0]} layers, the model {len(biases)} with experts")
    for bias_E, load_E in zip(biases, load_LE.to(torch.float32), strict=False):
        bias_E.add_(torch.sign(load_E.mean() - load_E), alpha=rate)


def imbalance(load_LE: Tensor) -> float:
    """How far the busiest expert is above the mean, averaged over layers: max / mean - 1 (0 is perfect)."""
    load_LE = load_LE.to(torch.float32)
    return float((load_LE.amax(dim=1) / load_LE.mean(dim=1).clamp(min=1e-9) - 1).mean())

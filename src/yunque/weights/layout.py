"""How the module's stacked experts and a checkpoint's per-expert tensors correspond: views, never copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from yunque.core.errors import CheckpointError
from yunque.model.names import FP32_ROLES, Role, role_of

# Shapes: E experts, I expert width, D model width.

_GATE_UP = ".mlp.experts.gate_up_proj"
_DOWN = ".mlp.experts.down_proj"


def checkpoint_views(state: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    """``(checkpoint name, module name, view)`` for a module's state; the views cover it exactly.

    ``...experts.gate_up_proj`` [E, 2I, D] becomes ``...experts.e.gate_proj.weight`` (its first I rows) and
    ``...experts.e.up_proj.weight`` (the others), ``...experts.down_proj`` [E, D, I]
    ``...experts.e.down_proj.weight``; they come expert by expert, as released checkpoints have them. Every
    other tensor keeps its name.
    """
    for name, tensor in state.items():
        if name.endswith(_GATE_UP):
            prefix = name.removesuffix("gate_up_proj")
            gate_up_EID, down_EDI = tensor, state.get(prefix + "down_proj")
            if down_EDI is None:
                raise CheckpointError(f"the model state has {name!r} without {prefix + 'down_proj'!r}")
            width = gate_up_EID.shape[1] // 2
            for e in range(gate_up_EID.shape[0]):
                yield f"{prefix}{e}.gate_proj.weight", name, gate_up_EID[e, :width]
                yield f"{prefix}{e}.up_proj.weight", name, gate_up_EID[e, width:]
                yield f"{prefix}{e}.down_proj.weight", prefix + "down_proj", down_EDI[e]
        elif not name.endswith(_DOWN):
            yield name, name, tensor


def keeps_fp32(name: str) -> bool:
    """Whether the tensor ``name`` stays float32 whatever the model's dtype."""
    return _role(name) in FP32_ROLES


def is_router_bias(name: str) -> bool:
    return _role(name) is Role.ROUTER_BIAS


def _role(name: str) -> Role | None:
    try:
        return role_of(name)
    except KeyError:
        return None

"""The block-scaled FP8 storage of released checkpoints: which tensors, which scales, and how to read them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from yunque.core.errors import CheckpointError
from yunque.model.config import ModelConfig
from yunque.model.names import FP32_ROLES, Role, role_of, tensor_specs

# Shapes: N rows, K columns, B blocks (of rows, then of columns).

SCALE_SUFFIX = "_scale_inv"
E4M3 = torch.float8_e4m3fn

#: Roles that the FP8 releases quantise; not the indexer's head weights, its norm, nor the MTP projection.
FP8_ROLES = frozenset(
    {
        Role.Q_UP,
        Role.KV_UP,
        Role.ATTENTION,
        Role.INDEXER,
        Role.MLP,
        Role.EXPERT,
        Role.SHARED_EXPERT,
    }
)


@dataclass(frozen=True)
class StoredSpec:
    """Shape and dtype of a tensor as a file holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Fp8Format:
    """How a checkpoint stores its matrices in FP8.

    ``block`` is (rows, columns) that share one scale. ``excluded`` are the module names that stay
    unquantised, as the config lists them; an entry means the module and everything under it.
    """

    block: tuple[int, int] = (128, 128)
    excluded: tuple[str, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Fp8Format | None:
        """What ``quantization_config`` says; ``None`` without one. Other methods than fp8 are refused."""
        quantization = config.get("quantization_config")
        if quantization is None:
            return None
        method = quantization.get("quant_method")
        if method != "fp8":
            raise CheckpointError(f"quantization_config.quant_method is {method!r}; valid: 'fp8'")
        block = quantization.get("weight_block_size") or [128, 128]
        if len(block) != 2 or not all(isinstance(side, int) and side > 0 for side in block):
            raise CheckpointError(f"quantization_config.weight_block_size is {block!r}; valid: [rows, columns]")
        excluded = quantization.get("modules_to_not_convert") or []
        return cls((block[0], block[1]), tuple(map(str, excluded)))

    def quantises(self, name: str) -> bool:
        """Whether the tensor ``name`` is stored in FP8: by its role, unless the exclusion list names it.

        The indexer's head weights are never: the releases' list means them by ``self_attn.indexers_proj``, a
        module that no model has, so their role decides.
        """
        if role_of(name) not in FP8_ROLES:
            return False
        return not any(re.search(rf"(^|\.){re.escape(entry)}(\.|$)", name) for entry in self.excluded)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Blocks of a matrix of this shape; the last of a side may be smaller (576 rows: 5 blocks of 128)."""
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])


def fp8_tensor_specs(config: ModelConfig, fmt: Fp8Format | None = None) -> dict[str, StoredSpec]:
    """Every tensor of an FP8 checkpoint, scales included, by name (118,629 of them for GLM-5.2)."""
    fmt = fmt or Fp8Format()
    specs: dict[str, StoredSpec] = {}
    for name, spec in tensor_specs(config).items():
        if fmt.quantises(name):
            specs[name] = StoredSpec(spec.shape, E4M3)
            specs[name + SCALE_SUFFIX] = StoredSpec(fmt.scale_shape(spec.shape), torch.float32)
        else:
            specs[name] = StoredSpec(spec.shape, torch.float32 if spec.role in FP32_ROLES else torch.bfloat16)
    return specs


def dequantise(values_NK: Tensor, scale_BB: Tensor, fmt: Fp8Format) -> Tensor:
    """float32 weight: every value times its block's scale. ``values_NK`` starts at a block's first row."""
    rows, columns = values_NK.shape
    scale_NK = scale_BB.repeat_interleave(fmt.block[0], 0)[:rows].repeat_interleave(fmt.block[1], 1)[:, :columns]
    return values_NK.float() * scale_NK

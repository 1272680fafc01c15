"""Small checkpoints, written with the safetensors library so that our reader is not its own judge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from yunque.model.config import ModelConfig
from yunque.model.names import module_specs
from yunque.model.presets import preset
from yunque.weights.fp8 import E4M3, SCALE_SUFFIX, Fp8Format
from yunque.weights.layout import checkpoint_views

NANO = preset("nano")
#: Layer 1 reuses layer 0's indexer and has none of its own.
SHARED = replace(NANO, indexer_types=("full", "shared", "full"))


def random_state(config: ModelConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """A model's state with normal values, under module names; what stays float32 does."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(spec.shape, generator=generator).to(torch.float32 if spec.keeps_fp32 else dtype)
        for name, spec in module_specs(config).items()
    }


def empty_state(config: ModelConfig, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A state to load into; NaN everywhere."""
    return {name: torch.full_like(tensor, torch.nan) for name, tensor in random_state(config, dtype=dtype).items()}


def stored_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under their checkpoint names."""
    return {name: view.clone() for name, _, view in checkpoint_views(state)}


def write_checkpoint(folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor], **extra_config: Any) -> Path:
    """``config.json`` and ``model.safetensors`` in a new folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_hf() | extra_config))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether names, dtypes, shapes and every bit agree (NaN equals the same NaN)."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and torch.equal(bits(left[name]), bits(right[name]))
        for name in left
    )


def quantise(weight_NK: Tensor, fmt: Fp8Format) -> tuple[Tensor, Tensor]:
    """``(e4m3 values, float32 scales)``: each block's largest value becomes 448."""
    (rows, columns), (blocks_N, blocks_K) = weight_NK.shape, fmt.scale_shape(weight_NK.shape)
    padding = (0, blocks_K * fmt.block[1] - columns, 0, blocks_N * fmt.block[0] - rows)
    padded = F.pad(weight_NK.float(), padding)
    blocks = padded.view(blocks_N, fmt.block[0], blocks_K, fmt.block[1])
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-30) / 448.0
    values = (blocks / scale[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return values.clamp(-448, 448).to(E4M3).contiguous(), scale


def quantised(tensors: Mapping[str, Tensor], fmt: Fp8Format) -> dict[str, Tensor]:
    """The tensors of an FP8 checkpoint: matrices in e4m3 with their scales, the others as they are."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if fmt.quantises(name):
            out[name], out[name + SCALE_SUFFIX] = quantise(tensor, fmt)
        else:
            out[name] = tensor
    return out


def quantization_config(fmt: Fp8Format) -> dict[str, Any]:
    """What the config of an FP8 release says."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(fmt.block),
        "modules_to_not_convert": list(fmt.excluded),
    }

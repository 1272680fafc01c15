"""Write a model as a Hugging Face folder: per-expert names, shards with an index, config; all or nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yunque.core.errors import CheckpointError
from yunque.model.config import ModelConfig
from yunque.model.names import module_specs
from yunque.weights.checkpoint import CONFIG, INDEX, MANIFEST, SINGLE, is_snapshot
from yunque.weights.layout import checkpoint_views, keeps_fp32
from yunque.weights.matching import shorten
from yunque.weights.new_folder import FolderWriter, new_folder
from yunque.weights.safetensors_file import Pending

SHARD_BYTES = 5 * 10**9
GENERATION_CONFIG = "generation_config.json"


def save_model(
    folder: Path | str,
    config: ModelConfig,
    state: Mapping[str, Tensor],
    *,
    files: Mapping[str, bytes] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write ``state`` (a module's ``state_dict()``) as a folder that Hugging Face, vLLM and SGLang load.

    ``files`` (tokenizer, chat template) are added by name. ``dtype`` converts tensors as they are written,
    except those that stay float32; without it every bit is kept. The folder appears when all of it is on
    disk; one that exists is refused unless ``overwrite``, which replaces a checkpoint (or an empty folder)
    and nothing else, no snapshot of a run either.
    """
    folder = refuse_existing(Path(folder), overwrite=overwrite)
    with new_folder(folder) as writer:
        write_model(writer, config, state, dtype=dtype, shard_bytes=shard_bytes)
        for name, content in (files or {}).items():
            writer.write_bytes(name, content)
    return folder


def refuse_existing(folder: Path, *, overwrite: bool) -> Path:
    """The absolute path, or ``CheckpointError`` when something is there that must not be replaced."""
    folder = folder.absolute()
    if folder.exists():
        refuse_snapshot(folder)
        if not overwrite:
            raise CheckpointError(f"{folder} exists; choose another name or overwrite it")
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / CONFIG).exists()):
            raise CheckpointError(f"{folder} is no checkpoint (it has no {CONFIG}); it is not overwritten")
    return folder


def refuse_snapshot(folder: Path) -> None:
    """``CheckpointError`` when ``folder`` is a snapshot: a run goes on from it, and nothing is written there."""
    if is_snapshot(folder):
        raise CheckpointError(f"{folder} is a run's snapshot (it has a {MANIFEST}); choose another name")


def write_model(
    writer: FolderWriter,
    config: ModelConfig,
    state: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the model's part of a folder: tensors, index, ``config.json``, ``generation_config.json``.

    Raises ``CheckpointError`` when ``state`` is not exactly what ``config`` describes, or when a tensor that
    must stay float32 (the router and its bias) is not: its values are then already damaged.
    """
    _check(config, state)
    pending = [Pending.of(name, view, None if keeps_fp32(name) else dtype) for name, _, view in checkpoint_views(state)]
    write_shards(writer, pending, shard_bytes)
    write_config(writer, config, dtype or state["model.embed_tokens.weight"].dtype)


def write_shards(writer: FolderWriter, pending: Sequence[Pending], shard_bytes: int) -> None:
    """Write ``model.safetensors``, or shards and their index where the tensors exceed ``shard_bytes``."""
    if shard_bytes < 1:
        raise CheckpointError(f"shard_bytes is {shard_bytes}; it must be at least 1")
    shards = _shards(pending, shard_bytes)
    files = [SINGLE] if len(shards) == 1 else _shard_names(len(shards))
    for file, shard in zip(files, shards, strict=True):
        writer.write_tensors(file, shard)
    if len(shards) > 1:
        writer.write_bytes(INDEX, _json(_index(files, shards)))


def write_config(writer: FolderWriter, config: ModelConfig, dtype: torch.dtype) -> None:
    """Write ``config.json`` and, with the ids that end a generation, ``generation_config.json``."""
    writer.write_bytes(CONFIG, _json(config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")}))
    generation: dict[str, Any] = {
        "pad_token_id": config.pad_token_id,
        "eos_token_id": list(config.eos_token_id),
    }
    writer.write_bytes(GENERATION_CONFIG, _json({key: ids for key, ids in generation.items() if ids not in (None, [])}))


def _check(config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    specs = module_specs(config)
    findings = {
        "missing": [name for name in specs if name not in state],
        "unexpected": [name for name in state if name not in specs],
        "of another shape": [n for n, s in specs.items() if n in state and tuple(state[n].shape) != s.shape],
        "below float32": [n for n, t in state.items() if keeps_fp32(n) and t.dtype.itemsize < 4],
    }
    lines = [f"{kind}: {shorten(names)}" for kind, names in findings.items() if names]
    if lines:
        raise CheckpointError("\n  ".join(["the model's state is not what its config describes:", *lines]))


def _shards(pending: Sequence[Pending], shard_bytes: int) -> list[list[Pending]]:
    """Runs of tensors of at most ``shard_bytes`` each; a tensor that is larger has a shard of its own."""
    shards: list[list[Pending]] = []
    room = -math.inf
    for tensor in pending:
        if tensor.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def _shard_names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _index(files: Sequence[str], shards: Sequence[Sequence[Pending]]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(tensor.num_bytes for shard in shards for tensor in shard)},
        "weight_map": {t.name: file for file, shard in zip(files, shards, strict=True) for t in shard},
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()

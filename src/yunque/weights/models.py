"""From a folder to a model, whatever kind it is, and from one kind of folder to the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from yunque.core.errors import CheckpointError, ConfigError, unknown
from yunque.core.logging import get_logger
from yunque.model.config import ModelConfig
from yunque.model.names import module_specs
from yunque.model.transformer import Transformer
from yunque.weights.checkpoint import Checkpoint, is_snapshot, open_checkpoint, text_files
from yunque.weights.load import load_tensors
from yunque.weights.matching import match
from yunque.weights.new_folder import new_folder
from yunque.weights.reader import open_reader
from yunque.weights.safetensors_file import Pending
from yunque.weights.save import SHARD_BYTES, refuse_existing, refuse_snapshot, write_config, write_shards
from yunque.weights.snapshots import SnapshotParts, SnapshotStore, read_manifest, verify

FolderKind = Literal["huggingface", "snapshot"]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_logger = get_logger(__name__)


def find_checkpoint(path: Path | str) -> Path:
    """The folder to load for ``path``: itself, or the latest whole snapshot when it is a run's store."""
    path = Path(path)
    if path.is_dir() and not (path / "config.json").exists() and any(path.glob("step-*")):
        latest = SnapshotStore(path).latest()
        if latest is None:
            raise CheckpointError(f"{path} holds snapshots, but none of them is whole")
        return latest
    return path


def open_any(path: Path | str) -> Checkpoint:
    """Open a checkpoint, a snapshot (its checksums are compared first) or a run's latest snapshot."""
    folder = find_checkpoint(path)
    if is_snapshot(folder):
        verify(folder, read_manifest(folder), training_state=False)
    return open_checkpoint(folder)


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    config: ModelConfig | None = None,
    ignore: Sequence[str] = (),
    batch_invariant: bool = False,
) -> Transformer:
    """The model in a checkpoint folder, a snapshot, or a run's snapshot store, every tensor accounted for.

    ``dtype`` is by default the stored one (bfloat16 for FP8); tensors that stay float32 do. ``config``
    replaces the folder's, for instance to load without an MTP layer. ``ignore``: patterns of stored tensors
    to leave out. ``batch_invariant`` as in ``Transformer``. Raises ``CheckpointError`` or ``ConfigError``.
    """
    checkpoint = open_any(path)
    config = config or checkpoint.config
    with torch.device("meta"):
        model = Transformer(config, batch_invariant=batch_invariant)
    state = _empty_state(config, dtype or stored_dtype(checkpoint), device)
    load_tensors(checkpoint, state, ignore=ignore)
    model.load_state_dict(state, strict=True, assign=True)
    return model


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of a model loaded as it is stored: the embedding's (bfloat16 where that is quantised)."""
    entry = checkpoint.entries.get("model.embed_tokens.weight")
    return entry.dtype if entry is not None and entry.dtype in _FLOATS else torch.bfloat16


def convert(
    source: Path | str,
    target: Path | str,
    *,
    kind: FolderKind = "huggingface",
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    ignore: Sequence[str] = (),
) -> Path:
    """Write what ``source`` (checkpoint, snapshot or store) holds as a folder of ``kind``; returns its path.

    ``"huggingface"`` writes a checkpoint folder at ``target``, one tensor in memory at a time; ``"snapshot"``
    writes ``target/step-00000000`` with the model and no training state, from which a run can start.
    Tokenizer and template travel along. FP8 is expanded; ``dtype`` as in ``load_model``.
    """
    checkpoint = open_any(source)
    config, files = checkpoint.config, text_files(checkpoint.folder)
    dtype = dtype or stored_dtype(checkpoint)
    if kind == "snapshot":
        refuse_snapshot(Path(target))
        held = sorted(path.name for path in Path(target).glob("step-*"))
        if held and not (overwrite and held == ["step-00000000"]):
            raise CheckpointError(f"{target} holds snapshots already ({held[-1]}); choose another name")
        state = _empty_state(config, dtype, "cpu")
        load_tensors(checkpoint, state, ignore=ignore)
        return SnapshotStore(target).save(0, SnapshotParts(config, state, files=files))
    if kind != "huggingface":
        raise ConfigError(unknown("kind of folder", kind, ("huggingface", "snapshot")))
    target = refuse_existing(Path(target), overwrite=overwrite)
    matching = match(checkpoint, _empty_state(config, dtype, "meta"), ignore, exact=False)
    for note in matching.notes:
        _logger.warning("%s: %s", checkpoint.folder, note)
    with open_reader(matching) as reader, new_folder(target) as writer:
        for copy, main in matching.copies:
            reader.check_copy(copy, main)
        pending = [
            Pending(fill.entry.name, fill.out.dtype, fill.entry.shape, partial(reader.read, fill))
            for fill in matching.fills
        ]
        write_shards(writer, pending, shard_bytes)
        write_config(writer, config, dtype)
        for name, content in files.items():
            writer.write_bytes(name, content)
    return target


def _empty_state(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
    """Uninitialised tensors for a whole model, those that stay float32 in float32."""
    return {
        name: torch.empty(spec.shape, dtype=torch.float32 if spec.keeps_fp32 else dtype, device=device)
        for name, spec in module_specs(config).items()
    }

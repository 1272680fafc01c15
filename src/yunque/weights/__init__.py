"""Weights: Hugging Face checkpoints in and out, GGUF files, and the snapshots of a run."""

from yunque.weights.checkpoint import Checkpoint, open_checkpoint, read_config, text_files
from yunque.weights.fp8 import Fp8Format, fp8_tensor_specs
from yunque.weights.gguf import write_gguf
from yunque.weights.load import LoadReport, load_tensors
from yunque.weights.models import convert, find_checkpoint, load_model, open_any
from yunque.weights.save import save_model
from yunque.weights.snapshots import SnapshotParts, SnapshotState, SnapshotStore, load_snapshot

__all__ = [
    "Checkpoint",
    "Fp8Format",
    "LoadReport",
    "SnapshotParts",
    "SnapshotState",
    "SnapshotStore",
    "convert",
    "find_checkpoint",
    "fp8_tensor_specs",
    "load_model",
    "load_snapshot",
    "load_tensors",
    "open_any",
    "open_checkpoint",
    "read_config",
    "save_model",
    "text_files",
    "write_gguf",
]

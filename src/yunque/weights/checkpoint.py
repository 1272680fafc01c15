"""A checkpoint folder: its config and where each tensor lies, with nothing read from outside the folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yunque.core.errors import CheckpointError, DataError
from yunque.core.files import read_json
from yunque.model.config import ModelConfig
from yunque.weights.safetensors_file import Entry, read_header

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: What a run's snapshot has beside the files of a checkpoint.
MANIFEST = "manifest.json"
#: What belongs to the text side and travels with the weights.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_CONFIG_LIMIT_BYTES = 16 * 2**20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder: the parsed ``config.json`` and the entry of every tensor; no tensor is read yet."""

    folder: Path
    raw_config: Mapping[str, Any]
    entries: Mapping[str, Entry]

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_hf(self.raw_config)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Open a folder with ``config.json`` and ``model.safetensors`` (or the shards that its index names).

    Only JSON and safetensors are read. Raises ``CheckpointError``, naming file and tensor, when a file is
    missing, damaged or outside the folder (an index with ``..`` or an absolute path, a link that leaves the
    folder), when a tensor is stored twice, or when index and shards disagree.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    config = _read_table(inside(folder, CONFIG))
    return Checkpoint(folder, config, _entries(folder))


def is_snapshot(folder: Path) -> bool:
    """Whether ``folder`` is one of our snapshots rather than a plain checkpoint."""
    return (folder / MANIFEST).exists()


def read_config(folder: Path | str) -> ModelConfig:
    """The architecture that a checkpoint folder's ``config.json`` describes."""
    return ModelConfig.from_hf(_read_table(inside(Path(folder), CONFIG)))


def text_files(folder: Path | str) -> dict[str, bytes]:
    """Contents of the tokenizer and template files in ``folder``, as far as they exist."""
    names = [name for name in TEXT_FILES if (Path(folder) / name).exists()]
    return {name: inside(Path(folder), name).read_bytes() for name in names}


def inside(folder: Path, name: str) -> Path:
    """The regular file ``name`` of ``folder``, after checking that it lies there.

    A link may stay within the folder, or, in a Hugging Face cache (``snapshots/<revision>`` beside
    ``blobs``), lead to that repository's ``blobs``.
    """
    if not name or Path(name).name != name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder}: file name {name!r} leads outside the folder")
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder} has no readable {name}{_hint(folder)}") from error
    if not any(real.is_relative_to(root.resolve()) for root in _roots(folder)):
        raise CheckpointError(f"{path} is a link to {real}, outside the folder; put the file itself there")
    if not real.is_file():
        raise CheckpointError(f"{path} is not a regular file")
    return real


def _roots(folder: Path) -> list[Path]:
    absolute = folder.absolute()
    if absolute.parent.name == "snapshots" and (blobs := absolute.parent.parent / "blobs").is_dir():
        return [folder, blobs]
    return [folder]


def _hint(folder: Path) -> str:
    found = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    return f" (found {found[0]}: pickle files are never read; convert it to safetensors)" if found else ""


def _read_table(path: Path) -> Mapping[str, Any]:
    try:
        table = read_json(path, limit_bytes=_CONFIG_LIMIT_BYTES)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(table).__name__}")
    return table


def _entries(folder: Path) -> dict[str, Entry]:
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return read_header(inside(folder, SINGLE))
    index = inside(folder, INDEX)
    weight_map = _read_table(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    entries: dict[str, Entry] = {}
    for file in sorted(set(weight_map.values())):
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {file!r} is not a .safetensors file")
        for name, entry in read_header(inside(folder, file)).items():
            if name in entries:
                raise CheckpointError(f"{entry} is also in {entries[name].file.name}")
            if weight_map.get(name) != file:
                raise CheckpointError(f"{entry} is not where {index.name} puts it ({weight_map.get(name)})")
            entries[name] = entry
    for name, file in weight_map.items():
        if name not in entries:
            raise CheckpointError(f"{file}: tensor {name!r} is missing, but {index.name} puts it there")
    return entries

"""A run's snapshots: all that a run goes on from, whole and checked, the newest and the best kept."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from yunque.core.errors import CheckpointError, ConfigError, DataError
from yunque.core.files import read_json, sha256_file
from yunque.core.logging import get_logger
from yunque.model.config import ModelConfig
from yunque.weights.checkpoint import MANIFEST, inside, open_checkpoint
from yunque.weights.load import load_tensors
from yunque.weights.new_folder import FolderWriter, clean_leftovers, delete_folder, new_folder, survivors
from yunque.weights.safetensors_file import FileRecord, Pending, read_tensors
from yunque.weights.save import write_model
from yunque.weights.trees import Tree, flatten, unflatten

RUN = "run.toml"
_FORMAT = "yunque-snapshot"
_VERSION = 1
_TRAINING_FILES = tuple(f"{tree}.{kind}" for tree in ("optimizer", "state") for kind in ("json", "safetensors"))
_STEP = re.compile(r"step-(\d{8,})")

_logger = get_logger(__name__)


@dataclass(frozen=True)
class SnapshotParts:
    """What ``SnapshotStore.save`` writes.

    ``model`` is the module's ``state_dict()``. ``optimizer`` and ``progress`` (data position, random streams,
    the trainer's counters) are trees: None, bool, int, float, str, tensors, and lists, tuples and dicts of
    these; a random generator's bytes are a uint8 tensor. ``run_toml`` is the resolved configuration,
    ``files`` what else belongs to the model by file name (tokenizer, chat template).
    """

    config: ModelConfig
    model: Mapping[str, Tensor]
    optimizer: Tree = None
    progress: Tree = None
    run_toml: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class SnapshotState:
    """What ``load_snapshot`` gives back beside the model's tensors, which it fills in place."""

    step: int
    optimizer: Tree
    progress: Tree
    run_toml: str
    metric: float | None


@dataclass(frozen=True)
class Manifest:
    """The last file written: what was saved when, and size and checksum of every other file.

    ``sequence`` counts the saves of a store, so that a run which went back to an earlier step and on from
    there has its own snapshots as the latest.
    """

    step: int
    sequence: int
    metric: float | None
    files: Mapping[str, FileRecord]


class SnapshotStore:
    """The snapshots of one run, as ``step-00000100`` folders under ``folder``.

    After every save, the ``keep_last`` latest stay and the ``keep_best`` with the best (lowest) metric.
    """

    def __init__(self, folder: Path | str, *, keep_last: int = 2, keep_best: int = 1) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ConfigError(f"keep_last is {keep_last} and keep_best {keep_best}; at least 1 and 0 are needed")
        self.folder = Path(folder).absolute()
        self.keep_last = keep_last
        self.keep_best = keep_best

    def save(self, step: int, parts: SnapshotParts, *, metric: float | None = None) -> Path:
        """Write a snapshot and return its folder; it is on disk, checksummed and in place, or there is none.

        One of the same step is replaced. Raises ``CheckpointError`` when the disk fails or is full, or the
        parts do not fit their config; earlier snapshots are untouched then.
        """
        final = self.folder / f"step-{step:08d}"
        sequence = 1 + max((manifest.sequence for _, manifest in self._listed()), default=0)
        with new_folder(final) as writer:
            _write(writer, parts)
            known = metric if metric is not None and math.isfinite(metric) else None  # NaN is never the best
            manifest = Manifest(step, sequence, known, dict(writer.records))
            writer.write_bytes(MANIFEST, _manifest_json(manifest))
        self._prune()
        return final

    def latest(self) -> Path | None:
        """The last whole snapshot, all checksums compared; damaged ones are skipped with a warning."""
        return _first_whole(sorted(self._listed(warn=True), key=_sequence, reverse=True))

    def _listed(self, *, warn: bool = False) -> list[tuple[Path, Manifest]]:
        """Snapshots with a readable manifest, by step."""
        found = []
        steps = survivors(self.folder) if self.folder.is_dir() else {}
        for name, path in sorted(steps.items()):
            if _STEP.fullmatch(name):
                try:
                    found.append((path, read_manifest(path)))
                except CheckpointError as error:
                    if warn:
                        _logger.warning("snapshot skipped: %s", error)
        return found

    def _prune(self) -> None:
        clean_leftovers(self.folder, lambda name: _STEP.fullmatch(name) is not None)
        found = self._listed()
        newest = sorted(found, key=_sequence, reverse=True)[: self.keep_last]
        kept = {path for path, _ in newest + _by_metric(found)[: self.keep_best]}
        for path, _ in found:
            if path not in kept:
                try:
                    delete_folder(path)
                except OSError as error:
                    _logger.warning("old snapshot not deleted: %s", error)


def _sequence(found: tuple[Path, Manifest]) -> int:
    return found[1].sequence


def _by_metric(found: list[tuple[Path, Manifest]]) -> list[tuple[Path, Manifest]]:
    """Those with a metric, the best first, a later one before an equal earlier one."""
    ranks = [(m.metric, -m.sequence, path, m) for path, m in found if m.metric is not None]
    return [(path, manifest) for _, _, path, manifest in sorted(ranks, key=lambda rank: rank[:2])]


def _first_whole(found: list[tuple[Path, Manifest]]) -> Path | None:
    for path, manifest in found:
        try:
            verify(path, manifest)
        except CheckpointError as error:
            _logger.warning("snapshot skipped: %s", error)
        else:
            return path
    return None


def load_snapshot(snapshot: Path | str, *, model: Mapping[str, Tensor]) -> SnapshotState:
    """Fill ``model`` (a module's ``state_dict()``) and return the rest, after comparing every checksum.

    The bits are those that were saved: a model of another shape or dtype is refused. Raises
    ``CheckpointError`` naming the damaged file.
    """
    snapshot = Path(snapshot)
    manifest = read_manifest(snapshot)
    verify(snapshot, manifest)
    load_tensors(open_checkpoint(snapshot), model, exact=True)
    return SnapshotState(
        step=manifest.step,
        optimizer=_read_tree(snapshot, "optimizer"),
        progress=_read_tree(snapshot, "state"),
        run_toml=(snapshot / RUN).read_text(encoding="utf-8"),
        metric=manifest.metric,
    )


def read_manifest(snapshot: Path) -> Manifest:
    """The manifest of a snapshot. Raises ``CheckpointError`` when it is missing or is not one."""
    path = inside(snapshot, MANIFEST)
    try:
        data = read_json(path)
        if data["format"] != _FORMAT or data["version"] != _VERSION:
            raise CheckpointError(f"{path}: {data['format']} version {data['version']}; expected {_FORMAT} {_VERSION}")
        files = {name: FileRecord(**record) for name, record in data["files"].items()}
        return Manifest(data["step"], data["sequence"], data["metric"], files)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a snapshot manifest ({error!r})") from error


def verify(snapshot: Path, manifest: Manifest, *, training_state: bool = True) -> None:
    """Raise ``CheckpointError``, naming the file, unless every file has its recorded size and checksum.

    Without ``training_state`` the optimiser's and trainer's files are not looked at.
    """
    for name, record in manifest.files.items():
        if not training_state and name in _TRAINING_FILES:
            continue
        path = inside(snapshot, name)
        if (size := path.stat().st_size) != record.num_bytes:
            raise CheckpointError(f"{path}: {size} bytes, {record.num_bytes} were saved")
        if sha256_file(path) != record.sha256:
            raise CheckpointError(f"{path}: checksum differs from what was saved; the file is damaged")


def _write(writer: FolderWriter, parts: SnapshotParts) -> None:
    write_model(writer, parts.config, parts.model)
    for name, tree in (("optimizer", parts.optimizer), ("state", parts.progress)):
        value, tensors = flatten(tree)
        writer.write_bytes(f"{name}.json", (json.dumps(value, allow_nan=False) + "\n").encode())
        writer.write_tensors(f"{name}.safetensors", [Pending.of(*item) for item in tensors.items()])
    writer.write_bytes(RUN, parts.run_toml.encode())
    for name, content in parts.files.items():
        writer.write_bytes(name, content)


def _read_tree(snapshot: Path, name: str) -> Tree:
    return unflatten(read_json(snapshot / f"{name}.json"), read_tensors(snapshot / f"{name}.safetensors"))


def _manifest_json(manifest: Manifest) -> bytes:
    data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, **asdict(manifest)}
    return (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()

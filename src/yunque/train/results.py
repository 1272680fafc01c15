"""What came out of a run: a record per stage, a summary, and the table that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from yunque.core.errors import CheckpointError, DataError
from yunque.core.files import read_json, write_json
from yunque.train.plan_view import count, size


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """One finished stage. ``before`` and ``after`` are held-out losses in nats per token, by attention.

    ``seconds`` is training time over all processes that worked on it, evaluation and saving excluded.
    ``fingerprint`` identifies the final snapshot, ``started_from`` the one that the stage began with ("" for
    none).
    """

    title: str
    kind: str
    steps: int
    tokens: int
    seconds: float
    first_loss: float | None
    last_loss: float | None
    before: Mapping[str, float]
    after: Mapping[str, float]
    peak_memory_bytes: int
    threads: int
    snapshot: str
    fingerprint: str
    started_from: str
    settings: Mapping[str, Any]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def write(self, path: Path) -> None:
        """Store the record; its existence marks the stage as finished."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> StageResult:
        """The record at ``path``. Raises ``CheckpointError`` where it is none."""
        try:
            data = read_json(path)
            return cls(**{field.name: data[field.name] for field in fields(cls)})
        except (DataError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: not the record of a finished stage ({error}); delete its folder") from error


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A finished run: its stages in order and the folder of the final model."""

    name: str
    stages: tuple[StageResult, ...]
    model: str

    @property
    def dense_sparse_gap(self) -> float | None:
        """Held-out loss of sparse minus dense attention after the last stage that measured both."""
        for stage in reversed(self.stages):
            if {"heldout_dense", "heldout_sparse"} <= stage.after.keys():
                return stage.after["heldout_sparse"] - stage.after["heldout_dense"]
        return None

    def to_json(self) -> dict[str, Any]:
        """The summary as plain values, without the stages' settings."""
        stages = [
            {key: value for key, value in asdict(stage).items() if key != "settings"}
            | {"tokens_per_s": stage.tokens_per_s}
            for stage in self.stages
        ]
        return {
            "name": self.name,
            "dense_sparse_gap": self.dense_sparse_gap,
            "model": self.model,
            "stages": stages,
        }

    def write(self, path: Path) -> None:
        """Store the summary as JSON."""
        write_json(path, self.to_json())

    def show(self, console: Console) -> None:
        """Print the summary as a table."""
        title = f"{self.name}: loss in nats per token, before → after each stage"
        table = Table("stage", "training", "held out dense", "held out sparse", title=title)
        for column in table.columns:
            column.no_wrap = True
        for name in ("tokens", "tokens/s", "memory"):
            table.add_column(name, justify="right", no_wrap=True)
        for stage in self.stages:
            losses = [
                _change(stage.first_loss, stage.last_loss),
                _change(stage.before.get("heldout_dense"), stage.after.get("heldout_dense")),
                _change(stage.before.get("heldout_sparse"), stage.after.get("heldout_sparse")),
            ]
            speed, memory = f"{stage.tokens_per_s:,.0f}", size(stage.peak_memory_bytes)
            table.add_row(stage.title, *losses, count(stage.tokens), speed, memory)
        console.print(table)
        if self.dense_sparse_gap is not None:
            console.print(f"sparse minus dense attention, held out: {self.dense_sparse_gap:+.4f} nats per token")


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "–"
    return f"{before:.3f} → {after:.3f}"

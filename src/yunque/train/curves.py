"""Loss curves of a run as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yunque.core.metrics import read_jsonl

_MAX_POINTS = 2000


@dataclass(frozen=True)
class StageCurve:
    """Where a stage's metrics are, and how many tokens came before it."""

    title: str
    metrics: Path
    tokens_before: int


def draw_curves(stages: Sequence[StageCurve], picture: Path) -> Path:
    """Draw training and held-out loss of all stages over the tokens seen, the indexer's KL below; returns
    ``picture``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for number, stage in enumerate(stages):
        rows = list(read_jsonl(stage.metrics)) if stage.metrics.exists() else []
        color = f"C{number}"
        _line(top, rows, "loss", stage, color=color, alpha=0.6, linewidth=1, label=stage.title)
        _line(bottom, rows, "index_kl", stage, color=color, linewidth=1)
        for name, marker in (("heldout_dense", "o"), ("heldout_sparse", "^")):
            _line(top, rows, name, stage, color=color, marker=marker, linestyle="none", markeredgecolor="black")
        top.axvline(stage.tokens_before, color="gray", linewidth=0.5)
    top.plot([], [], "o", color="gray", label="held out, dense attention")
    top.plot([], [], "^", color="gray", label="held out, sparse attention")
    top.set_ylabel("loss, nats per token")
    top.legend(fontsize="small")
    bottom.set_ylabel("indexer KL")
    bottom.set_xlabel("tokens")
    figure.savefig(picture, dpi=120, format="png")
    return picture


def _line(axes: Any, rows: Sequence[dict[str, Any]], name: str, stage: StageCurve, **style: Any) -> None:
    """Plot one metric; a row without its own token count (an evaluation) has that of the step it follows."""
    points, tokens = [], 0.0
    for row in rows:
        tokens = row.get("tokens", tokens)
        if name in row:
            points.append((stage.tokens_before + tokens, row[name]))
    points = points[:: max(1, len(points) // _MAX_POINTS)]
    if points:
        axes.plot(*zip(*points, strict=True), **style)

"""Runs a benchmark's smoke run as a person would, and checks the shape of what every benchmark prints."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import yunque

REPOSITORY = Path(__file__).parents[2]


def quick_figures(name: str, scratch: Path, *, zeros: Collection[str] = ()) -> dict[str, float]:
    """Figures of ``benchmarks/NAME.py --quick`` with one seed, after checking all that its last line must be.

    ``scratch`` takes the run's temporary files and ``line.json``, the last line. Only the figures ``zeros`` may be 0.
    """
    file = scratch / "line.json"
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", "--quick", "--seeds", "0", "--json", str(file)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(Path(yunque.__file__).parents[1]), "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.splitlines()
    result = json.loads(line)
    assert list(result) == ["benchmark", "commit", "machine", "figures"]
    assert result["benchmark"] == name
    assert result["commit"]
    assert result["machine"].items() >= {"cores": len(os.sched_getaffinity(0)), "threads": "1"}.items()
    assert json.loads(file.read_text(encoding="utf-8")) == result
    figures = result["figures"]
    assert all(math.isfinite(figure) for figure in figures.values()), figures
    assert all(figure > 0 for name, figure in figures.items() if name not in zeros), figures
    assert len(table) > 1, "no table for people"
    return figures

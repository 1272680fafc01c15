"""What every benchmark shares: its options, the machine it ran on, its table, the JSON object at the end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def options(description: str, *, seeds: Sequence[int]) -> argparse.ArgumentParser:
    """``--quick``, ``--seeds`` (one repetition each) and ``--json``; a benchmark may add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a smoke run in seconds; its figures mean nothing")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=list(seeds), metavar="N", help="one repetition for each seed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the last line to FILE")
    return parser


def report(
    benchmark: str,
    rows: Sequence[Mapping[str, Any]],
    figures: Mapping[str, float],
    *,
    to: Path | None,
) -> None:
    """Print ``rows`` as a table and, as the last line, the benchmark's JSON object (also to file ``to``)."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns] + [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    line = json.dumps({"benchmark": benchmark, "commit": commit(), "machine": machine(), "figures": dict(figures)})
    print(line, flush=True)
    if to is not None:
        to.write_text(line + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, memory, load, versions, threads."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": version("torch"),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
    }


def commit() -> str:
    """The commit of the source tree, with ``+`` when files differ from it; "unknown" outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout
    return head.stdout.strip() + ("+" if changed else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

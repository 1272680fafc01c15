"""The loading benchmark runs, and a checkpoint takes little more memory than its own size while it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yunque


def test_quick_run_prints_both_figures_and_loads_without_a_second_copy(tmp_path):
    repository = Path(__file__).parents[2]
    command = [
        sys.executable,
        "benchmarks/loading.py",
        "--quick",
        "--seeds",
        "0",
        "--json",
        str(tmp_path / "line.json"),
    ]
    source = str(Path(yunque.__file__).parents[1])
    done = subprocess.run(
        command,
        cwd=repository,
        env=os.environ | {"PYTHONPATH": source, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "line.json").read_text())
    assert result["benchmark"] == "loading"
    assert set(result["figures"]) == {"load_time_ratio", "load_memory_ratio"}
    assert 0.5 < result["figures"]["load_memory_ratio"] <= 1.2
    assert [path.name for path in tmp_path.iterdir()] == ["line.json"]

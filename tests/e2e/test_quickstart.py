"""The README's first command, a few steps long; and killed in the middle."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

STAGES = ["pretrain", "midtrain", "dsa_warmup", "dsa_sparse", "sft"]
#: The same five stages on a smaller vocabulary and fewer tokens than --quick, for runs that are made twice.
SMALL = ["stage.*.tokens=8_192", "stage.*.tokens_per_step=2_048", "hooks.snapshot_every_s=0.01"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "yunque", "quickstart", "--quick", *arguments]


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tokenised text, made by whichever run comes first."""
    return f"data.cache={str(tmp_path_factory.mktemp('cache'))!r}"


def test_quickstart_trains_adapts_and_writes(tmp_path: Path, shared_cache: str) -> None:
    done = subprocess.run(command(shared_cache), cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "quickstart-quick"
    summary = json.loads((folder / "summary.json").read_text())
    assert [stage["title"] for stage in summary["stages"]] == STAGES
    first = summary["stages"][0]
    assert first["after"]["heldout_dense"] < first["before"]["heldout_dense"] - 0.5
    assert isinstance(summary["dense_sparse_gap"], float)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= {p.name for p in (folder / "model").iterdir()}
    for heading in ("a completion", "a tool call", "next:"):
        assert heading in done.stdout


@pytest.mark.slow
def test_killed_in_the_middle_of_every_stage_the_same_command_ends_with_the_same_model(
    tmp_path: Path, shared_cache: str
) -> None:
    """kill -9 before anything is trained, and once half-way in each stage: after a snapshot, before the record."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    run = command(*SMALL, shared_cache)
    subprocess.run(run, cwd=tmp_path / "whole", check=True, capture_output=True, timeout=600)
    folder = tmp_path / "killed" / "runs" / "quickstart-quick"
    kill_when(run, tmp_path / "killed", lambda: (folder / "run.toml").exists())
    assert not list(folder.glob("*/snapshots"))
    for number, title in enumerate(STAGES, start=1):
        stage = folder / f"{number:02d}-{title}"
        kill_when(run, tmp_path / "killed", lambda stage=stage: any(stage.glob("snapshots/step-*")))
        assert not (stage / "stage.json").exists()
        assert (stage / "metrics.jsonl").exists()
    subprocess.run(run, cwd=tmp_path / "killed", check=True, capture_output=True, timeout=600)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def kill_when(arguments: list[str], folder: Path, is_time: Callable[[], bool]) -> None:
    """Run in ``folder`` and kill -9 as soon as ``is_time``."""
    process = subprocess.Popen(arguments, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 300
    while not is_time():
        assert process.poll() is None, "the run ended before its time to be killed"
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def losses(folder: Path) -> list[list[tuple[int, float]]]:
    """Step and training loss of every line of metrics, stage by stage."""
    files = sorted((folder / "runs" / "quickstart-quick").glob("*/metrics.jsonl"))
    assert len(files) == len(STAGES)
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [[(row["step"], row["objective"]) for row in stage if "objective" in row] for stage in rows]


def digest(folder: Path) -> str:
    """Hash of the final model's weights."""
    model = folder / "runs" / "quickstart-quick" / "model"
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(model.glob("*.safetensors"))]
    assert hashes
    return "".join(hashes)

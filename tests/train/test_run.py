"""Whole runs of the smallest model: resumed equals uninterrupted, stages move only what they train."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from training_runs import nano_run

from yunque.core.errors import ConfigError, Interrupted
from yunque.core.files import sha256_file
from yunque.core.metrics import read_jsonl
from yunque.train.results import StageResult
from yunque.train.run import execute
from yunque.train.settings import RunConfig, run_from_mapping
from yunque.train.signals import StopRequest
from yunque.weights.models import load_model

pytestmark = pytest.mark.xdist_group("train_run")

DETAILS_OF_TIME = {"seconds", "tokens_per_s"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared tokenizer and token cache, so that runs differ in nothing and tokenise once."""
    return tmp_path_factory.mktemp("shared")


def _run(cache: Path, output: Path, *kinds: str, **changes: Any) -> RunConfig:
    base = nano_run()
    stages = [stage for stage in base["stage"] if not kinds or stage["kind"] in kinds]
    data = base["data"] | {"cache": str(cache / "tokens")}
    run = run_from_mapping(base | {"stage": stages, "data": data, "output": str(output)} | changes)
    kept = cache / "tokenizer"
    if kept.exists() and not (output / "tokenizer").exists():
        shutil.copytree(kept, output / "tokenizer")
    return run


def _execute(run: RunConfig, cache: Path, **options: Any) -> str:
    """Execute quietly; what was printed."""
    out = io.StringIO()
    execute(run, Console(file=out, width=200), **options)
    if not (cache / "tokenizer").exists():
        shutil.copytree(run.folder / "tokenizer", cache / "tokenizer")
    return out.getvalue()


def _tensors(folder: Path, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / file)


def _final(run: RunConfig, stage: str) -> Path:
    return run.folder / StageResult.read(run.folder / stage / "stage.json").snapshot


def _rows(run: RunConfig, stage: str) -> list[dict[str, Any]]:
    rows = read_jsonl(run.folder / stage / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in DETAILS_OF_TIME} for row in rows]


@pytest.fixture(scope="module")
def pipeline(cache: Path) -> RunConfig:
    """All five stages, run once without interruption."""
    run = _run(cache, cache / "pipeline", hooks={"evaluate_every_tokens": 256})
    _execute(run, cache)
    return run


def test_a_run_interrupted_after_every_single_step_equals_the_uninterrupted_one(
    pipeline: RunConfig, cache: Path, tmp_path: Path
) -> None:
    run = _run(cache, tmp_path / "cut", hooks={"evaluate_every_tokens": 256})
    messages = []
    while not (run.folder / "summary.json").exists():
        stop = StopRequest()
        stop.requested = "SIGINT"
        try:
            _execute(run, cache, stop=stop)
        except Interrupted as interruption:
            messages.append(str(interruption))
    assert all("the same command goes on" in message for message in messages)
    assert len(messages) == 18 + 4  # after each of 18 steps, and after the first four stages
    for stage in ("01-pretrain", "02-midtrain", "03-dsa_warmup", "04-dsa_sparse", "05-sft"):
        for file in ("model.safetensors", "optimizer.safetensors"):
            straight, cut = (_tensors(_final(r, stage), file) for r in (pipeline, run))
            assert straight.keys() == cut.keys()
            assert all(torch.equal(straight[name], cut[name]) for name in straight), (stage, file)
        assert _rows(pipeline, stage) == _rows(run, stage)


def test_a_run_killed_between_snapshots_goes_on_to_the_same_result(cache: Path, tmp_path: Path) -> None:
    """kill -9 inside the fourth of four steps, snapshots every second step: steps 3 and 4 are done again."""
    changes = {"hooks": {"snapshot_every_tokens": 256, "snapshot_every_s": 0.0}, "threads": 1}
    straight = _run(cache, tmp_path / "straight", "pretrain", **changes)
    _execute(straight, cache)
    killed = _run(cache, tmp_path / "killed", "pretrain", **changes)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, str(script), json.dumps(str(killed.folder)), json.dumps(str(cache))]
    done = subprocess.run(arguments, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    rows = _rows(killed, "01-pretrain")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    printed = _execute(killed, cache)
    assert "pretrain: going on after step 2 of 4" in printed
    for file in ("model.safetensors", "optimizer.safetensors"):
        a, b = (_tensors(_final(run, "01-pretrain"), file) for run in (straight, killed))
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert _rows(straight, "01-pretrain") == _rows(killed, "01-pretrain")


KILLED = """
import json, os, signal, sys
from pathlib import Path
from rich.console import Console
from test_run import _run
from yunque.train.run import execute

class Looks:
    def __init__(self):
        self.count = 0
    def __call__(self):
        self.count += 1
        if self.count == LAST_LOOK:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(self.count)

LAST_LOOK = 14
output, cache = (Path(json.loads(argument)) for argument in sys.argv[1:])
changes = {"hooks": {"snapshot_every_tokens": 256, "snapshot_every_s": 0.0}, "threads": 1}
execute(_run(cache, output, "pretrain", **changes), Console(quiet=True), clock=Looks())
"""


def test_each_stage_moves_only_what_it_trains(pipeline: RunConfig) -> None:
    order = ("01-pretrain", "02-midtrain", "03-dsa_warmup", "04-dsa_sparse", "05-sft")
    weights = {stage: _tensors(_final(pipeline, stage)) for stage in order}
    moved = {
        after: {name for name, t in weights[after].items() if not torch.equal(t, weights[before][name])}
        for before, after in pairwise(order)
    }
    assert moved["03-dsa_warmup"]
    assert all(".indexer." in name for name in moved["03-dsa_warmup"])
    assert not any(".indexer." in name for name in moved["02-midtrain"] | moved["05-sft"])
    assert any(".indexer." in name for name in moved["04-dsa_sparse"])
    assert any("q_b_proj" in name for name in moved["04-dsa_sparse"])
    biases = {name for name in weights[order[0]] if name.endswith("e_score_correction_bias")}
    assert biases & moved["02-midtrain"]
    assert not biases & (moved["03-dsa_warmup"] | moved["05-sft"])


def test_a_finished_run_is_not_trained_again_and_its_files_are_complete(pipeline: RunConfig, cache: Path) -> None:
    records = sorted(pipeline.folder.glob("*/stage.json"))
    before = [record.stat().st_mtime_ns for record in records]
    printed = _execute(pipeline, cache)
    assert [record.stat().st_mtime_ns for record in records] == before
    assert "step" not in printed
    summary = json.loads((pipeline.folder / "summary.json").read_text())
    assert [stage["title"] for stage in summary["stages"]] == [stage.title for stage in pipeline.stage]
    assert [stage["tokens"] for stage in summary["stages"]] == [512, 512, 512, 512, 4096]
    assert summary["dense_sparse_gap"] == pytest.approx(
        summary["stages"][3]["after"]["heldout_sparse"] - summary["stages"][3]["after"]["heldout_dense"]
    )
    assert all(stage["peak_memory_bytes"] > 0 and stage["tokens_per_s"] > 0 for stage in summary["stages"])
    assert (pipeline.folder / "curves.png").stat().st_size > 5000
    assert run_from_mapping(_toml(pipeline.folder / "run.toml")) == pipeline


def _toml(path: Path) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(path.read_text())


def test_the_final_model_loads_as_a_checkpoint_with_the_new_rotary_base(pipeline: RunConfig) -> None:
    folder = pipeline.folder / "model"
    model = load_model(folder)
    assert model.config.rope_theta == 40_000.0
    assert len(model.config.eos_token_id) == 3
    final = _tensors(_final(pipeline, "05-sft"))
    assert torch.equal(model.lm_head.weight, final["lm_head.weight"])
    assert {"tokenizer.json", "chat_template.jinja", "config.json"} <= {path.name for path in folder.iterdir()}


def test_other_settings_in_the_same_folder_are_refused_by_name(pipeline: RunConfig, cache: Path) -> None:
    base = nano_run()
    base["stage"][1]["schedule"]["lr_peak"] = 5e-3
    data = base["data"] | {"cache": str(cache / "tokens")}
    changed = run_from_mapping(base | {"output": str(pipeline.folder), "data": data})
    with pytest.raises(ConfigError, match=r"02-midtrain was run with stage.schedule.lr_peak = 0.003, it is 0.005"):
        _execute(changed, cache)


def test_a_later_stage_of_other_weights_is_refused(cache: Path, tmp_path: Path) -> None:
    run = _run(cache, tmp_path / "run", "pretrain", "midtrain")
    _execute(run, cache)
    shutil.rmtree(run.folder / "01-pretrain")
    with pytest.raises(ConfigError, match="02-midtrain was trained from other weights than the stage before"):
        _execute(run, cache)


def test_two_runs_at_once_in_one_folder_are_refused_and_one_after_the_other_is_not(cache: Path, tmp_path: Path) -> None:
    """The second begins in the middle of the first, at a look at the clock; the first goes on unharmed."""
    run = _run(cache, tmp_path / "run", "pretrain")
    refusals: list[str] = []

    def clock() -> float:
        if not refusals:
            with pytest.raises(ConfigError) as error:
                execute(run, Console(quiet=True))
            refusals.append(str(error.value))
        return 0.0

    _execute(run, cache, clock=clock)
    assert refusals == [f"another process trains in {run.folder}; wait for it, or choose another output"]
    assert StageResult.read(run.folder / "01-pretrain" / "stage.json").steps == 4
    _execute(run, cache)


def _interrupted_in_midtrain(cache: Path, folder: Path) -> RunConfig:
    """A run of two stages that stands after the first step of the second."""
    run = _run(cache, folder, "pretrain", "midtrain")
    stop = StopRequest()

    def clock() -> float:
        if (run.folder / "02-midtrain" / "metrics.jsonl").exists():
            stop.requested = "SIGINT"
        return 0.0

    with pytest.raises(Interrupted, match=r"after step 1; saved .*02-midtrain"):
        _execute(run, cache, stop=stop, clock=clock)
    assert not (run.folder / "02-midtrain" / "stage.json").exists()
    return run


def test_a_stage_interrupted_half_way_still_reports_the_snapshot_it_started_from(cache: Path, tmp_path: Path) -> None:
    run = _interrupted_in_midtrain(cache, tmp_path / "run")
    assert "midtrain: going on after step 1 of 4" in _execute(run, cache)
    first, second = (StageResult.read(run.folder / stage / "stage.json") for stage in ("01-pretrain", "02-midtrain"))
    assert first.started_from == ""
    assert second.started_from == first.fingerprint == sha256_file(run.folder / first.snapshot / "manifest.json")


def test_a_half_done_stage_does_not_go_on_from_other_weights_than_it_started_from(cache: Path, tmp_path: Path) -> None:
    run = _interrupted_in_midtrain(cache, tmp_path / "run")
    shutil.rmtree(run.folder / "01-pretrain")
    with pytest.raises(ConfigError, match="02-midtrain was trained from other weights than the stage before has now"):
        _execute(run, cache)


def test_curves_that_cannot_be_drawn_do_not_hide_why_a_run_ended(cache: Path, tmp_path: Path) -> None:
    run = _run(cache, tmp_path / "run", "pretrain")
    (run.folder / "curves.png").mkdir(parents=True)
    stop = StopRequest()
    stop.requested = "SIGINT"
    with pytest.raises(Interrupted, match="SIGINT after step 1"):
        _execute(run, cache, stop=stop)
    with pytest.raises(IsADirectoryError):
        _execute(run, cache)
    assert (run.folder / "model" / "config.json").exists()
    (run.folder / "curves.png").rmdir()
    _execute(run, cache)
    assert (run.folder / "curves.png").stat().st_size > 5000


def test_a_larger_thread_count_is_reported_on_resuming(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = StopRequest()
    stop.requested = "SIGTERM"
    with pytest.raises(Interrupted):
        _execute(_run(cache, tmp_path / "run", "pretrain", threads=1), cache, stop=stop)
    try:
        _execute(_run(cache, tmp_path / "run", "pretrain", threads=2), cache)
    finally:
        torch.set_num_threads(1)
    assert "trained with 1 threads before, with 2 now" in caplog.text


def test_carried_optimizer_state_changes_the_next_stage_and_fresh_state_is_the_default(
    cache: Path, tmp_path: Path
) -> None:
    finals = {}
    for choice in ("fresh", "carry"):
        base = nano_run()["stage"][:2]
        base[1]["optimizer_state"] = choice
        run = _run(cache, tmp_path / choice, stage=base)
        _execute(run, cache)
        finals[choice] = _tensors(_final(run, "02-midtrain"))
    name = "model.layers.0.self_attn.q_b_proj.weight"
    assert not torch.equal(finals["fresh"][name], finals["carry"][name])


def test_a_run_starts_from_the_model_of_another(pipeline: RunConfig, cache: Path, tmp_path: Path) -> None:
    changes = {"start_from": str(pipeline.folder / "model"), "model": {}}
    run = _run(cache, tmp_path / "more", "midtrain", **changes)
    assert run.model.rope_theta == 40_000.0
    _execute(run, cache)
    result = StageResult.read(run.folder / "01-midtrain" / "stage.json")
    assert result.before["heldout_dense"] < 6.1  # below the log of the vocabulary, 6.24: not a random model


def test_bf16_trains_with_fp32_masters_and_saves_bf16(cache: Path, tmp_path: Path) -> None:
    run = _run(cache, tmp_path / "bf16", "pretrain", "dsa_sparse", dtype="bfloat16")
    _execute(run, cache)
    final = _final(run, "02-dsa_sparse")
    dtypes = {name: tensor.dtype for name, tensor in _tensors(final).items()}
    assert dtypes["lm_head.weight"] == torch.bfloat16
    assert dtypes["model.layers.1.mlp.gate.weight"] == torch.float32
    state = _tensors(final, "optimizer.safetensors")
    assert {t.dtype for name, t in state.items() if name.endswith(("master", "momentum"))} == {torch.float32}
    result = StageResult.read(run.folder / "01-pretrain" / "stage.json")
    assert result.after["heldout_dense"] < result.before["heldout_dense"] - 0.03


def test_the_smallest_model_learns(cache: Path, tmp_path: Path) -> None:
    """60 steps of 512 tokens: from the log of the vocabulary (6.24 nats) to below 5.2 on held-out text."""
    stage = nano_run()["stage"][0] | {
        "tokens": 60 * 512,
        "tokens_per_step": 512,
        "schedule": {"kind": "cosine", "lr_peak": 2e-2, "warmup_tokens": 2048},
    }
    run = _run(cache, tmp_path / "learns", stage=[stage])
    _execute(run, cache)
    result = StageResult.read(run.folder / "01-pretrain" / "stage.json")
    assert result.before["heldout_dense"] == pytest.approx(6.24, abs=0.05)
    assert result.after["heldout_dense"] < 5.2

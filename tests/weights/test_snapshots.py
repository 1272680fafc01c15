"""A snapshot is whole or not there; what it holds comes back to the bit; the newest and the best stay."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dying_savers import check_whole, parts_of
from sample_checkpoints import NANO, SHARED, empty_state, random_state, same_bits

import yunque
from yunque.core.errors import CheckpointError, ConfigError
from yunque.weights import SnapshotParts, SnapshotStore, load_snapshot
from yunque.weights.snapshots import read_manifest


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _run(*arguments: str) -> dict:
    source = Path(yunque.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("dying_savers.py")), *arguments],
        env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_comes_back_to_the_bit(tmp_path, dtype):
    model = random_state(SHARED, dtype=dtype)
    optimizer = {
        "state": {0: {"step": torch.tensor(3.0), "momentum": torch.randn(4)}},
        "groups": [{"betas": (0.9, 0.95)}],
    }
    progress = {
        "tokens": 2**40,
        "data": {"file": 3, "rest": [1, 2]},
        "torch": torch.get_rng_state(),
        "loss": math.inf,
    }
    store = SnapshotStore(tmp_path)
    path = store.save(7, SnapshotParts(SHARED, model, optimizer, progress, "[run]\nseed = 1\n"), metric=2.5)
    loaded = empty_state(SHARED, dtype=dtype)
    state = load_snapshot(path, model=loaded)
    assert same_bits(loaded, model)
    assert (state.step, state.run_toml, state.metric) == (7, "[run]\nseed = 1\n", 2.5)
    momentum = state.optimizer["state"][0].pop("momentum")
    assert torch.equal(momentum, optimizer["state"][0].pop("momentum"))
    assert state.optimizer == optimizer
    assert torch.equal(state.progress.pop("torch"), progress.pop("torch"))
    assert state.progress == progress


def test_layout_of_a_snapshot_folder(tmp_path):
    path = SnapshotStore(tmp_path).save(100, SnapshotParts(NANO, random_state(NANO), files={"tokenizer.json": b"{}"}))
    assert path == tmp_path / "step-00000100"
    assert _names(path) == [
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
        "run.toml",
        "state.json",
        "state.safetensors",
        "tokenizer.json",
    ]
    assert set(read_manifest(path).files) == set(_names(path)) - {"manifest.json"}


def test_model_of_another_dtype_or_shape_is_refused(tmp_path):
    path = SnapshotStore(tmp_path).save(1, SnapshotParts(NANO, random_state(NANO, dtype=torch.bfloat16)))
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight is BF16, the model's is F32"):
        load_snapshot(path, model=empty_state(NANO))
    with pytest.raises(CheckpointError, match="unexpected: 5"):
        load_snapshot(path, model=empty_state(SHARED, dtype=torch.bfloat16))


def test_last_and_best_are_kept(tmp_path):
    store = SnapshotStore(tmp_path, keep_last=2, keep_best=1)
    for step, metric in enumerate([3.0, 1.0, 2.0, math.nan, None, 4.0], start=1):
        store.save(step, parts_of(step), metric=metric)
    assert _names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]
    assert store.latest() == tmp_path / "step-00000006"
    store.save(7, parts_of(7), metric=1.0)
    store.save(8, parts_of(8))
    store.save(9, parts_of(9))
    assert _names(tmp_path) == ["step-00000007", "step-00000008", "step-00000009"], "of equals the later one stays"


def test_keeping_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="keep_last is 0"):
        SnapshotStore(tmp_path, keep_last=0)


def test_empty_store_has_no_latest(tmp_path):
    assert SnapshotStore(tmp_path / "absent").latest() is None
    assert SnapshotStore(tmp_path).latest() is None


def test_run_that_went_back_has_its_own_snapshot_as_latest(tmp_path):
    store = SnapshotStore(tmp_path, keep_last=3)
    for step in (100, 200, 150):
        store.save(step, parts_of(step))
    assert store.latest() == tmp_path / "step-00000150"
    store.save(100, parts_of(100))
    assert store.latest() == tmp_path / "step-00000100"
    assert check_whole(store) == 100


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "optimizer.safetensors",
        "state.safetensors",
        "optimizer.json",
        "run.toml",
        "config.json",
    ],
)
def test_every_kind_of_damage_is_named_and_the_previous_snapshot_serves(tmp_path, caplog, name):
    def flip(content: bytes) -> bytes:
        return bytes([content[0] ^ 1]) + content[1:]

    damages = {"checksum differs": flip, "bytes, .* were saved": lambda content: content[:-1]}
    for number, (message, damage) in enumerate(damages.items()):
        store = SnapshotStore(tmp_path / str(number))
        good, bad = store.save(1, parts_of(1)), store.save(2, parts_of(2))
        (bad / name).write_bytes(damage((bad / name).read_bytes()))
        with pytest.raises(CheckpointError, match=rf"{name}: .*{message}"):
            load_snapshot(bad, model=empty_state(NANO))
        with caplog.at_level(logging.WARNING):
            assert store.latest() == good
        assert f"snapshot skipped: {bad / name}" in caplog.text
        (bad / name).unlink()
        assert store.latest() == good
        with pytest.raises(CheckpointError, match=f"no readable {name}"):
            load_snapshot(bad, model=empty_state(NANO))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"format": "x", "version": 1}', '{"format": "yunque-snapshot"}']
)
def test_unreadable_manifest_is_skipped_with_a_warning(tmp_path, caplog, content):
    store = SnapshotStore(tmp_path)
    good, bad = store.save(1, parts_of(1)), store.save(2, parts_of(2))
    (bad / "manifest.json").write_text(content)
    assert store.latest() == good
    assert f"snapshot skipped: {bad / 'manifest.json'}" in caplog.text
    assert store.save(3, parts_of(3)) == store.latest()


def test_manifest_cannot_lead_outside_the_snapshot(tmp_path):
    path = SnapshotStore(tmp_path).save(1, parts_of(1))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../etc/passwd"] = manifest["files"]["run.toml"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="leads outside the folder"):
        load_snapshot(path, model=empty_state(NANO))


def test_state_that_cannot_be_saved_leaves_no_half_snapshot(tmp_path):
    store = SnapshotStore(tmp_path)
    store.save(1, parts_of(1))
    with pytest.raises(TypeError, match="state at thing holds a object"):
        store.save(2, SnapshotParts(NANO, random_state(NANO), {"thing": object()}))
    assert _names(tmp_path) == ["step-00000001"]


def test_killed_saver_always_leaves_a_whole_latest_snapshot(tmp_path):
    """kill -9 at random moments: each time all parts are of one step, and no progress is lost."""
    result = _run("kill", str(tmp_path / "run"), "12")
    reached = result["reached"]
    assert reached == sorted(reached)
    assert reached[-1] > reached[1] >= -1
    assert result["leftovers"] > 0, "no kill met a save half-done: the test shows nothing"
    assert not [name for name in result["after"] if name.startswith(".")]
    assert f"step-{reached[-1] + 1:08d}" in result["after"]


def test_full_disk_is_a_clear_error_and_costs_nothing_saved(tmp_path):
    result = _run("fill", str(tmp_path / "run"))
    assert "cannot write" in result["error"]
    assert "step-00000002: File too large; what was there before is untouched" in result["error"]
    assert result["latest"] == 1
    assert result["after"] == ["step-00000001"]

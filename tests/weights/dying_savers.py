"""Processes that save snapshots until they are killed or their disk is full. Run as a script, prints JSON."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from sample_checkpoints import NANO, empty_state, random_state

from yunque.core.errors import CheckpointError
from yunque.weights import SnapshotParts, SnapshotStore, load_snapshot


def parts_of(step: int) -> SnapshotParts:
    """Every number in every file of the snapshot of step ``n`` is ``n``."""
    model = {name: torch.full_like(tensor, step) for name, tensor in random_state(NANO).items()}
    momentum = {name: torch.full_like(tensor, step) for name, tensor in model.items()}
    return SnapshotParts(
        NANO,
        model,
        {"momentum": momentum},
        {"step": step, "rng": torch.full((50,), step % 251).byte()},
        f"step = {step}",
    )


def check_whole(store: SnapshotStore) -> int:
    """The step of the latest snapshot (-1: none), after checking that no part of it is another step's."""
    latest = store.latest()
    if latest is None:
        return -1
    model = empty_state(NANO)
    state = load_snapshot(latest, model=model)
    assert latest.name == f"step-{state.step:08d}"
    assert state.run_toml == f"step = {state.step}"
    assert state.progress["step"] == state.step
    assert state.progress["rng"].tolist() == [state.step % 251] * 50
    for tensors in (model, state.optimizer["momentum"]):
        assert all(bool((tensor == state.step).all()) for tensor in tensors.values())
    return state.step


def save_for_ever(folder: Path, reached: int, done: int) -> None:
    """Save step after step, each twice (replacing must be as safe as adding), and report every save."""
    store = SnapshotStore(folder)
    for step in range(reached + 1, reached + 10_000):
        for _ in range(2):
            store.save(step, parts_of(step), metric=float(step % 5))
            os.write(done, f"{step}\n".encode())


def kill_repeatedly(folder: Path, *, kills: int, seed: int) -> dict[str, object]:
    """Kill a saving child at random moments; what it reported as saved must be there each time, whole."""
    dice, reached, leftovers = random.Random(seed), [-1], 0
    for kill in range(kills):
        reports, done = os.pipe()
        child = os.fork()
        if child == 0:
            save_for_ever(folder, reached[-1], done)
        os.close(done)
        first = os.read(reports, 100) if kill % 2 else b""  # every other child has saved at least once
        time.sleep(dice.uniform(0.0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with open(reports) as lines:
            saved = max(map(int, [*first.split(), *lines]), default=reached[-1])
        leftovers += any(path.name.startswith(".") for path in folder.iterdir()) if folder.is_dir() else 0
        reached.append(check_whole(SnapshotStore(folder)))
        assert reached[-1] >= saved, f"step {saved} was saved, the latest is {reached[-1]}"
    SnapshotStore(folder).save(reached[-1] + 1, parts_of(reached[-1] + 1))
    return {
        "reached": reached,
        "leftovers": leftovers,
        "after": sorted(path.name for path in folder.iterdir()),
    }


def fill_the_disk(folder: Path) -> dict[str, object]:
    """Save once, then find that files can no longer grow beyond a size that is not enough."""
    store = SnapshotStore(folder)
    store.save(1, parts_of(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    error = ""
    try:
        store.save(2, parts_of(2))
    except CheckpointError as caught:
        error = str(caught)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {
        "error": error,
        "latest": check_whole(store),
        "after": sorted(path.name for path in folder.iterdir()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    what, where = sys.argv[1], Path(sys.argv[2])
    result = fill_the_disk(where) if what == "fill" else kill_repeatedly(where, kills=int(sys.argv[3]), seed=3)
    print(json.dumps(result))

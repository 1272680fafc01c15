"""What a run reads and that is not there is known before anything is made."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from training_runs import nano_run

from yunque.core.errors import ConfigError
from yunque.train.inputs import missing_inputs
from yunque.train.plan import plan
from yunque.train.plan_view import show_plan
from yunque.train.run import execute
from yunque.train.settings import RunConfig, run_from_mapping


def _run(folder: Path) -> RunConfig:
    """A run that names five paths in ``folder``, the last of a source that nothing uses."""
    base = nano_run(start_from=str(folder / "start"), output=str(folder / "out"))
    base["tokenizer"] = {"path": str(folder / "tokenizer")}
    base["data"]["sources"] |= {
        "text": {"kind": "text", "path": str(folder / "text")},
        "chats": {"kind": "conversations", "path": str(folder / "talks" / "*.jsonl")},
        "spare": {"kind": "jsonl", "path": str(folder / "spare")},
    }
    return run_from_mapping(base)


def test_each_path_that_is_read_and_not_there_is_named_by_its_key(tmp_path: Path) -> None:
    run = _run(tmp_path)
    paths = {
        "start_from": "start",
        "tokenizer.path": "tokenizer",
        "data.sources.text.path": "text",
        "data.sources.chats.path": "talks/*.jsonl",
    }
    assert missing_inputs(run) == tuple(f"{key} = {str(tmp_path / name)!r}" for key, name in paths.items())
    for made, name in enumerate(("start", "tokenizer", "text", "talks"), start=1):
        (tmp_path / name).mkdir()
        assert len(missing_inputs(run)) == 4 - made
    assert missing_inputs(run_from_mapping(nano_run())) == ()


def test_a_run_does_not_begin_without_them_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot begin .* not there: start_from = '.*start', tokenizer.path = "):
        execute(_run(tmp_path), Console(quiet=True))
    assert list(tmp_path.iterdir()) == []


def test_the_plan_ends_with_them(tmp_path: Path) -> None:
    out = io.StringIO()
    show_plan(plan(_run(tmp_path)), Console(file=out, width=400))
    last = out.getvalue().splitlines()[-4:]
    assert all(line.startswith("not here yet") for line in last)
    assert f"start_from = {str(tmp_path / 'start')!r}" in last[0]

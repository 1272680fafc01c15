"""What docs/training.md shows works."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from yunque.train.settings import load_run

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def test_the_run_file_loads_and_the_program_prints_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_file,), (program,) = _blocks("toml"), _blocks("python")
    (tmp_path / "notes.toml").write_text(run_file)
    run = load_run(tmp_path / "notes.toml")
    assert [stage.steps for stage in run.stage] == [123, 49]
    with _inside(tmp_path):
        exec(compile(program, str(PAGE), "exec"), {})
    assert "run notes in runs/notes" in capsys.readouterr().out


def test_the_metrics_that_the_page_names_are_those_that_are_written() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in ("objective", "loss", "mtp1_loss", "balance", "index_kl", "expert_imbalance", "lr", "grad_norm"):
        assert f"`{name}`" in text

"""``yunque train``: recipes, dry runs, refusals."""

from pathlib import Path

import pytest

from yunque.cli.main import main
from yunque.cli.recipe_files import recipe_names


def test_a_dry_run_shows_stages_and_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert {"quickstart", "glm-5/pretrain", "glm-5/dsa-sparse", "glm-5/sft"} <= set(recipe_names())
    assert main(["train", "quickstart", "--dry-run"]) == 0
    out = capsys.readouterr().out
    for stage in ("pretrain", "midtrain", "dsa_warmup", "dsa_sparse", "sft"):
        assert stage in out
    assert "memory" in out


def test_a_dry_run_names_what_the_run_reads_and_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    start = f"start_from={str(tmp_path / 'nothing')!r}"
    assert main(["train", "quickstart", start, "--dry-run"]) == 0
    assert f"not here yet  start_from = {str(tmp_path / 'nothing')!r}" in capsys.readouterr().out
    assert main(["train", "quickstart", start, f"output={str(tmp_path / 'run')!r}"]) == 2
    assert f"not there: start_from = {str(tmp_path / 'nothing')!r}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["quickstart", "stage.sft.tokenz=1"], "did you mean 'tokens'"),
        (["quickstart", "modle.preset='tiny'"], "did you mean 'model'"),
        (["quikstart"], "did you mean 'quickstart'"),
        (["no/such/run.toml"], "no such run file"),
        (["quickstart", "seed=abc"], "seed"),
        (["quickstart", "tokenizer.vocab_size=-5"], "[tokenizer]: vocab_size is -5; it must be at least 274"),
        (
            ["quickstart", "tokenizer.vocab_size=4096"],
            "model.vocab_size is 2048, below the 4096 of tokenizer.vocab_size",
        ),
        (["quickstart", "stage.sft.packing_buffer=0"], "packing_buffer is 0"),
        (["quickstart", "stage.pretrain.schedule.lr_peak=inf"], "lr_peak is inf"),
        (["quickstart", "name=.."], "name is '..'; it becomes a folder"),
    ],
)
def test_mistakes_exit_with_2_and_name_the_nearest_valid_choice(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments, "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err


@pytest.mark.parametrize("command", ["train", "quickstart", "generate", "info", "convert"])
def test_help_of_every_command_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"example:  yunque {command}" in capsys.readouterr().out

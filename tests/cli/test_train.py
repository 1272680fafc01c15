"""``yunque train``: recipes, dry runs, refusals."""

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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["quickstart", "stage.sft.tokenz=1"], "did you mean 'tokens'"),
        (["quickstart", "modle.preset='tiny'"], "did you mean 'model'"),
        (["quikstart"], "did you mean 'quickstart'"),
        (["no/such/run.toml"], "no such run file"),
        (["quickstart", "seed=abc"], "seed"),
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

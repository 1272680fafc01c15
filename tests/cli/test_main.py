"""How every command ends: one line for a mistake or a failing disk, silence for output that nobody reads."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from yunque.cli.main import main


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "yunque", *arguments]


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """The writing end of a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize(
    "arguments",
    [
        ["info", "tiny"],
        ["info", "tiny", "--json"],
        ["generate", "CKPT", "import os", "--max-new-tokens", "4"],
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_a_command_whose_output_nobody_reads_ends_in_silence(
    arguments: list[str], checkpoint: Path, closed_pipe: int
) -> None:
    command = _command(*(str(checkpoint) if argument == "CKPT" else argument for argument in arguments))
    done = subprocess.run(command, stdout=closed_pipe, stderr=subprocess.PIPE, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (141, b"")


def test_help_that_nobody_reads_ends_in_silence(closed_pipe: int) -> None:
    done = subprocess.run(_command("--help"), stdout=closed_pipe, stderr=subprocess.PIPE, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_neither_stream_being_read_ends_in_silence_too(closed_pipe: int) -> None:
    done = subprocess.run(
        _command("info", "no-such-model"), stdout=closed_pipe, stderr=closed_pipe, timeout=120, check=False
    )
    assert done.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_under_the_output_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            _command("info", "tiny", "--json"), stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert (done.returncode, done.stderr) == (2, "yunque info: No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "CKPT", "hi", "--chat", "--tools", "MISSING"], "MISSING: No such file or directory"),
        (["generate", "CKPT", "hi", "--chat", "--tools", "FOLDER"], "FOLDER: Is a directory"),
        (["info", "LONG"], "LONG: File name too long"),
        (["train", "quickstart", "output=FILE"], "FILE: File exists"),
        (["train", "quickstart", "output=FILE/run"], "FILE/run: Not a directory"),
        (["convert", "CKPT", "FILE/out"], "cannot write FILE/out: File exists; what was there before is untouched"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_file_system_refuses_is_one_line_with_the_path(
    arguments: list[str], expected: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {
        "CKPT": str(checkpoint),
        "MISSING": str(tmp_path / "tools.json"),
        "FOLDER": str(tmp_path),
        "LONG": "x" * 5000,
        "FILE": str(tmp_path / "file"),
    }
    (tmp_path / "file").write_text("what was here before")

    def placed(text: str) -> str:
        for name, place in places.items():
            text = text.replace(name, place)
        return text

    assert main([placed(argument) for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert placed(expected) in err
    assert err.startswith(f"yunque {arguments[0]}: ")
    assert err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "what was here before"

"""A folder appears whole or not at all, whoever dies when."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from yunque.core.errors import CheckpointError
from yunque.weights.new_folder import clean_leftovers, delete_folder, new_folder, survivors
from yunque.weights.safetensors_file import FileRecord


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _make(folder: Path, content: str) -> Path:
    with new_folder(folder) as writer:
        writer.write_bytes("file", content.encode())
    return folder


def test_folder_is_invisible_until_it_is_whole(tmp_path):
    with new_folder(tmp_path / "deep" / "made") as writer:
        writer.write_bytes("file", b"abc")
        assert not (tmp_path / "deep" / "made").exists()
    assert _names(tmp_path / "deep") == ["made"]
    assert (tmp_path / "deep" / "made" / "file").read_bytes() == b"abc"
    assert writer.records["file"] == FileRecord.of(b"abc")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_failing_block_leaves_what_was_there(tmp_path, error):
    _make(tmp_path / "made", "old")

    def fail() -> None:
        with new_folder(tmp_path / "made") as writer:
            writer.write_bytes("file", b"new")
            raise error

    with pytest.raises(error):
        fail()
    assert _names(tmp_path) == ["made"]
    assert (tmp_path / "made" / "file").read_text() == "old"


def test_replacing_leaves_only_the_new_folder(tmp_path):
    _make(tmp_path / "made", "old")
    (tmp_path / "made" / "extra").write_text("x")
    _make(tmp_path / "made", "new")
    assert _names(tmp_path) == ["made"]
    assert _names(tmp_path / "made") == ["file"]
    assert (tmp_path / "made" / "file").read_text() == "new"


def test_replacement_cut_short_is_found_and_finished(tmp_path):
    """A process killed between the two renames: the old folder is still there, and comes back."""
    _make(tmp_path / "made", "old").rename(tmp_path / ".replaced-made-0123abcd")
    assert survivors(tmp_path) == {"made": tmp_path / ".replaced-made-0123abcd"}
    clean_leftovers(tmp_path, lambda name: name == "made")
    assert survivors(tmp_path) == {"made": tmp_path / "made"}
    assert (tmp_path / "made" / "file").read_text() == "old"


def test_leftovers_of_dead_processes_are_removed_and_others_stay(tmp_path):
    for name in (".new-made-00000000", ".deleted-made-1", ".replaced-made-2", ".new-other-3", "made"):
        (tmp_path / name).mkdir()
    locked = tmp_path / ".new-made-4"
    locked.mkdir()
    descriptor = os.open(locked, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as a process that is filling it does
    clean_leftovers(tmp_path, lambda name: name == "made")
    assert _names(tmp_path) == [".new-made-4", ".new-other-3", "made"]
    os.close(descriptor)
    clean_leftovers(tmp_path, lambda name: name == "made")
    assert _names(tmp_path) == [".new-other-3", "made"]


def test_folder_being_filled_is_not_cleaned_by_another_writer(tmp_path):
    with new_folder(tmp_path / "made") as slow:
        slow.write_bytes("file", b"slow")
        _make(tmp_path / "made", "quick")
        slow.write_bytes("second", b"still here")
    assert _names(tmp_path / "made") == ["file", "second"]


def test_deleted_folder_is_gone_at_once(tmp_path):
    delete_folder(_make(tmp_path / "made", "x"))
    assert _names(tmp_path) == []


def test_place_that_cannot_be_written_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*file/made: .*untouched"),
        new_folder(tmp_path / "file" / "made"),
    ):
        pass

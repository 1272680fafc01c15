import os
from pathlib import Path

import pytest

from yunque.core.errors import DataError
from yunque.data.folders import find_files
from yunque.data.report import ReadLog


def _tree(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def _names(path: Path | str, *extensions: str, log: ReadLog | None = None) -> list[str]:
    return [file.name for file in find_files(str(path), extensions, log or ReadLog())]


def test_a_folder_gives_its_files_in_the_order_of_their_parts(tmp_path: Path) -> None:
    _tree(tmp_path, "b.txt", "a/z.txt", "a-b/a.txt", "a/b/c.TXT", "a/x.md", ".git/a.txt", "__pycache__/a.txt")
    log = ReadLog()
    assert _names(tmp_path, ".txt", log=log) == ["a/b/c.TXT", "a/z.txt", "a-b/a.txt", "b.txt"]
    assert log.report().ignored == 3
    assert log.report().files == 4


def test_globs(tmp_path: Path) -> None:
    _tree(tmp_path, "a/x.txt", "a/b/y.txt", "a/b/z.md", "c1.txt", "c2.txt", "c[3].txt")
    assert _names(f"{tmp_path}/**/*.txt") == ["a/b/y.txt", "a/x.txt", "c1.txt", "c2.txt", "c[3].txt"]
    assert _names(f"{tmp_path}/a/*.txt") == ["x.txt"]
    assert _names(f"{tmp_path}/c[!1].txt") == ["c2.txt"]
    assert _names(f"{tmp_path}/c?.txt") == ["c1.txt", "c2.txt"]
    assert _names(f"{tmp_path}/a/**") == ["b/y.txt", "b/z.md", "x.txt"]
    assert _names(f"{tmp_path}/c[3].txt") == ["c[3].txt"]


def test_a_file_is_itself_whatever_its_extension(tmp_path: Path) -> None:
    _tree(tmp_path, "notes")
    assert _names(tmp_path / "notes", ".txt") == ["notes"]


def test_symbolic_link_loops_end_and_are_reported(tmp_path: Path) -> None:
    _tree(tmp_path, "a/x.txt")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "itself.txt").symlink_to("itself.txt")
    (tmp_path / "gone.txt").symlink_to("nowhere")
    log = ReadLog()
    assert _names(tmp_path, ".txt", log=log) == ["a/x.txt"]
    assert log.report().counts == {"folder met twice": 1, "unreadable": 2}


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    _tree(tmp_path, "store/x.txt", "data/y.txt")
    (tmp_path / "data" / "more").symlink_to(tmp_path / "store")
    (tmp_path / "data" / "z.txt").symlink_to(tmp_path / "data" / "y.txt")
    assert _names(tmp_path / "data", ".txt") == ["more/x.txt", "y.txt", "z.txt"]


def test_a_pipe_is_a_problem_and_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    _tree(tmp_path, "x.txt")
    log = ReadLog()
    assert _names(tmp_path, ".txt", log=log) == ["x.txt"]
    assert log.report().counts == {"not a regular file": 1}
    with pytest.raises(DataError, match="not a regular file"):
        _names(tmp_path / "pipe.txt")


def test_a_folder_where_a_file_was_expected_is_searched(tmp_path: Path) -> None:
    _tree(tmp_path, "x.jsonl/part.jsonl")
    assert _names(tmp_path / "x.jsonl", ".jsonl") == ["part.jsonl"]
    assert _names(tmp_path, ".jsonl") == ["x.jsonl/part.jsonl"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "no such file or folder"),
        ("", "no file in .* ends in .txt, .md"),
        ("*.csv", "no file in .* matches it"),
        ("missing/*.csv", "no such file or folder"),
    ],
)
def test_nothing_found_says_what_was_looked_for(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        _names(tmp_path / path, ".txt", ".md")

"""Which files a path, folder or glob names, in one order on every machine."""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from yunque.core.errors import DataError
from yunque.data.report import ReadLog

_MAGIC = re.compile(r"[*?\[]")
_GLOB_SIGN = re.compile(r"\[(!?)(\]?[^\]]*)\]|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A regular file and its ``name``: the path relative to what was asked for, with forward slashes."""

    path: Path
    name: str


def find_files(path: str, extensions: tuple[str, ...], log: ReadLog) -> list[FoundFile]:
    """The files that ``path`` names, sorted by the parts of their names.

    A folder gives every file below it that ends in one of ``extensions`` (any case); a glob (``**`` crosses
    folders) gives what matches, whatever its extension; a file gives itself. Hidden entries and other
    extensions are counted as ignored; symbolic links are followed, but a folder is entered once. Broken
    links, devices, pipes and folders that cannot be listed are problems. Raises DataError where nothing at
    all is found.
    """
    root, pattern = _split_glob(path)
    if not root.exists():
        raise DataError(f"{path}: no such file or folder")
    if pattern is None and not root.is_dir():
        if not stat.S_ISREG(root.stat().st_mode):
            raise DataError(f"{path}: not a regular file")
        log.file()
        return [FoundFile(root, root.name)]
    lowered = tuple(extension.lower() for extension in extensions)
    found = []
    for name, entry in _walk(root, log):
        wanted = pattern.fullmatch(name) if pattern else name.lower().endswith(lowered)
        if not wanted:
            log.ignore()
        elif _is_readable(entry, log):
            log.file()
            found.append(FoundFile(Path(entry), name))
    if not found and log.report().num_problems == 0:
        wanted = "matches it" if pattern else f"ends in {', '.join(extensions)}"
        raise DataError(f"{path}: no file in {root} {wanted}")
    return sorted(found, key=lambda file: file.name.split("/"))


def place_exists(path: str) -> bool:
    """Whether there is anywhere to look for the files that ``path`` names; nothing is listed or read."""
    return _split_glob(path)[0].exists()


def _walk(root: Path, log: ReadLog) -> Iterator[tuple[str, str]]:
    """(name, path) of every visible entry below ``root`` that is not a folder."""
    entered: set[tuple[int, int]] = set()
    waiting = [("", str(root))]
    while waiting:
        prefix, folder = waiting.pop()
        try:
            status = os.stat(folder)
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            log.problem(folder, None, "unreadable", error.strerror or "")
            continue
        if (status.st_dev, status.st_ino) in entered:
            log.problem(folder, None, "folder met twice", "a symbolic link leads to it")
            continue
        entered.add((status.st_dev, status.st_ino))
        for entry in entries:
            name = f"{prefix}{entry.name}"
            if entry.name.startswith(".") or entry.name == "__pycache__":
                log.ignore()
            elif _is_folder(entry):
                waiting.append((f"{name}/", entry.path))
            else:
                yield name, entry.path


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads round in a circle: `_is_readable` names it
        return False


def _is_readable(path: str, log: ReadLog) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        log.problem(path, None, "unreadable", error.strerror or "")
        return False
    if not stat.S_ISREG(mode):
        log.problem(path, None, "not a regular file")
    return stat.S_ISREG(mode)


def _split_glob(path: str) -> tuple[Path, re.Pattern[str] | None]:
    """The folder before the first part with a wildcard, and the rest, if there is one, as an expression."""
    parts = Path(path).parts
    first = next((index for index, part in enumerate(parts) if _MAGIC.search(part)), None)
    if first is None or os.path.lexists(path):
        return Path(path), None
    return Path(*parts[:first]), _glob_expression(parts[first:])


def _glob_expression(parts: tuple[str, ...]) -> re.Pattern[str]:
    pieces = []
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            pieces.append(".*" if last else "(?:[^/]+/)*")
            continue
        translated = _GLOB_SIGN.sub(_translated, part)
        pieces.append(translated if last else f"{translated}/")
    try:
        return re.compile("".join(pieces), re.DOTALL)
    except re.error as error:
        raise DataError(f"{'/'.join(parts)}: not a glob: {error}") from error


def _translated(sign: re.Match[str]) -> str:
    """One sign of a glob as an expression: ``*``, ``?``, a set such as ``[a-c]`` or ``[!1]``, a character."""
    if sign[2] is not None:
        inner = re.sub(r"([\\\[^&~|])", r"\\\1", sign[2])
        return f"[{'^' if sign[1] else ''}{inner}]"
    return {"*": "[^/]*", "?": "[^/]"}.get(sign[0], re.escape(sign[0]))

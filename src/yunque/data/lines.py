"""Lines of a text file in bounded memory, and what makes a text unfit to be a document."""

import contextlib
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from yunque.data.folders import FoundFile
from yunque.data.report import ReadLog

_UNFIT = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Line:
    """A line with its end; ``whole`` is false where only its beginning is given because it is too long."""

    number: int
    text: str
    whole: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a text cannot be a document, and the character where that shows."""

    reason: str
    detail: str
    at: int


def read_lines(file: FoundFile, log: ReadLog, *, encoding: str, max_chars: int) -> Iterator[Line]:
    """The lines of a file (``.gz`` is unpacked), split at ``\\n``; of a longer line, its first ``max_chars``.

    Bytes that are not ``encoding`` come through as lone surrogates, for `fault_in` to find, where the
    encoding keeps ASCII as it is; else they end the file with a problem. An empty or unreadable file is a
    problem.
    """
    number = 0
    with _problems_recorded(file, log, encoding), _open_text(file.path, encoding, newline="\n") as stream:
        while text := stream.readline(max_chars + 1):
            number += 1
            whole = len(text) <= max_chars or text.endswith("\n")
            yield Line(number, text if whole else text[:max_chars], whole)
            while not whole and (text := stream.readline(max_chars)):
                whole = text.endswith("\n")
        if number == 0:
            log.problem(file.name, None, "empty file")


def read_pieces(file: FoundFile, log: ReadLog, *, encoding: str, max_chars: int) -> Iterator[Line]:
    """`read_lines`, but a longer line comes in pieces of ``max_chars``, and line ends become ``\\n``."""
    number = 1
    with _problems_recorded(file, log, encoding), _open_text(file.path, encoding, newline=None) as stream:
        is_empty = True
        while text := stream.readline(max_chars):
            is_empty = False
            yield Line(number, text, text.endswith("\n"))
            number += text.endswith("\n")
        if is_empty:
            log.problem(file.name, None, "empty file")


def fault_in(text: str, encoding: str | None = None) -> Fault | None:
    """A NUL, an undecodable byte (of a text read in ``encoding``) or a lone surrogate in ``text``."""
    found = None if text.isascii() and "\0" not in text else _UNFIT.search(text)
    if found is None:
        return None
    code = ord(found.group())
    if code == 0:
        return Fault("NUL character", "not a text file?", found.start())
    if encoding is not None:
        return Fault(f"not {encoding}", f"byte 0x{code - 0xDC00:02x}", found.start())
    return Fault("lone surrogate", f"\\u{code:04x}", found.start())


@contextlib.contextmanager
def _problems_recorded(file: FoundFile, log: ReadLog, encoding: str) -> Iterator[None]:
    try:
        yield
    except UnicodeError as error:
        log.problem(file.name, None, f"not {encoding}", getattr(error, "reason", str(error)))
    except (OSError, EOFError, zlib.error) as error:
        log.problem(file.name, None, "unreadable", getattr(error, "strerror", None) or str(error))


def _open_text(path: Path, encoding: str, newline: str | None) -> io.TextIOWrapper:
    is_packed = path.name.lower().endswith(".gz")
    binary = cast(BinaryIO, gzip.open(path, "rb")) if is_packed else open(path, "rb")  # noqa: SIM115
    without_mark = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    errors = "surrogateescape" if "\n".encode(encoding) == b"\n" else "strict"
    return io.TextIOWrapper(binary, encoding=without_mark, errors=errors, newline=newline)

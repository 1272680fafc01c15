"""Documents out of files: JSON lines, Parquet, text and code, streamed, with every bad place reported."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from yunque.core.errors import DataError
from yunque.data.documents import Document
from yunque.data.folders import FoundFile
from yunque.data.lines import fault_in, read_lines, read_pieces
from yunque.data.report import ReadLog
from yunque.data.source import FileSource, TextFileSource


@dataclass(frozen=True, kw_only=True)
class JsonlSource(TextFileSource):
    """JSON lines: one document a line, the string under ``field``; a folder gives its ``.jsonl`` files."""

    kind: Literal["jsonl"] = "jsonl"
    field: str = "text"
    extensions: tuple[str, ...] = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True, kw_only=True)
class ParquetSource(FileSource):
    """Parquet tables: one document a row, the string in column ``field``."""

    kind: Literal["parquet"] = "parquet"
    field: str = "text"
    extensions: tuple[str, ...] = (".parquet",)


@dataclass(frozen=True, kw_only=True)
class TextSource(TextFileSource):
    """Plain text files; one longer than ``max_chars`` becomes several documents, cut at line ends."""

    kind: Literal["text"] = "text"
    extensions: tuple[str, ...] = (".txt", ".md", ".rst")
    max_chars: int = 65_536


@dataclass(frozen=True, kw_only=True)
class CodeSource(TextFileSource):
    """Source files, one document each."""

    kind: Literal["code"] = "code"
    extensions: tuple[str, ...] = (
        *(
            ".py",
            ".pyi",
            ".c",
            ".h",
            ".cc",
            ".cpp",
            ".hpp",
            ".cu",
            ".java",
            ".kt",
            ".scala",
            ".go",
            ".rs",
            ".swift",
        ),
        *(
            ".js",
            ".jsx",
            ".ts",
            ".tsx",
            ".lua",
            ".rb",
            ".php",
            ".pl",
            ".sh",
            ".sql",
            ".r",
            ".jl",
            ".hs",
            ".cs",
        ),
    )


def read_documents(
    source: JsonlSource | ParquetSource | TextSource | CodeSource, files: Iterable[FoundFile], log: ReadLog
) -> Iterator[Document]:
    """The documents of ``files``, in their order, as the source's settings say."""
    for file in files:
        match source:
            case JsonlSource(field=field, encoding=encoding, max_chars=max_chars):
                yield from read_jsonl(file, log, field=field, encoding=encoding, max_chars=max_chars)
            case ParquetSource(field=field, max_chars=max_chars):
                yield from read_parquet(file, log, field=field, max_chars=max_chars)
            case TextSource(encoding=encoding, max_chars=max_chars):
                yield from read_text(file, log, encoding=encoding, max_chars=max_chars, cut=True)
            case CodeSource(encoding=encoding, max_chars=max_chars):
                yield from read_text(file, log, encoding=encoding, max_chars=max_chars, cut=False)


def read_rows(file: FoundFile, log: ReadLog, *, encoding: str, max_chars: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line of a ``.jsonl`` or ``.jsonl.gz`` file, holding one line at a time.

    Lines that are blank, longer than ``max_chars``, not text in ``encoding``, not JSON or not objects are
    problems.
    """
    for line in read_lines(file, log, encoding=encoding, max_chars=max_chars):
        if not line.whole:
            log.problem(file.name, line.number, "line too long", f"more than {max_chars:,} characters")
        elif not line.text.strip():
            log.problem(file.name, line.number, "blank line")
        elif fault := fault_in(line.text, encoding):
            log.problem(file.name, line.number, fault.reason, fault.detail)
        else:
            try:
                row = json.loads(line.text)
            except json.JSONDecodeError as error:
                log.problem(file.name, line.number, "not JSON", f"{error.msg} at column {error.colno}")
            except (
                ValueError,
                RecursionError,
            ) as error:  # a number of thousands of digits; brackets without end
                log.problem(file.name, line.number, "not JSON", str(error).split(";")[0])
            else:
                if isinstance(row, dict):
                    yield line.number, row
                else:
                    log.problem(file.name, line.number, "not an object", f"a JSON {type(row).__name__}")


def read_jsonl(file: FoundFile, log: ReadLog, *, field: str, encoding: str, max_chars: int) -> Iterator[Document]:
    """One document a line: the string under ``field``. Its key is the text: equal texts share a split."""
    for number, row in read_rows(file, log, encoding=encoding, max_chars=max_chars):
        if field in row:
            yield from _from_value(row[field], file, number, log)
        else:
            there = ", ".join(sorted(row)[:8]) or "no field at all"
            log.problem(file.name, number, "missing field", f"{field!r}; there is {there}")


def read_parquet(file: FoundFile, log: ReadLog, *, field: str, max_chars: int) -> Iterator[Document]:
    """One document a row: the string in column ``field``, a few rows in memory at a time; lines count rows.

    Raises DataError where pyarrow, an optional dependency, is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"{file.path}: reading Parquet needs pyarrow: pip install 'yunque[parquet]'") from error
    row = 0
    try:
        with pq.ParquetFile(file.path) as table:
            schema = table.schema_arrow
            if field not in schema.names:
                log.problem(file.name, None, "missing column", f"{field!r}; there is {', '.join(schema.names)}")
                return
            kind = schema.field(field).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind)):
                log.problem(file.name, None, "column is not text", f"{field!r} is {kind}")
                return
            for batch in table.iter_batches(batch_size=64, columns=[field]):
                for value in batch.column(0):
                    row += 1
                    yield from _from_scalar(value, file, row, log, max_chars)
            if row == 0:
                log.problem(file.name, None, "empty file", "a table without rows")
    except (pa.ArrowException, OSError) as error:
        log.problem(file.name, row or None, "unreadable", str(error).splitlines()[0])


def read_text(file: FoundFile, log: ReadLog, *, encoding: str, max_chars: int, cut: bool) -> Iterator[Document]:
    """A text file as one document or, where it is longer than ``max_chars`` and ``cut``, as several.

    Cuts fall after the last line end that fits, or inside a line that is longer than all that. With ``cut``
    false a longer file is a problem. Line ends become ``\\n``; a byte order mark is dropped. A document with
    an undecodable byte or a NUL is a problem at its first bad line; the file's other documents stay. A
    document's key is the file's name, with the number of the part after the first.
    """
    pieces: list[str] = []
    num_chars, num_parts, first_line = 0, 0, 1
    for line in read_pieces(file, log, encoding=encoding, max_chars=max_chars):
        if pieces and num_chars + len(line.text) > max_chars:
            if not cut:
                log.problem(file.name, None, "file too long", f"more than {max_chars:,} characters")
                return
            yield from _from_part("".join(pieces), file, num_parts, first_line, log, encoding)
            pieces, num_chars, num_parts, first_line = [], 0, num_parts + 1, line.number
        pieces.append(line.text)
        num_chars += len(line.text)
    if pieces:
        yield from _from_part("".join(pieces), file, num_parts, first_line, log, encoding)


def _from_part(
    text: str, file: FoundFile, part: int, first_line: int, log: ReadLog, encoding: str
) -> Iterator[Document]:
    if fault := fault_in(text, encoding):
        log.problem(file.name, first_line + text.count("\n", 0, fault.at), fault.reason, fault.detail)
    elif not text.strip():
        log.problem(file.name, first_line, "empty text")
    else:
        log.document(len(text.encode()))
        key = file.name if part == 0 else f"{file.name}#{part}"
        yield Document(text, file.name if part == 0 else f"{file.name}:{first_line}", key)


def _from_scalar(value: Any, file: FoundFile, row: int, log: ReadLog, max_chars: int) -> Iterator[Document]:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        log.problem(file.name, row, "not utf-8", f"byte {error.start} of the value")
        return
    if isinstance(text, str) and len(text) > max_chars:
        log.problem(file.name, row, "text too long", f"more than {max_chars:,} characters")
    else:
        yield from _from_value(text, file, row, log)


def _from_value(value: Any, file: FoundFile, line: int, log: ReadLog) -> Iterator[Document]:
    if not isinstance(value, str):
        log.problem(file.name, line, "not a string", f"a {type(value).__name__}")
    elif not value.strip():
        log.problem(file.name, line, "empty text")
    elif fault := fault_in(value):
        log.problem(file.name, line, fault.reason, fault.detail)
    else:
        log.document(len(value.encode()))
        yield Document(value, f"{file.name}:{line}", value)

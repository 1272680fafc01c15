import gzip
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunque.core.errors import DataError
from yunque.data.documents import Document
from yunque.data.folders import FoundFile
from yunque.data.readers import (
    JsonlSource,
    ParquetSource,
    read_documents,
    read_jsonl,
    read_parquet,
    read_text,
)
from yunque.data.report import Problem, ReadLog, ReadReport

MakeFile = Callable[[str, bytes], FoundFile]


def _jsonl(file: FoundFile, max_chars: int = 1000, encoding: str = "utf-8") -> tuple[list[str], ReadReport]:
    log = ReadLog()
    texts = [d.text for d in read_jsonl(file, log, field="text", encoding=encoding, max_chars=max_chars)]
    return texts, log.report()


def _text(file: FoundFile, max_chars: int = 1000, cut: bool = True) -> tuple[list[Document], ReadReport]:
    log = ReadLog()
    return list(read_text(file, log, encoding="utf-8", max_chars=max_chars, cut=cut)), log.report()


HOSTILE_LINES: list[tuple[bytes, str | None]] = [
    (b'{"text": "one"}', None),
    (b"", "blank line"),
    (b"   ", "blank line"),
    (b'{"text": "cut', "not JSON"),
    (b'{"text": "bare \0 NUL"}', "NUL character"),
    (b'{"text": "escaped \\u0000 NUL"}', "NUL character"),
    (b'{"text": "half a pair \\ud83d"}', "lone surrogate"),
    (b'{"text": "caf\xe9"}', "not utf-8"),
    (b'["text"]', "not an object"),
    (b'"text"', "not an object"),
    (b"null", "not an object"),
    (b'{"body": "two"}', "missing field"),
    (b'{"text": 3}', "not a string"),
    (b'{"text": null}', "not a string"),
    (b'{"text": ["a"]}', "not a string"),
    (b'{"text": ""}', "empty text"),
    (b'{"text": " \\n "}', "empty text"),
    (b"[" * 500 + b"]" * 500, "not an object"),
    (b'{"text": ' + b"[" * 100_000, "not JSON"),
    (b'{"n": ' + b"9" * 5000 + b"}", "not JSON"),
    (b'{"text": "' + b"x" * 200_000 + b'"}', "line too long"),
    ('{"text": "Grüße, 云雀 🐦"}'.encode(), None),
    (b'{"text": "last, without a line end"}', None),
]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_every_bad_json_line_is_reported_with_its_number(make_file: MakeFile, line_end: bytes) -> None:
    file = make_file("a.jsonl", line_end.join(line for line, _ in HOSTILE_LINES))
    texts, report = _jsonl(file, max_chars=150_000)
    assert texts == ["one", "Grüße, 云雀 🐦", "last, without a line end"]
    expected = [(i, reason) for i, (_, reason) in enumerate(HOSTILE_LINES, start=1) if reason]
    assert [(p.line, p.reason) for p in report.problems] == expected
    assert report.documents == 3
    assert report.bytes == sum(len(text.encode()) for text in texts)


def test_missing_field_names_what_is_there(make_file: MakeFile) -> None:
    _, report = _jsonl(make_file("a.jsonl", b'{"body": "x", "id": 1}\n'))
    assert report.problems == (Problem("a.jsonl", 1, "missing field", "'text'; there is body, id"),)


def test_a_ten_megabyte_line_is_skipped_in_bounded_memory(make_file: MakeFile) -> None:
    file = make_file("a.jsonl", b'{"text": "' + b"x" * 10_000_000 + b'"}\n{"text": "next"}\n')
    tracemalloc.start()
    texts, report = _jsonl(file, max_chars=100_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert texts == ["next"]
    assert [(p.line, p.reason) for p in report.problems] == [(1, "line too long")]
    assert peak < 2_000_000


def test_a_ten_megabyte_line_is_read_where_the_bound_allows_it(make_file: MakeFile) -> None:
    texts, report = _jsonl(make_file("a.jsonl", b'{"text": "' + b"x" * 10_000_000 + b'"}'), 16_000_000)
    assert [len(text) for text in texts] == [10_000_000]
    assert report.num_problems == 0


def test_a_byte_order_mark_is_dropped(make_file: MakeFile) -> None:
    assert _jsonl(make_file("a.jsonl", b'\xef\xbb\xbf{"text": "a"}\n'))[0] == ["a"]
    assert _text(make_file("a.txt", b"\xef\xbb\xbfhello"))[0][0].text == "hello"


def test_packed_files_are_read_and_damaged_ones_reported(make_file: MakeFile) -> None:
    content = gzip.compress(b'{"text": "a"}\n{"text": "b"}\n' * 1000)
    assert len(_jsonl(make_file("a.jsonl.gz", content))[0]) == 2000
    for broken in (content[:-100], b"plain text", content[:30] + b"\xff" * 50):
        _, report = _jsonl(make_file("b.jsonl.gz", broken))
        assert report.counts == {"unreadable": 1}


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file_is_a_problem(make_file: MakeFile, content: bytes) -> None:
    assert _jsonl(make_file("a.jsonl", content))[1].problems == (Problem("a.jsonl", None, "empty file"),)
    assert _text(make_file("a.txt", content))[1].problems == (Problem("a.txt", None, "empty file"),)


def test_other_encodings_are_read_when_named(make_file: MakeFile) -> None:
    row = json.dumps({"text": "Grüße"}, ensure_ascii=False)
    for encoding in ("latin-1", "utf-16"):
        assert _jsonl(make_file("a.jsonl", row.encode(encoding)), encoding=encoding)[0] == ["Grüße"]
    texts, report = _jsonl(make_file("a.jsonl", row.encode("utf-8")[:-1]), encoding="utf-16")
    assert texts == []
    assert report.counts == {"not utf-16": 1}


def test_a_directory_in_place_of_a_file_is_a_problem(tmp_path: Path) -> None:
    assert _jsonl(FoundFile(tmp_path, "a.jsonl"))[1].counts == {"unreadable": 1}


def test_equal_texts_have_equal_keys(make_file: MakeFile) -> None:
    file = make_file("a.jsonl", b'{"text": "a"}\n{"text": "a", "id": 2}\n')
    keys = [d.key for d in read_jsonl(file, ReadLog(), field="text", encoding="utf-8", max_chars=99)]
    assert keys == ["a", "a"]


def test_text_line_ends_become_newlines(make_file: MakeFile) -> None:
    documents, _ = _text(make_file("a.txt", b"one\r\ntwo\n\nthree"))
    assert [d.text for d in documents] == ["one\ntwo\n\nthree"]
    assert (documents[0].source, documents[0].key) == ("a.txt", "a.txt")


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1), st.integers(1, 12))
def test_the_parts_of_a_cut_text_are_the_text(tmp_path_factory: pytest.TempPathFactory, text: str, bound: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(text.encode())
    log = ReadLog()
    documents = list(read_text(FoundFile(path, "a.txt"), log, encoding="utf-8", max_chars=bound, cut=True))
    assert all(len(d.text) <= bound for d in documents)
    assert len({d.key for d in documents}) == len(documents)
    without_mark = text.removeprefix("\ufeff")
    if log.report().num_problems == 0:
        assert "".join(d.text for d in documents) == without_mark
    else:  # parts of white space alone are reported instead
        assert "".join("".join(d.text for d in documents).split()) == "".join(without_mark.split())


def test_text_is_cut_at_line_ends_where_they_fit(make_file: MakeFile) -> None:
    documents, _ = _text(make_file("a.txt", b"aaaa\nbbbb\n" + b"c" * 25 + b"\ndd\n"), max_chars=10)
    assert [d.text for d in documents] == ["aaaa\nbbbb\n", "c" * 10, "c" * 10, "c" * 5 + "\ndd\n"]
    assert [d.source for d in documents] == ["a.txt", "a.txt:3", "a.txt:3", "a.txt:3"]


def test_bad_bytes_cost_their_part_of_a_text_and_name_the_line(make_file: MakeFile) -> None:
    content = b"good line\n" * 3 + b"ok\ncaf\xe9\n" + b"more lines\n" * 2 + b"NUL \0 here\n" + b"fine again\n"
    documents, report = _text(make_file("a.txt", content), max_chars=30)
    assert [(p.line, p.reason, p.detail) for p in report.problems] == [
        (5, "not utf-8", "byte 0xe9"),
        (8, "NUL character", "not a text file?"),
    ]
    assert documents[0].text == "good line\n" * 3
    assert report.documents == len(documents)


def test_code_is_never_cut(make_file: MakeFile) -> None:
    documents, report = _text(make_file("a.py", b"x = 1\n" * 10), max_chars=59, cut=False)
    assert documents == []
    assert report.counts == {"file too long": 1}
    assert len(_text(make_file("a.py", b"x = 1\n" * 10), max_chars=60, cut=False)[0]) == 1


def test_files_are_read_in_the_order_given(make_file: MakeFile) -> None:
    files = [make_file(f"{name}.jsonl", f'{{"text": "{name}"}}\n'.encode()) for name in "ba"]
    texts = [d.text for d in read_documents(JsonlSource(path="."), files, ReadLog())]
    assert texts == ["b", "a"]


class TestParquet:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")

    def _read(self, path: Path, field: str = "text") -> tuple[list[Document], ReadReport]:
        log = ReadLog()
        return list(read_parquet(FoundFile(path, path.name), log, field=field, max_chars=1000)), log.report()

    def test_rows_are_documents_and_bad_rows_problems(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        values = ["one", None, "", "x\0", "y" * 1001, "two"]
        self.pq.write_table(self.pa.table({"text": values, "id": range(6)}), path, row_group_size=2)
        documents, report = self._read(path)
        assert [(d.text, d.source) for d in documents] == [("one", "a.parquet:1"), ("two", "a.parquet:6")]
        assert [(p.line, p.reason) for p in report.problems] == [
            (2, "not a string"),
            (3, "empty text"),
            (4, "NUL character"),
            (5, "text too long"),
        ]

    def test_missing_and_numeric_columns_are_named(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        self.pq.write_table(self.pa.table({"body": ["x"], "id": [1]}), path)
        assert self._read(path)[1].problems == (
            Problem("a.parquet", None, "missing column", "'text'; there is body, id"),
        )
        assert self._read(path, "id")[1].problems == (
            Problem("a.parquet", None, "column is not text", "'id' is int64"),
        )

    def test_large_and_dictionary_columns_are_text(self, tmp_path: Path) -> None:
        large = self.pa.array(["a", "b"], self.pa.large_string())
        coded = self.pa.array(["c", "d"]).dictionary_encode()
        self.pq.write_table(self.pa.table({"large": large, "coded": coded}), tmp_path / "a.parquet")
        assert [d.text for d in self._read(tmp_path / "a.parquet", "large")[0]] == ["a", "b"]
        assert [d.text for d in self._read(tmp_path / "a.parquet", "coded")[0]] == ["c", "d"]

    def test_what_is_not_parquet_is_a_problem(self, tmp_path: Path) -> None:
        for content in (b"", b"PAR1", b"x" * 1000):
            (tmp_path / "a.parquet").write_bytes(content)
            assert self._read(tmp_path / "a.parquet")[1].counts == {"unreadable": 1}

    def test_bytes_that_are_not_utf8_are_a_problem(self, tmp_path: Path) -> None:
        broken = self.pa.array([b"ok", b"caf\xe9"], self.pa.binary()).view(self.pa.string())
        self.pq.write_table(self.pa.table({"text": broken}), tmp_path / "a.parquet")
        documents, report = self._read(tmp_path / "a.parquet")
        assert [d.text for d in documents] == ["ok"]
        assert [(p.line, p.reason) for p in report.problems] == [(2, "not utf-8")]


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, make_file: MakeFile) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'yunque\[parquet\]'"):
        list(read_documents(ParquetSource(path="."), [make_file("a.parquet", b"")], ReadLog()))


@pytest.mark.parametrize(
    ("settings", "message"), [({"encoding": "utf-99"}, "encoding 'utf-99'"), ({"max_chars": 0}, "max_chars is 0")]
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JsonlSource(path=".", **settings)  # type: ignore[arg-type]

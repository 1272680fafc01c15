import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from yunque.core.errors import DataError
from yunque.data import builtin
from yunque.data.builtin import BuiltinSource, builtin_size, read_builtin
from yunque.data.documents import Document, split_of
from yunque.data.report import ReadLog, ReadReport

LIBRARY = {
    "argparse.py": '"""Parse."""\n\nclass A:\n    """An A."""\n    def f(self, x=1):\n        """Do f."""\n',
    "plain.py": "x = 1\n",
    "package/__init__.py": "",
    "package/latin.py": "# -*- coding: latin-1 -*-\nname = 'Gr\xfc\xdfe'\n",
    "package/broken.py": '"""Never closed.\n',
    "pydoc_data/topics.py": "# made\ntopics = {'assert': '\"assert\"\\n', 'yield': 'Yields.'}\n",
    "test/test_x.py": "import unittest\n",
    "site-packages/other.py": "secret = 1\n",
    "encodings/cp1.py": "table = 1\n",
}


def _write_library(root: Path) -> Path:
    for name, text in LIBRARY.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode("latin-1"))
    return root


def _read(settings: BuiltinSource, root: Path) -> tuple[dict[str, str], ReadLog]:
    log = ReadLog()
    return {d.source: d.text for d in read_builtin(settings, log, root)}, log


def test_code_and_docs_of_a_library(tmp_path: Path) -> None:
    texts, log = _read(BuiltinSource(), _write_library(tmp_path))
    assert list(texts) == [
        "python:argparse.py",
        "python:argparse.py:docs",
        "python:package/broken.py",
        "python:package/latin.py",
        "python:plain.py",
        "python:pydoc_data/topics.py:assert",
        "python:pydoc_data/topics.py:yield",
    ]
    assert texts["python:argparse.py:docs"] == (
        "module argparse\n\nParse.\n\nclass A\n\nAn A.\n\nA.f(self, x=1)\n\nDo f.\n"
    )
    assert texts["python:package/latin.py"].endswith("Grüße'\n")
    assert texts["python:pydoc_data/topics.py:assert"] == '"assert"\n'
    report = log.report()
    assert report.counts == {"not parsable": 1}
    assert (report.files, report.ignored, report.documents) == (5, 1, 7)


def test_settings_choose_content_and_tests(tmp_path: Path) -> None:
    root = _write_library(tmp_path)
    code, _ = _read(BuiltinSource(content=("code",), include_tests=True, exclude=()), root)
    assert "python:test/test_x.py" in code
    assert "python:encodings/cp1.py" in code
    assert not any("site-packages" in name or name.endswith(":docs") for name in code)
    docs, _ = _read(BuiltinSource(content=("docs",)), root)
    assert all(":" in name.removeprefix("python:") for name in docs)
    with pytest.raises(ValueError, match="content is empty; valid: code, docs"):
        BuiltinSource(content=())


def test_a_zipped_library_reads_like_its_folder(tmp_path: Path) -> None:
    root = _write_library(tmp_path / "lib")
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        for name in LIBRARY:
            archive.write(root / name, name)
    assert _read(BuiltinSource(), tmp_path / "lib.zip")[0] == _read(BuiltinSource(), root)[0]


def test_an_interpreter_without_sources_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin.sysconfig, "get_path", lambda _: str(tmp_path / "lib" / "python3.11"))
    with pytest.raises(DataError, match="carries no library sources"):
        next(read_builtin(BuiltinSource(), ReadLog()))


@dataclass(frozen=True)
class Corpus:
    """This interpreter's corpus, what its reading reported, and how long it took."""

    documents: list[Document]
    report: ReadReport
    cpu_s: float


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    started, log = time.process_time(), ReadLog()
    documents = list(read_builtin(BuiltinSource(), log))
    return Corpus(documents, log.report(), time.process_time() - started)


def test_this_interpreters_corpus_is_large_fast_and_the_same_twice(corpus: Corpus) -> None:
    assert corpus.cpu_s < 15
    assert corpus.report == builtin_size(BuiltinSource())
    assert corpus.report.bytes > 6_000_000
    assert corpus.report.documents == len(corpus.documents) > 600
    sources = [document.source for document in corpus.documents]
    assert len(set(sources)) == len(sources)
    assert not any("/test/" in source or "site-packages" in source for source in sources)
    assert sum(source.endswith(":docs") for source in sources) > 200


def test_no_file_is_in_both_splits(corpus: Corpus) -> None:
    splits: dict[str, set[str]] = {}
    for document in corpus.documents:
        name = document.source.removeprefix("python:").removesuffix(":docs")
        splits.setdefault(name, set()).add(split_of(document.key, 0.1))
    assert all(len(found) == 1 for found in splits.values())
    held_out = sum(found == {"held_out"} for found in splits.values())
    assert 0.05 < held_out / len(splits) < 0.2

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from yunque.core.errors import DataError
from yunque.data.documents import TokenDocument
from yunque.data.report import ReadLog
from yunque.data.store import TokenStore, cached_store


def _documents(number: int, masked: bool = False, highest: int = 300) -> Iterator[TokenDocument]:
    rng = np.random.default_rng(0)
    for index in range(number):
        tokens = rng.integers(0, highest, 1 + index % 7)
        yield TokenDocument(tokens, (tokens % 2).astype(np.uint8) if masked else None, f"d{index}")


def _store(cache: Path, documents: Iterator[TokenDocument], name: str = "a", vocab_size: int = 300) -> TokenStore:
    log = ReadLog()
    log.problem("x.txt", 3, "empty text")
    return cached_store(cache, name, {"made_of": name}, documents, log, vocab_size=vocab_size, whole=False)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_store_gives_back_every_document(tmp_path: Path, vocab_size: int, dtype: type, masked: bool) -> None:
    expected = list(_documents(50, masked, vocab_size))
    store = _store(tmp_path, iter(expected), vocab_size=vocab_size)
    assert store.tokens.dtype == dtype
    assert (store.num_documents, store.num_tokens) == (50, sum(len(d.tokens) for d in expected))
    assert store.report.counts == {"empty text": 1}
    for index, document in enumerate(expected):
        length = store.length(index)
        read = store.read(index, 0, length)
        assert read.tokens.tolist() == document.tokens.tolist()
        assert (read.mask is None) == (document.mask is None)
        if read.mask is not None and document.mask is not None:
            assert read.mask.tolist() == document.mask.tolist()
        part = store.read(index, length // 2, length)
        assert part.tokens.tolist() == document.tokens[length // 2 :].tolist()


def test_the_second_time_nothing_is_tokenised(tmp_path: Path) -> None:
    def refuse() -> Iterator[TokenDocument]:
        raise AssertionError("consumed again")
        yield

    first = _store(tmp_path, _documents(5))
    second = _store(tmp_path, refuse())
    assert first.digest == second.digest
    assert second.report.counts == {"empty text": 1}
    assert _store(tmp_path, _documents(6), name="b").digest != first.digest


def test_an_empty_store_opens(tmp_path: Path) -> None:
    store = _store(tmp_path, iter(()))
    assert (store.num_documents, store.num_tokens, store.mask) == (0, 0, None)


def test_an_error_while_reading_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> Iterator[TokenDocument]:
        yield from _documents(3)
        raise DataError("a.txt:4: bad")

    with pytest.raises(DataError, match="bad"):
        _store(tmp_path, fail())
    assert list(tmp_path.iterdir()) == []


def test_mixing_masked_and_unmasked_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="some documents of a store have a mask"):
        _store(tmp_path, iter([*_documents(1, masked=True), *_documents(1)]))


@pytest.mark.parametrize("name", ["tokens.npy", "offsets.npy", "mask.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "empty"])
def test_a_damaged_store_is_named(tmp_path: Path, name: str, damage: str) -> None:
    file = _store(tmp_path, _documents(50, masked=True)).folder / name
    if damage == "missing":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size - 3 if damage == "cut" else 0)
    with pytest.raises(DataError, match=r"delete it to have it made again"):
        _store(tmp_path, iter(()))


SLOW_MAKER = """
import sys, time
from pathlib import Path
import numpy as np
from yunque.data.documents import TokenDocument
from yunque.data.report import ReadLog
from yunque.data.store import cached_store

def documents():
    for index in range(200):
        print(index, flush=True)
        time.sleep(float(sys.argv[2]))
        yield TokenDocument(np.arange(index + 1), None, str(index))

store = cached_store(Path(sys.argv[1]), "a", {"x": 1}, documents(), ReadLog(), vocab_size=300, whole=False)
print("digest", store.digest, flush=True)
"""


def _start(cache: Path, delay_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW_MAKER, str(cache), str(delay_s)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_killed_maker_leaves_no_store_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    process = _start(tmp_path, 0.02)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "20":
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert sorted(path.suffix for path in tmp_path.iterdir()) != []
    assert not list(tmp_path.glob("a-*"))
    finished = _start(tmp_path, 0)
    out, _ = finished.communicate(timeout=60)
    assert out.splitlines()[-1].startswith("digest ")
    assert [path.name for path in tmp_path.iterdir()] == [path.name for path in tmp_path.glob("a-*")]
    assert len(list(tmp_path.iterdir())) == 1


def test_two_makers_at_once_end_with_one_store_and_the_same_content(tmp_path: Path) -> None:
    processes = [_start(tmp_path, 0.002) for _ in range(2)]
    results = [process.communicate(timeout=60)[0].splitlines()[-1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert results[0] == results[1]
    assert results[0].startswith("digest ")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_living_makers_folder_is_left_alone(tmp_path: Path) -> None:
    may_go_on = threading.Event()

    def wait() -> Iterator[TokenDocument]:
        yield from _documents(3)
        may_go_on.wait(timeout=30)

    slow = threading.Thread(target=_store, args=(tmp_path, wait()))
    slow.start()
    while not list(tmp_path.glob(".partial-*/tokens.npy")):
        time.sleep(0.01)
    _store(tmp_path, _documents(2), name="b")
    may_go_on.set()
    slow.join()
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["a", "b"]

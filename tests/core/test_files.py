"""Files: whole or untouched whatever kills the writer, and read with limits."""

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from yunque.core.errors import DataError
from yunque.core.files import read_json, sha256_file, write_atomic, write_json

WRITER = """
import sys
from yunque.core.files import write_atomic
path, size = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
for n in range(10**9):
    write_atomic(path, bytes([n % 251]) * size)
"""


def test_kill_nine_during_writes_always_leaves_one_whole_version(tmp_path):
    path, size = tmp_path / "state.bin", 3_000_000
    write_atomic(path, bytes([250]) * size)
    versions = set()
    for attempt in range(12):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(size)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.005 + 0.004 * attempt)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        content = path.read_bytes()
        assert len(content) == size
        assert len(set(content)) == 1, "bytes of two versions in one file"
        versions.add(content[0])
    assert len(versions) > 1, "no child got as far as a write: the test proved nothing"


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"n": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"n": float("nan")})
    with pytest.raises(TypeError):
        write_atomic(path, 3)  # pyright: ignore[reportArgumentType]
    assert read_json(path) == {"n": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_text_is_utf8_and_the_file_has_ordinary_permissions(tmp_path):
    path = tmp_path / "t.txt"
    umask = os.umask(0o022)
    try:
        write_atomic(path, "añb\n")
    finally:
        os.umask(umask)
    assert path.read_bytes() == b"a\xc3\xb1b\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_missing_folder_is_an_error_not_a_surprise_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "no" / "a", b"x")


def test_sha256_of_a_file_is_that_of_its_bytes(tmp_path):
    content = os.urandom(3_000_001)
    write_atomic(tmp_path / "a", content)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_json_round_trip_keeps_order_and_unicode(tmp_path):
    value = {"z": [1, 2.5, None, True], "a": "日本\n", "nested": {"k": {}}}
    write_json(tmp_path / "v.json", value)
    assert read_json(tmp_path / "v.json") == value
    assert list(json.loads((tmp_path / "v.json").read_text())) == ["z", "a", "nested"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,\n "b": }', r"v\.json:2: not JSON: Expecting value"),
        (b'{"a": "\xff"}', r"v\.json: not UTF-8 at byte 7"),
        (b"", r"v\.json:1: not JSON"),
        (b"[" * 200_000, r"v\.json: JSON is nested too deeply"),
    ],
)
def test_bad_json_is_reported_with_file_and_line(tmp_path, content, message):
    (tmp_path / "v.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_json(tmp_path / "v.json")


def test_json_limit_is_exact_and_named(tmp_path):
    (tmp_path / "v.json").write_bytes(b"[1,2]")
    assert read_json(tmp_path / "v.json", limit_bytes=5) == [1, 2]
    with pytest.raises(DataError, match="larger than the limit of 4 bytes"):
        read_json(tmp_path / "v.json", limit_bytes=4)

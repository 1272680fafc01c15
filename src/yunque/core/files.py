"""Files that are whole or absent, whatever moment the process dies at, and their checksums."""

import contextlib
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from yunque.core.errors import DataError

JSON_LIMIT_BYTES = 256 * 2**20


def write_atomic(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Replace ``path`` by ``content`` (text as UTF-8): a reader sees the old or the new file, never a part.

    The bytes are on disk when this returns: file and folder are both synced. The folder must exist. A process
    killed before the rename leaves a ``.NAME.*.tmp`` file beside ``path``, which nothing reads.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Put a folder's entries (names made, renamed or removed in it) on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock file ``path`` while the block runs; it ends with the process. The folder must exist.

    Raises BlockingIOError where another process holds it. File systems without such locks: no lock.
    """
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield


def sha256_file(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes in hexadecimal, read in constant memory."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` atomically as indented JSON. JSON has no NaN or infinity: those raise ValueError."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str], limit_bytes: int = JSON_LIMIT_BYTES) -> Any:
    """The value in a JSON file of at most ``limit_bytes``.

    Raises DataError, naming file and line, when it is larger, not UTF-8 or not JSON; OSError when unreadable.
    """
    with open(path, "rb") as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise DataError(f"{path}: JSON file is larger than the limit of {limit_bytes} bytes")
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise DataError(f"{path}: JSON is nested too deeply to read") from error

"""Tokenised documents on disk: written once, whole or absent, read by position through memory maps.

A store is a folder: ``tokens.npy`` (uint16, or uint32 for vocabularies above 65,536), ``offsets.npy`` (int64,
one more than documents), ``mask.npy`` (uint8, only where not all tokens are learned), and ``meta.json``,
written last.
"""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from yunque.core.errors import DataError
from yunque.core.files import read_json, sync_folder, write_json
from yunque.data.documents import TokenDocument
from yunque.data.report import ReadLog, ReadReport

_VERSION = 1
_PARTIAL = ".partial-"


@dataclass(frozen=True)
class TokenStore:
    """Read access to a store. ``digest`` identifies its content; ``report`` is what reading its source found.

    ``whole`` says that documents may be truncated but never cut in two: they are conversations.
    """

    folder: Path
    report: ReadReport
    digest: str
    whole: bool
    tokens: npt.NDArray[np.unsignedinteger[Any]]
    offsets: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint8] | None

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def length(self, document: int) -> int:
        """The number of tokens of a document."""
        return int(self.offsets[document + 1] - self.offsets[document])

    def read(self, document: int, start: int, stop: int) -> TokenDocument:
        """Tokens ``start`` to ``stop`` of a document, with their part of the mask."""
        first = int(self.offsets[document])
        span = slice(first + start, first + stop)
        mask = None if self.mask is None else np.asarray(self.mask[span])
        return TokenDocument(self.tokens[span].astype(np.int64), mask, f"{self.folder.name}:{document}")


def open_store(folder: Path) -> TokenStore:
    """Open a finished store. Raises DataError where its files do not belong together."""
    try:
        meta = read_json(folder / "meta.json")
        offsets, tokens = _map(folder / "offsets.npy"), _map(folder / "tokens.npy")
        mask = _map(folder / "mask.npy") if meta["masked"] else None
        store = TokenStore(
            folder, ReadReport.from_json(meta["report"]), meta["digest"], meta["whole"], tokens, offsets, mask
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: not a token store ({error}); delete it to have it made again") from error
    if int(offsets[-1]) != len(tokens) or (mask is not None and len(mask) != len(tokens)):
        raise DataError(f"{folder}: its arrays differ in length; delete it to have it made again")
    return store


def cached_store(
    cache: Path,
    name: str,
    identity: Mapping[str, Any],
    documents: Iterable[TokenDocument],
    log: ReadLog,
    *,
    vocab_size: int,
    whole: bool,
) -> TokenStore:
    """The store of what ``identity`` (JSON-able) describes, made now if ``cache`` does not hold it.

    ``documents`` is consumed only then, and ``log`` gives the report of that. The folder appears by one
    rename: a process killed at any moment leaves nothing that is taken for a store, and of several processes
    that make the same one at a time, each uses the one that was finished first.
    """
    described = {"version": _VERSION, "vocab_size": vocab_size, "whole": whole, **identity}
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache / f"{name}-{key}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        with _partial_folder(cache) as partial:
            written = _write_arrays(partial, documents, np.uint16 if vocab_size <= 2**16 else np.uint32)
            meta = {"digest": written.digest, "masked": written.masked, "whole": whole}
            write_json(partial / "meta.json", meta | {"report": log.report().to_json(), "made_from": described})
            with contextlib.suppress(OSError):  # another process was first
                os.rename(partial, folder)
        sync_folder(cache)
    return open_store(folder)


@dataclass(frozen=True)
class _Written:
    digest: str
    masked: bool


def _write_arrays(folder: Path, documents: Iterable[TokenDocument], dtype: type[np.unsignedinteger[Any]]) -> _Written:
    """Append every document to the arrays, holding one at a time; all must have a mask, or none."""
    offsets, digest = [0], hashlib.sha256()
    with (
        _NpyWriter(folder / "tokens.npy", dtype) as tokens,
        _NpyWriter(folder / "mask.npy", np.uint8) as mask,
    ):
        for document in documents:
            if document.mask is not None:
                digest.update(mask.append(document.mask))
            digest.update(tokens.append(document.tokens))
            offsets.append(tokens.length)
        masked = mask.length > 0
        if masked and mask.length != tokens.length:
            raise ValueError("some documents of a store have a mask and others have none")
    with _NpyWriter(folder / "offsets.npy", np.int64) as array:
        digest.update(array.append(np.asarray(offsets)))
    if not masked:
        (folder / "mask.npy").unlink()
    return _Written(digest.hexdigest(), masked)


class _NpyWriter:
    """A one-dimensional ``.npy`` file that grows; closing it sets the header, which NumPy pads for this."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        self.length = 0
        self._dtype = np.dtype(dtype)
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115  (closed by __exit__)
        self._write_header()
        self._start = self._file.tell()

    def append(self, values: npt.NDArray[Any]) -> bytes:
        """Write ``values``, which must fit the file's type, and return their bytes."""
        content = values.astype(self._dtype).tobytes()
        self._file.write(content)
        self.length += len(values)
        return content

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self) -> "_NpyWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        self._write_header()
        assert self._file.tell() == self._start
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _map(path: Path) -> npt.NDArray[Any]:
    return np.load(path, mmap_mode="r", allow_pickle=False)


@contextlib.contextmanager
def _partial_folder(cache: Path) -> Iterator[Path]:
    """A new folder, gone afterwards unless renamed, and locked so that others know its maker lives."""
    partial = cache / f"{_PARTIAL}{uuid.uuid4().hex}"
    lock = cache / f"{partial.name}.lock"
    with open(lock, "wb") as file:
        _try_lock(file)
        partial.mkdir()
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _remove_abandoned(cache: Path) -> None:
    """Delete the partial folders of processes that died; a living process holds the lock beside its own."""
    for lock in sorted(cache.glob(f"{_PARTIAL}*.lock")):
        with contextlib.suppress(FileNotFoundError), open(lock, "r+b") as file:
            if _try_lock(file):
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink(missing_ok=True)


def _try_lock(file: IO[bytes]) -> bool:
    """Take the file's lock if nobody has it; it goes with the process. Where the system has none, False."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

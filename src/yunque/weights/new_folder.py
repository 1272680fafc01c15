"""A folder that appears whole or not at all: made beside its place, put on disk, then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from yunque.core.errors import CheckpointError
from yunque.core.files import sync_folder
from yunque.weights.safetensors_file import FileRecord, Pending, write_tensors

_NEW = ".new-"
_REPLACED = ".replaced-"
_DELETED = ".deleted-"


class FolderWriter:
    """Writes the files of a new folder; each is on disk when its call returns and has its checksum here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[str, FileRecord] = {}

    def write_tensors(self, name: str, tensors: Sequence[Pending]) -> None:
        """Write a safetensors file."""
        with self._created(name) as descriptor, open(descriptor, "wb", buffering=0, closefd=False) as file:
            self.records[name] = write_tensors(file, tensors)

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file of ``content``."""
        with self._created(name) as descriptor, open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        self.records[name] = FileRecord.of(content)

    @contextlib.contextmanager
    def _created(self, name: str) -> Iterator[int]:
        if not name or Path(name).name != name or name.startswith("."):
            raise CheckpointError(f"{name!r} is no plain file name")
        if name in self.records:
            raise CheckpointError(f"{name} is written twice")
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[FolderWriter]:
    """Fill a folder that takes the place ``final`` when the block ends, replacing a folder there.

    Until then, and for ever if the block raises or the process dies, ``final`` is what it was. A failing disk
    (full, over quota, read-only) becomes a ``CheckpointError``, and what was written is removed.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        clean_leftovers(final.parent, lambda name: name == final.name)
        with _reserved(final) as folder:
            yield FolderWriter(folder)
            sync_folder(folder)
            _put_in_place(folder, final)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"cannot write {final}: {reason}; what was there before is untouched") from error


def delete_folder(folder: Path) -> None:
    """Remove a folder so that no reader ever finds a part of it under its name."""
    trash = _beside(folder, _DELETED)
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)  # another process may be cleaning up as well


def survivors(parent: Path) -> dict[str, Path]:
    """Folders of ``parent`` by the name that they belong to, also one whose replacement was cut short."""
    found = {path.name: path for path in parent.iterdir() if not path.name.startswith(".") and path.is_dir()}
    for path in parent.glob(f"{_REPLACED}*"):
        found.setdefault(_belongs_to(path, _REPLACED), path)
    return found


def clean_leftovers(parent: Path, belongs: Callable[[str], bool]) -> None:
    """Finish what killed processes left half-done in ``parent``, for folders whose name ``belongs``.

    A folder that a live process is filling is locked by it and stays.
    """
    with _locked(parent):
        for path in sorted(parent.glob(f"{_REPLACED}*")):
            name = _belongs_to(path, _REPLACED)
            if belongs(name) and not (parent / name).exists():
                path.rename(parent / name)
        for prefix in (_NEW, _REPLACED, _DELETED):
            for path in parent.glob(f"{prefix}*"):
                if belongs(_belongs_to(path, prefix)) and _is_abandoned(path):
                    shutil.rmtree(path, ignore_errors=True)


def _beside(final: Path, prefix: str) -> Path:
    return final.with_name(f"{prefix}{final.name}-{secrets.token_hex(4)}")


def _belongs_to(path: Path, prefix: str) -> str:
    return path.name.removeprefix(prefix).rpartition("-")[0]


@contextlib.contextmanager
def _reserved(final: Path) -> Iterator[Path]:
    """A new folder beside ``final``, locked while the block runs and gone when it fails."""
    folder = _beside(final, _NEW)
    with contextlib.ExitStack() as stack:
        with _locked(final.parent):  # nobody cleans between the making and the locking
            folder.mkdir()
            stack.enter_context(_locked(folder))
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _put_in_place(folder: Path, final: Path) -> None:
    with _locked(final.parent):
        if not final.exists():
            folder.rename(final)
            sync_folder(final.parent)
            return
        aside = _beside(final, _REPLACED)
        final.rename(aside)
        folder.rename(final)
        sync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's advisory lock; it ends with the process. File systems without such locks: no lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_abandoned(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True

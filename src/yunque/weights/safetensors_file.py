"""One safetensors file: its header checked before it is believed, its tensors read and written in place.

The format is eight bytes of header length, a JSON header, and the tensors' bytes; reading it here (rather
than through a memory map) lets a tensor's bytes go from the file straight into the parameter that they belong
to.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from yunque.core.errors import CheckpointError

#: The same limit as the safetensors library, so that every file it reads is read here.
HEADER_LIMIT_BYTES = 100_000_000
_LENGTH_BYTES = 8
_WRITE_AT_MOST = 1 << 30
#: Limit of the system for one call (IOV_MAX).
_BUFFERS_AT_MOST = 1024

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: ``num_bytes`` bytes of ``file`` from its byte ``start`` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int

    @property
    def dtype_name(self) -> str:
        return DTYPE_NAMES[self.dtype]

    def __str__(self) -> str:
        return f"{self.file.name}: tensor {self.name!r}"


@dataclass(frozen=True)
class Pending:
    """A tensor to be written; ``make`` gives its values when its turn comes and not before."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Pending:
        """``tensor`` as it is, or converted to ``dtype`` when written."""
        kept = tensor.detach()
        wanted = dtype or kept.dtype
        return cls(name, wanted, tuple(kept.shape), lambda: kept.to(wanted))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 (hexadecimal) of a file's bytes."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> FileRecord:
        return cls(len(content), hashlib.sha256(content).hexdigest())


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of the file at ``path``, in file order.

    Raises ``CheckpointError`` when the header is longer than ``HEADER_LIMIT_BYTES`` or the file (before
    reading it), is not JSON, names a tensor twice, gives one an unknown dtype or a size that is not its
    shape's, or when the tensors overlap, leave holes, or end elsewhere than the file does.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES:
            raise CheckpointError(f"{path}: {size} bytes is too short for a safetensors file")
        if length > HEADER_LIMIT_BYTES:
            raise CheckpointError(f"{path}: header of {length} bytes is over the limit of {HEADER_LIMIT_BYTES}")
        if length > size - _LENGTH_BYTES:
            raise CheckpointError(f"{path}: header of {length} bytes does not fit a file of {size} bytes")
        header = _parse(path, file.read(length))
    entries = [_entry(path, name, value, _LENGTH_BYTES + length) for name, value in header.items()]
    entries.sort(key=lambda e: (e.start, e.num_bytes))
    _check_coverage(path, entries, _LENGTH_BYTES + length, size)
    return {entry.name: entry for entry in entries}


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: header names {twice!r} twice")
        return table

    try:
        header = json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: safetensors header is a {type(header).__name__}, expected an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map names to strings")
    return header


def _entry(path: Path, name: str, value: Any, data_start: int) -> Entry:
    def is_count(number: Any) -> bool:
        return type(number) is int and 0 <= number < 1 << 63

    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected exactly the keys dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}; valid: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(map(is_count, shape)):
        raise CheckpointError(f"{where}: shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise CheckpointError(f"{where}: data_offsets {offsets!r} is not a pair of positions")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != needed:
        raise CheckpointError(
            f"{where}: data_offsets {offsets} hold {offsets[1] - offsets[0]} bytes, "
            f"but shape {shape} of {dtype} needs {needed}"
        )
    return Entry(name, DTYPES[dtype], tuple(shape), path, data_start + offsets[0], needed)


def _check_coverage(path: Path, entries: Sequence[Entry], data_start: int, size: int) -> None:
    end = data_start
    for entry in entries:
        if entry.start < end:
            raise CheckpointError(f"{path}: tensor {entry.name!r} overlaps the tensor before it")
        if entry.start > end:
            raise CheckpointError(f"{path}: {entry.start - end} unused bytes before tensor {entry.name!r}")
        end = entry.start + entry.num_bytes
    if end > size:
        last = next(e for e in entries if e.start + e.num_bytes > size)
        raise CheckpointError(f"{path}: truncated: tensor {last.name!r} ends at byte {end}, the file at {size}")
    if end < size:
        raise CheckpointError(f"{path}: {size - end} unused bytes after the last tensor")


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def read_into(descriptor: int, entry: Entry, out: Tensor, offset: int = 0) -> None:
    """Fill the contiguous CPU tensor ``out`` from the entry's bytes at ``offset``; errors as `read_adjacent`."""
    read_adjacent(descriptor, [(entry, as_bytes(out))], entry.start + offset)


def read_adjacent(descriptor: int, parts: Sequence[tuple[Entry, memoryview]], position: int) -> None:
    """Fill several pieces of memory, one after the other, with what a file holds from ``position`` on.

    Few system calls for many small tensors; several threads may share the file. Raises ``CheckpointError``, naming
    file and tensor, when the file ends first (it was cut after its header was read).
    """
    rest = [(entry, memory) for entry, memory in parts if memory]
    while rest:
        count = os.preadv(descriptor, [memory for _, memory in rest[:_BUFFERS_AT_MOST]], position)
        if count == 0:
            entry = rest[0][0]
            raise CheckpointError(f"{entry.file}: tensor {entry.name!r}: the file ends at byte {position}")
        position += count
        filled = 0
        while filled < len(rest) and count >= len(rest[filled][1]):
            count -= len(rest[filled][1])
            filled += 1
        rest = rest[filled:]
        if count:
            rest[0] = (rest[0][0], rest[0][1][count:])


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one file, in new memory."""
    tensors = {}
    with open(path, "rb", buffering=0) as file:
        for name, entry in read_header(path).items():
            tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
            read_into(file.fileno(), entry, tensors[name])
    return tensors


def write_tensors(file: BinaryIO, tensors: Sequence[Pending]) -> FileRecord:
    """Write a safetensors file to ``file`` (opened without buffering) and return the record of its bytes.

    Tensors keep their order among those of one item size; wider items come first, so that all are aligned.
    """
    ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.num_bytes
        fields = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
        if header.setdefault(tensor.name, fields) is not fields:
            raise ValueError(f"tensor {tensor.name!r} given twice")
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    digest = hashlib.sha256()
    total = 0
    for part in (len(content).to_bytes(_LENGTH_BYTES, "little"), content):
        total += _write(file, digest, memoryview(part))
    for tensor in ordered:
        made = tensor.make()
        assert (made.dtype, tuple(made.shape)) == (tensor.dtype, tensor.shape), tensor.name
        total += _write(file, digest, as_bytes(made.cpu().contiguous()))
    return FileRecord(total, digest.hexdigest())


def _write(file: BinaryIO, digest: Any, part: memoryview) -> int:
    done = 0
    while done < len(part):
        done += file.write(part[done : done + _WRITE_AT_MOST])
    digest.update(part)
    return done

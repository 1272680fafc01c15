"""Read matched tensors from their files: in pieces, converted on the way where dtypes differ."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from yunque.core.errors import CheckpointError
from yunque.weights.fp8 import Fp8Format, dequantise
from yunque.weights.matching import Fill, Matching
from yunque.weights.safetensors_file import Entry, as_bytes, read_adjacent, read_into

#: Tensors are cut into pieces of this size: little to convert at once.
PIECE_BYTES = 4 * 2**20
#: What a thread takes at a time.
BATCH_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Piece:
    """Rows ``start .. stop - 1`` (along the first axis) of one fill."""

    fill: Fill
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * _row_bytes(self.fill.entry)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.fill.entry.shape
        return (self.stop - self.start, *shape[1:]) if shape else ()


@dataclass(frozen=True)
class TensorReader:
    """Reads from open files; usable from several threads."""

    descriptors: Mapping[Path, int]
    fp8: Fp8Format

    def fill(self, pieces: Sequence[Piece]) -> Counter[str]:
        """Fill some pieces of a model; returns how many elements of each parameter were written.

        Pieces that follow each other in a file and need no conversion are read by one call.
        """
        written: Counter[str] = Counter()
        run: list[tuple[Entry, memoryview]] = []
        run_file, run_start, run_end = Path(), 0, 0
        for piece in pieces:
            out = piece.fill.out.detach()
            out = out[piece.start : piece.stop] if out.dim() else out
            entry = piece.fill.entry
            if not _is_direct(entry, out):
                self._read(piece, out)
            else:
                position = entry.start + piece.start * _row_bytes(entry)
                if run and (entry.file, position) != (run_file, run_end):
                    read_adjacent(self.descriptors[run_file], run, run_start)
                    run.clear()
                if not run:
                    run_file, run_start = entry.file, position
                run.append((entry, as_bytes(out)))
                run_end = position + piece.num_bytes
            written[piece.fill.parameter] += out.numel()
        if run:
            read_adjacent(self.descriptors[run_file], run, run_start)
        return written

    def read(self, fill: Fill) -> Tensor:
        """The whole stored tensor in new CPU memory, in the dtype that the fill's target has."""
        made = torch.empty(fill.entry.shape, dtype=fill.out.dtype)
        for piece in pieces_of(fill, self.fp8):
            self._read(piece, made[piece.start : piece.stop] if made.dim() else made)
        return made

    def check_copy(self, copy: Fill, main: Fill) -> None:
        """Raise unless a stored repetition equals the tensor that it repeats."""
        for piece in pieces_of(copy, self.fp8):
            ours, theirs = (torch.empty(piece.shape, dtype=copy.out.dtype) for _ in range(2))
            self._read(piece, ours)
            self._read(Piece(main, piece.start, piece.stop), theirs)
            if not torch.equal(ours, theirs):
                raise CheckpointError(
                    f"{copy.entry} differs from {main.entry.name!r}, which the MTP layer shares; "
                    f"remove it or make them equal"
                )

    def _read(self, piece: Piece, out: Tensor) -> None:
        entry, offset = piece.fill.entry, piece.start * _row_bytes(piece.fill.entry)
        descriptor = self.descriptors[entry.file]
        if _is_direct(entry, out):
            read_into(descriptor, entry, out, offset)
            return
        stored = torch.empty(out.shape, dtype=entry.dtype)
        read_into(descriptor, entry, stored, offset)
        out.copy_(stored if piece.fill.scale is None else self._scaled(piece, stored, piece.fill.scale))

    def _scaled(self, piece: Piece, stored: Tensor, scale: Entry) -> Tensor:
        first, last = piece.start // self.fp8.block[0], -(-piece.stop // self.fp8.block[0])
        scale_BB = torch.empty((last - first, scale.shape[1]), dtype=scale.dtype)
        read_into(self.descriptors[scale.file], scale, scale_BB, first * _row_bytes(scale))
        return dequantise(stored, scale_BB, self.fp8)


@contextlib.contextmanager
def open_reader(matching: Matching) -> Iterator[TensorReader]:
    """A reader with every file of the matching open, closed again when the block ends."""
    entries = [f.entry for f in matching.fills] + [f.scale for f in matching.fills if f.scale]
    files = {entry.file for entry in entries} | {copy.entry.file for copy, _ in matching.copies}
    with contextlib.ExitStack() as stack:
        descriptors = {}
        for path in files:
            descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptors[path])
        yield TensorReader(descriptors, matching.fp8)


def batches_of(matching: Matching, batch_bytes: int = BATCH_BYTES) -> Iterator[list[Piece]]:
    """All pieces in file order, put together to batches of at least ``batch_bytes``."""
    batch: list[Piece] = []
    size = 0
    for fill in sorted(matching.fills, key=lambda fill: (fill.entry.file, fill.entry.start)):
        for piece in pieces_of(fill, matching.fp8, min(PIECE_BYTES, batch_bytes)):
            batch.append(piece)
            size += piece.num_bytes
            if size >= batch_bytes:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def pieces_of(fill: Fill, fp8: Fp8Format, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """The pieces that make up one fill; FP8 is cut between blocks, so that each piece has its own scales."""
    rows = fill.entry.shape[0] if fill.entry.shape else 1
    step = max(1, piece_bytes // max(1, _row_bytes(fill.entry)))
    if fill.scale is not None:
        step = max(fp8.block[0], step // fp8.block[0] * fp8.block[0])
    for start in range(0, rows, step):
        yield Piece(fill, start, min(start + step, rows))


def _is_direct(entry: Entry, out: Tensor) -> bool:
    """Whether the file's bytes are the tensor's bytes."""
    return entry.dtype == out.dtype and out.device.type == "cpu" and out.is_contiguous()


def _row_bytes(entry: Entry) -> int:
    return entry.num_bytes // entry.shape[0] if entry.shape and entry.shape[0] else entry.num_bytes

"""Headers that lie are refused, naming file and tensor; the files are those of the safetensors library."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sample_checkpoints import same_bits

from yunque.core.errors import CheckpointError
from yunque.weights.safetensors_file import (
    DTYPES,
    HEADER_LIMIT_BYTES,
    Entry,
    Pending,
    as_bytes,
    read_adjacent,
    read_header,
    read_into,
    read_tensors,
    write_tensors,
)


def _raw(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(content) if length is None else length).to_bytes(8, "little") + content + data)
    return path


def _f32(shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def _random(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return values.view(dtype).reshape(shape)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(
    st.dictionaries(st.text(min_size=1, max_size=8).filter(lambda n: n != "__metadata__"), shapes, max_size=5),
    st.lists(st.sampled_from(list(DTYPES.values())), min_size=5, max_size=5),
    st.integers(0, 2**32),
)
def test_round_trip_of_every_dtype_is_bit_exact_in_both_directions(tmp_path_factory, named, dtypes, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: _random(d, s, generator) for (n, s), d in zip(named.items(), dtypes, strict=False)}
    ours, theirs = (tmp_path_factory.mktemp("files") / name for name in ("ours", "theirs"))
    with open(ours, "wb", buffering=0) as file:
        record = write_tensors(file, [Pending.of(name, tensor) for name, tensor in tensors.items()])
    save_file(tensors, theirs)
    assert same_bits(load_file(ours), tensors)
    assert same_bits(read_tensors(theirs), tensors)
    assert record.num_bytes == ours.stat().st_size
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in read_header(ours).values())


def test_header_length_beyond_the_limit_is_refused_before_it_is_read(tmp_path):
    path = _raw(tmp_path / "a.safetensors", b"{}", length=2**62)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: header of 4611686018427387904 bytes is over"):
        read_header(path)
    path = _raw(path, b"{}", length=HEADER_LIMIT_BYTES)
    with pytest.raises(CheckpointError, match="does not fit a file of 10 bytes"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": _f32([2], 0, 8), "b": _f32([2], 4, 12)}, 12, "'b' overlaps"),
        ({"a": _f32([2], 0, 8), "b": _f32([2], 0, 8)}, 8, "'b' overlaps"),
        ({"a": _f32([1], 0, 4), "b": _f32([1], 8, 12)}, 12, "4 unused bytes before tensor 'b'"),
        ({"a": _f32([1], 0, 4)}, 8, "4 unused bytes after"),
        ({"a": _f32([4], 0, 16)}, 15, "truncated: tensor 'a'"),
        ({"a": _f32([3], 0, 8)}, 8, r"'a'.*needs 12"),
        ({"a": _f32([-1], 0, 4)}, 4, r"'a': shape \[-1\]"),
        ({"a": _f32([True], 0, 4)}, 4, "'a': shape"),
        ({"a": _f32([1], 4, 0)}, 4, "hold -4 bytes"),
        (
            {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}},
            1,
            "'a': unknown dtype 'F4'; valid: F64",
        ),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "'a': expected exactly the keys"),
        ({"a": _f32([1], 0, 4), "__metadata__": {"x": 1}}, 4, "__metadata__"),
        ([], 0, "expected an object"),
        (b'{"a":1,"a":2}', 0, "'a' twice"),
        (b"{", 0, "not JSON"),
        (b"\xff\xfe", 0, "not JSON"),
        (b"[" * 100_000, 0, "not JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", 0, "not JSON"),
    ],
)
def test_header_that_lies_is_refused(tmp_path, header, data, message):
    path = _raw(tmp_path / "bad.safetensors", header, bytes(data))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert "bad.safetensors" in str(caught.value)


@given(st.binary(max_size=64), st.integers(0, 80))
def test_no_file_makes_the_reader_fail_in_another_way(tmp_path_factory, content, length):
    path = tmp_path_factory.mktemp("noise") / "noise"
    path.write_bytes(length.to_bytes(8, "little")[: len(content)] + content)
    with contextlib.suppress(CheckpointError):
        read_header(path)


def test_file_cut_after_its_header_was_read_is_reported(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(100)}, path)
    entry = read_header(path)["a"]
    with open(path, "r+b") as file:
        file.truncate(entry.start + 40)
    with (
        open(path, "rb", buffering=0) as file,
        pytest.raises(CheckpointError, match=r"a\.safetensors: tensor 'a': the file ends"),
    ):
        read_into(file.fileno(), entry, torch.empty(100))


def test_tensor_is_read_into_the_memory_it_belongs_to(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3)}, path)
    stacked = torch.zeros(3, 2, 3)
    address = stacked.data_ptr()
    with open(path, "rb", buffering=0) as file:
        read_into(file.fileno(), read_header(path)["a"], stacked[1])
    assert stacked.data_ptr() == address
    assert stacked.flatten().tolist() == [0.0] * 6 + [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] + [0.0] * 6


@pytest.mark.parametrize("count", [1, 1024, 3000])
def test_any_number_of_adjacent_tensors_is_read_at_once(tmp_path, count):
    path = tmp_path / "a.safetensors"
    sizes = [i % 4 for i in range(count)]
    save_file({f"t{i:04d}": torch.full((size,), i, dtype=torch.int32) for i, size in enumerate(sizes)}, path)
    entries = list(read_header(path).values())
    tensors = [torch.empty(entry.shape, dtype=torch.int32) for entry in entries]
    with open(path, "rb", buffering=0) as file:
        parts = [(entry, as_bytes(tensor)) for entry, tensor in zip(entries, tensors, strict=True)]
        read_adjacent(file.fileno(), parts, entries[0].start)
    assert all(t.tolist() == [int(e.name[1:])] * t.numel() for e, t in zip(entries, tensors, strict=True))


def test_file_cut_within_adjacent_tensors_names_the_one_that_is_short(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({name: torch.ones(10) for name in "abc"}, path)
    entries = list(read_header(path).values())
    with open(path, "r+b") as file:
        file.truncate(entries[1].start + 4)
    with open(path, "rb", buffering=0) as file:
        parts = [(entry, as_bytes(torch.empty(10))) for entry in entries]
        with pytest.raises(CheckpointError, match=rf"tensor 'b': the file ends at byte {entries[1].start + 4}"):
            read_adjacent(file.fileno(), parts, entries[0].start)


def test_pending_tensor_is_made_only_when_written(tmp_path):
    made: list[str] = []

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return torch.ones(2)

    pending = [Pending(name, torch.float32, (2,), lambda name=name: make(name)) for name in ("a", "b")]
    assert made == []
    with open(tmp_path / "f", "wb", buffering=0) as file:
        write_tensors(file, pending)
    assert made == ["a", "b"]


def test_entry_names_its_file_and_tensor():
    entry = Entry("w", torch.float32, (1,), Path("shard-1.safetensors"), 8, 4)
    assert str(entry) == "shard-1.safetensors: tensor 'w'"

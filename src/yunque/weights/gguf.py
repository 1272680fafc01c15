"""Write a model as one GGUF file, which llama.cpp and what is built on it load: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from yunque.core.errors import CheckpointError, ConfigError, unknown
from yunque.core.files import sync_folder
from yunque.core.logging import get_logger
from yunque.model.config import ModelConfig
from yunque.model.names import FP32_ROLES, Role, module_specs
from yunque.weights.checkpoint import text_files
from yunque.weights.gguf_metadata import ARCHITECTURE, add_architecture, add_text
from yunque.weights.gguf_names import GgufTensor, gguf_tensors, refuse_unsupported
from yunque.weights.matching import Matching, match, shorten
from yunque.weights.models import open_any, stored_dtype
from yunque.weights.reader import open_reader

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

GgufDtype = Literal["f32", "f16", "bf16", "q8_0"]
GGUF_DTYPES: tuple[GgufDtype, ...] = get_args(GgufDtype)
#: Stay float32 in every file: all are small, and rounding them changes choices, not only values.
_EXACT_ROLES = FP32_ROLES | {Role.NORM, Role.INDEXER_NORM, Role.INDEXER_HEADS}
#: Largest value that a dtype holds (q8_0: a float16 scale times 127).
_LARGEST = {"f32": 3.4028234e38, "bf16": 3.3895313e38, "f16": 65504.0, "q8_0": 65504.0 * 127}
_AS_STORED: dict[torch.dtype, GgufDtype] = {
    torch.float32: "f32",
    torch.float64: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
}
_Q8_BLOCK = 32

_logger = get_logger(__name__)


def write_gguf(
    source: Path | str,
    target: Path | str,
    *,
    dtype: GgufDtype | None = None,
    overwrite: bool = False,
    ignore: Sequence[str] = (),
) -> Path:
    """Write what ``source`` (checkpoint, snapshot or store) holds as the GGUF file ``target``; returns its path.

    Architecture ``glm-dsa`` with indexers, IndexShare and the MTP layer; tokenizer and chat template go into
    the file. ``dtype`` is by default the stored one (FP8: bf16); norms, router, biases and the indexer's head
    weights are float32 in all of them. A matrix whose rows are no multiple of 32 is f16 in a q8_0 file. One
    tensor (of experts: one expert's matrix) is in memory at a time. The file appears when all of it is on
    disk. Raises ``CheckpointError`` naming what cannot be written, ``ConfigError`` when the package is
    missing.
    """
    _require_package()
    checkpoint = open_any(source)
    dtype = dtype or _AS_STORED[stored_dtype(checkpoint)]
    if dtype not in GGUF_DTYPES:
        raise ConfigError(unknown("GGUF dtype", dtype, GGUF_DTYPES))
    config = checkpoint.config
    refuse_unsupported(config)
    target = _refuse_existing(Path(target).absolute(), overwrite=overwrite)
    state = {name: torch.empty(spec.shape, device="meta") for name, spec in module_specs(config).items()}
    matching = match(checkpoint, state, ignore, exact=False)
    for note in matching.notes:
        _logger.warning("%s: %s", checkpoint.folder, note)
    with _whole_file(target) as temporary:
        writer = _open_writer(temporary, target.stem, dtype)
        try:
            add_architecture(writer, config)
            add_text(writer, config, text_files(checkpoint.folder))
            _write_tensors(writer, config, matching, dtype)
        finally:
            writer.close()
    return target


def _require_package() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError("writing GGUF needs the package gguf: pip install 'yunque[gguf]'") from error


def _refuse_existing(target: Path, *, overwrite: bool) -> Path:
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder; GGUF is one file: name it, for instance {target / 'model.gguf'}")
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists; choose another name or overwrite it")
    return target


@contextlib.contextmanager
def _whole_file(target: Path) -> Iterator[Path]:
    """A temporary name beside ``target`` that takes its place, synced, when the block ends without an error."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"cannot write {target}: {reason}; what was there before is untouched") from error
    finally:
        temporary.unlink(missing_ok=True)


def _open_writer(path: Path, name: str, dtype: GgufDtype) -> GGUFWriter:
    from gguf import GGML_QUANT_VERSION, GGUFWriter, LlamaFileType

    types = {
        "f32": LlamaFileType.ALL_F32,
        "f16": LlamaFileType.MOSTLY_F16,
        "bf16": LlamaFileType.MOSTLY_BF16,
        "q8_0": LlamaFileType.MOSTLY_Q8_0,
    }
    writer = GGUFWriter(path, ARCHITECTURE)
    writer.add_name(name)
    writer.add_file_type(types[dtype])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    return writer


def _write_tensors(writer: GGUFWriter, config: ModelConfig, matching: Matching, dtype: GgufDtype) -> None:
    """Header, then each tensor as its turn comes."""
    tensors = list(gguf_tensors(config))
    dtypes: dict[str, GgufDtype] = {tensor.name: _dtype_of(tensor, dtype) for tensor in tensors}
    narrow = [name for name, kind in dtypes.items() if dtype == "q8_0" and kind == "f16"]
    if narrow:
        _logger.warning("f16, as their rows are no multiple of %d: %s", _Q8_BLOCK, shorten(narrow))
    for tensor in tensors:
        kind = dtypes[tensor.name]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype("f4"), _num_bytes(tensor.shape, kind), _ggml(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    fills = {fill.entry.name: fill for fill in matching.fills}
    with open_reader(matching) as reader:
        for copy, main in matching.copies:
            reader.check_copy(copy, main)
        for tensor in tensors:
            kind = dtypes[tensor.name]
            start = file.tell()
            for source in tensor.sources:
                values = source.change(reader.read(fills[source.name]))
                file.write(encode(values, kind, name=source.name).data)
            written = file.tell() - start
            assert written == _num_bytes(tensor.shape, kind), tensor.name
            writer.write_padding(file, written)


def encode(values: Tensor, dtype: GgufDtype, *, name: str) -> np.ndarray[Any, Any]:
    """The bytes of a float32 tensor in ``dtype``. Raises ``CheckpointError`` for values that it cannot hold."""
    largest = values.abs().max().item()
    if not largest <= _LARGEST[dtype]:  # NaN is not
        raise CheckpointError(f"tensor {name!r} holds {largest}; {dtype} holds numbers up to {_LARGEST[dtype]:g}")
    if dtype == "q8_0":
        from gguf import GGMLQuantizationType, quants

        return quants.quantize(values.numpy(), GGMLQuantizationType.Q8_0)
    if dtype == "bf16":
        return values.bfloat16().contiguous().view(torch.uint8).numpy()
    return values.to(torch.float16 if dtype == "f16" else torch.float32).contiguous().numpy()


def _dtype_of(tensor: GgufTensor, dtype: GgufDtype) -> GgufDtype:
    if tensor.spec.role in _EXACT_ROLES:
        return "f32"
    return "f16" if dtype == "q8_0" and tensor.shape[-1] % _Q8_BLOCK else dtype


def _num_bytes(shape: Sequence[int], dtype: GgufDtype) -> int:
    if dtype == "q8_0":
        return prod(shape) // _Q8_BLOCK * (_Q8_BLOCK + 2)
    return prod(shape) * (4 if dtype == "f32" else 2)


def _ggml(dtype: GgufDtype) -> GGMLQuantizationType:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[dtype.upper()]

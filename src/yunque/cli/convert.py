"""``yunque convert``: from one kind of checkpoint folder to another, or to a GGUF file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from yunque.cli.process import tune

_FOLDER_DTYPES = ("float32", "bfloat16")
_GGUF_DTYPES = ("f32", "f16", "bf16", "q8_0")
_SHARD_GB = 5.0


def add_commands(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "convert",
        help="Hugging Face folder to snapshot and back, or to GGUF",
        description="Write the model in one folder as a Hugging Face checkpoint, as a snapshot to start from, or as "
        "the GGUF file that llama.cpp loads.",
        epilog="example:  yunque convert runs/quickstart/05-sft/snapshots out --dtype bfloat16\n"
        "          yunque convert path/to/GLM-5 start --to snapshot\n"
        "          yunque convert runs/quickstart/model model.gguf --to gguf --dtype q8_0",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="CKPT", help="a checkpoint folder, a snapshot, or a run's snapshots")
    parser.add_argument("target", type=Path, help="the folder, or the .gguf file, to write")
    parser.add_argument(
        "--to", choices=("huggingface", "snapshot", "gguf"), default="huggingface", help="default %(default)s"
    )
    parser.add_argument(
        "--dtype",
        metavar="DTYPE",
        help=f"default: as stored (FP8 is expanded); folders: {', '.join(_FOLDER_DTYPES)}; "
        f"GGUF: {', '.join(_GGUF_DTYPES)}",
    )
    parser.add_argument("--shard-gb", type=float, metavar="GB", help=f"size of a folder's files; default {_SHARD_GB:g}")
    parser.add_argument("--overwrite", action="store_true", help="replace the target")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="PATTERN", help="stored tensors to leave out (repeatable)"
    )
    parser.set_defaults(run=run_convert)


def run_convert(args: argparse.Namespace) -> int:
    """Convert and say where the result is."""
    tune()
    from yunque.core.errors import ConfigError, unknown

    is_gguf = args.to == "gguf"
    dtypes = _GGUF_DTYPES if is_gguf else _FOLDER_DTYPES
    if args.dtype is not None and args.dtype not in dtypes:
        raise ConfigError(unknown("--dtype", args.dtype, dtypes, where=f"--to {args.to}"))
    print(f"wrote {_to_gguf(args) if is_gguf else _to_folder(args)}")
    return 0


def _to_gguf(args: argparse.Namespace) -> Path:
    from yunque.core.errors import ConfigError
    from yunque.weights import write_gguf

    if args.shard_gb is not None:
        raise ConfigError("--shard-gb is for folders; --to gguf writes one file")
    return write_gguf(args.source, args.target, dtype=args.dtype, overwrite=args.overwrite, ignore=args.ignore)


def _to_folder(args: argparse.Namespace) -> Path:
    import torch

    from yunque.core.errors import ConfigError
    from yunque.weights import convert

    shard_gb = _SHARD_GB if args.shard_gb is None else args.shard_gb
    if not 0 < shard_gb < 1e9:
        raise ConfigError(f"--shard-gb is {shard_gb}; it must be above 0, and a number")
    return convert(
        args.source,
        args.target,
        kind=args.to,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        shard_bytes=int(shard_gb * 1e9),
        overwrite=args.overwrite,
        ignore=args.ignore,
    )

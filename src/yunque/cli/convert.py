"""``yunque convert``: from one kind of checkpoint folder to another."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from yunque.cli.process import tune


def add_commands(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "convert",
        help="Hugging Face folder to snapshot and back",
        description="Write the model in one folder as a Hugging Face checkpoint or as a snapshot to start from.",
        epilog="example:  yunque convert runs/quickstart/05-sft/snapshots out --dtype bfloat16\n"
        "          yunque convert path/to/GLM-5 start --to snapshot",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="CKPT", help="a checkpoint folder, a snapshot, or a run's snapshots")
    parser.add_argument("target", type=Path, help="the folder to write")
    parser.add_argument("--to", choices=("huggingface", "snapshot"), default="huggingface", help="default %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as stored (FP8 is expanded)")
    parser.add_argument("--shard-gb", type=float, default=5.0, metavar="GB", help="size of a file; default %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="replace the target folder")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="PATTERN", help="stored tensors to leave out (repeatable)"
    )
    parser.set_defaults(run=run_convert)


def run_convert(args: argparse.Namespace) -> int:
    """Convert and say where the result is."""
    tune()
    import torch

    from yunque.core.errors import ConfigError
    from yunque.weights import convert

    if not 0 < args.shard_gb < 1e9:
        raise ConfigError(f"--shard-gb is {args.shard_gb}; it must be above 0, and a number")
    written = convert(
        args.source,
        args.target,
        kind=args.to,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        shard_bytes=int(args.shard_gb * 1e9),
        overwrite=args.overwrite,
        ignore=args.ignore,
    )
    print(f"wrote {written}")
    return 0

"""``yunque info``: what a model costs, from a checkpoint, a config file or a preset's name."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunque.cli.process import make_console, tune

if TYPE_CHECKING:
    from yunque.model.config import ModelConfig
    from yunque.model.report import ModelReport


def add_commands(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "info",
        help="parameters, FLOPs, cache and bytes of a model",
        description="Parameters total and active by part, FLOPs per token, cache bytes per token, bytes by type.",
        epilog="example:  yunque info glm-5.2 --context 131072\n          yunque info runs/quickstart/model --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="CKPT|CONFIG", help="a checkpoint, a config.json, or a preset's name")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of context that FLOPs are counted at")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.set_defaults(run=run_info)


def run_info(args: argparse.Namespace) -> int:
    """Print the report."""
    tune()
    from yunque.core.errors import ConfigError
    from yunque.model.report import model_report

    config = read_model_config(args.model)
    if args.context is not None and args.context < 1:
        raise ConfigError(f"--context is {args.context}; it must be at least 1")
    report = model_report(config, context=args.context)
    if args.json:
        print(json.dumps(as_json(report)))
    else:
        show(args.model, report)
    return 0


def read_model_config(name: str) -> ModelConfig:
    """The config of a checkpoint folder, a run's snapshots, a JSON file, or a preset.

    Raises ``ConfigError`` naming the presets when it is none of them.
    """
    from yunque.core.errors import ConfigError, unknown
    from yunque.core.files import read_json
    from yunque.model.config import ModelConfig
    from yunque.model.presets import PRESETS, preset
    from yunque.weights import find_checkpoint, read_config

    path = Path(name)
    if path.is_dir():
        return read_config(find_checkpoint(path))
    if path.is_file():
        data = read_json(path)
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: expected a JSON object, found {type(data).__name__}")
        return ModelConfig.from_hf(data)
    if name in PRESETS:
        return preset(name)
    raise ConfigError(f"{name} is no folder and no file; {unknown('model preset', name, PRESETS)}")


def as_json(report: ModelReport) -> dict[str, Any]:
    """The report as plain values."""
    return {
        "parameters": {name: {"total": s.total, "active": s.active} for name, s in report.parts.items()},
        "parameters_main": {"total": report.main.total, "active": report.main.active},
        "parameters_with_mtp": {"total": report.with_mtp.total, "active": report.with_mtp.active},
        "tensors": report.num_tensors,
        "context": report.context,
        "flops_per_token": report.flops_per_token,
        "cache_bytes_per_token": {t: report.cache_bytes_per_token(t) for t in ("float32", "bfloat16")},
        "weight_bytes": dict(report.weight_bytes),
    }


def show(name: str, report: ModelReport) -> None:
    """Print the report as tables."""
    from rich.table import Table

    console = make_console()
    table = Table("part", "parameters", "active per token", title=name)
    for part, sizes in report.parts.items():
        table.add_row(part, f"{sizes.total:,}", f"{sizes.active:,}")
    table.add_section()
    table.add_row("main model", f"{report.main.total:,}", f"{report.main.active:,}")
    table.add_row("with MTP layer", f"{report.with_mtp.total:,}", f"{report.with_mtp.active:,}")
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)
    rows = [
        ("tensors in a checkpoint", f"{report.num_tensors:,}"),
        (f"forward FLOPs per token at {report.context:,} tokens", f"{report.flops_per_token / 1e9:,.4g} G"),
    ]
    rows += [(f"cache per token, {t}", f"{report.cache_bytes_per_token(t):,} B") for t in ("float32", "bfloat16")]
    rows += [(f"weights, {t}", f"{size / 1e9:,.4g} GB") for t, size in report.weight_bytes.items()]
    for label, value in rows:
        console.print(f"{label:<48}{value}", highlight=False)

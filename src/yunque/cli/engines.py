"""The options of an engine, and the engine that they describe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from yunque.cli.chat_formats import CHAT_FORMATS, chat_format_in
from yunque.core.errors import ConfigError

if TYPE_CHECKING:
    from yunque.engine import Engine
    from yunque.text import Renderer

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options that ``load_engine`` reads."""
    group = parser.add_argument_group("engine")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as stored")
    group.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default %(default)s")
    group.add_argument(
        "--max-model-len", type=int, metavar="N", help="most tokens of prompt and reply; default: what the model has"
    )
    group.add_argument(
        "--cache-memory",
        type=memory_size,
        metavar="SIZE",
        help="memory for pages, such as 512M or 4G; default: enough for --max-running full contexts, "
        "within half of the free memory",
    )
    group.add_argument(
        "--max-running", type=int, default=64, metavar="N", help="requests computed at once; default %(default)s"
    )
    group.add_argument(
        "--drafts", type=int, metavar="N", help="tokens that the MTP layer drafts (0: none); default: 1 if it has one"
    )
    group.add_argument(
        "--acceptance",
        choices=("coupled", "rejection"),
        default="coupled",
        help="which drafts stand: coupled gives a seed the same reply with and without drafts; default %(default)s",
    )
    group.add_argument(
        "--batch-invariant", action="store_true", help="bits that do not depend on neighbours, at a cost in speed"
    )
    group.add_argument(
        "--chat-format", choices=CHAT_FORMATS, help="how messages are written; default: the checkpoint's"
    )


def memory_size(text: str) -> int:
    """Bytes of ``512M``, ``4G``, ``1000000``. Raises ``ArgumentTypeError``."""
    number, unit = text.strip().lower().removesuffix("ib").removesuffix("b"), ""
    if number and number[-1] in _UNITS:
        number, unit = number[:-1], number[-1]
    try:
        size = float(number) * _UNITS[unit]
    except ValueError:
        size = -1
    if not 0 < size < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; examples: 512M, 4G, 1000000")
    return int(size)


def load_engine(checkpoint: str, args: argparse.Namespace) -> tuple[Engine, Renderer]:
    """The engine over ``checkpoint`` as the options say, and the renderer of its chat format.

    Raises ``ConfigError`` or ``CheckpointError``.
    """
    from yunque.engine import Engine, EngineSettings
    from yunque.text import Renderer
    from yunque.weights import find_checkpoint, read_config

    folder = find_checkpoint(Path(checkpoint))
    drafts = args.drafts
    if drafts is None:
        drafts = 1 if read_config(folder).num_nextn_predict_layers else 0
    settings = EngineSettings(
        max_running=args.max_running,
        max_step_tokens=max(2048, args.max_running),
        num_drafts=drafts,
        acceptance=args.acceptance,
        max_model_len=args.max_model_len,
    )
    engine = Engine.load(
        checkpoint,
        settings,
        dtype=args.dtype,
        device=args.device,
        cache_bytes=args.cache_memory,
        batch_invariant=args.batch_invariant,
    )
    if engine.tokenizer is None:
        engine.close()
        raise ConfigError(f"{folder} has no tokenizer.json: messages cannot be written without one")
    return engine, Renderer(engine.tokenizer, args.chat_format or chat_format_in(folder))

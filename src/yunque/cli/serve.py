"""``yunque serve``: an engine behind OpenAI's and Anthropic's APIs, and a web page."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

from yunque.cli.engines import add_engine_options, load_engine
from yunque.cli.process import allow_many_files, tune
from yunque.core.errors import ConfigError


def add_commands(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a checkpoint over HTTP",
        description="Answer the OpenAI and Anthropic APIs, SGLang's and vLLM's token endpoints, and a browser.",
        epilog="example:  yunque serve runs/quickstart/model\n"
        "          yunque serve CKPT --host 0.0.0.0 --port 8000 --api-key $(openssl rand -hex 16)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint folder, a snapshot, or a run's snapshots")
    parser.add_argument("--host", default="127.0.0.1", help="default %(default)s; any other needs --api-key")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0: any free one; default %(default)s")
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="what clients must present; may be given several times; default: YUNQUE_API_KEY",
    )
    parser.add_argument("--admin-key", metavar="KEY", help="opens the admin routes; default: YUNQUE_ADMIN_KEY")
    parser.add_argument(
        "--max-concurrent",
        type=int,
        default=256,
        metavar="N",
        help="requests that the engine has at once, computed or waiting for it; default 256",
    )
    parser.add_argument(
        "--max-queued", type=int, default=256, metavar="N", help="more that may wait before a 429; default 256"
    )
    parser.add_argument(
        "--drain", type=float, default=30.0, metavar="SECONDS", help="for replies in flight at a stop; default 30"
    )
    parser.add_argument("--no-think", action="store_true", help="replies do not think unless a request asks for it")
    add_engine_options(parser)
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal, then drain."""
    tune()
    allow_many_files()
    try:
        from yunque.serve.app import create_app
        from yunque.serve.run import answer_forever
        from yunque.serve.settings import ServeSettings
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; `pip install 'yunque[serve]'` brings it") from error
    settings = ServeSettings(
        host=args.host,
        port=args.port,
        api_keys=tuple(args.api_key or filter(None, [os.environ.get("YUNQUE_API_KEY")])),
        admin_key=args.admin_key or os.environ.get("YUNQUE_ADMIN_KEY"),
        max_concurrent=args.max_concurrent,
        max_queued=args.max_queued,
        drain_timeout_s=args.drain,
        enable_thinking=not args.no_think,
    )
    engine, renderer = load_engine(args.checkpoint, args)
    with engine:
        app = create_app(engine, renderer, settings)
        print(f"model {engine.info.model_name}, context {engine.info.max_model_len} tokens", flush=True)
        asyncio.run(answer_forever(app, engine, settings, announce=_announce))
    return 0


def _announce(url: str) -> None:
    print(f"serving at {url}  (OpenAI: {url}/v1, Anthropic: {url}, page: {url}/)", flush=True)

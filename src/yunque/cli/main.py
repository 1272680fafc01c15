"""``yunque``: one parser for all commands, errors as one line, exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from yunque import __version__
from yunque.cli import chat, convert, generate, info, route, serve, train
from yunque.core import logging
from yunque.core.errors import Interrupted, YunqueError

#: Exit codes: a mistake in what was asked; stopped on request, and nobody reading the output any more (the shell's
#: conventions for SIGINT and SIGPIPE).
MISTAKE = 2
STOPPED = 130
UNREAD = 141


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = argparse.ArgumentParser(
        prog="yunque", description="Train, adapt and run GLM-5-architecture models of any size."
    )
    parser.add_argument("--version", action="version", version=f"yunque {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (train, generate, chat, serve, route, info, convert):
        module.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. A mistake prints one line on standard error, without a traceback.

    Output that nobody reads any more (``yunque info glm-5 | head -1``) ends the command in silence.
    """
    try:
        return _run(argv)
    except BrokenPipeError:
        return UNREAD
    finally:
        _drop_unwritten()


def _run(argv: Sequence[str] | None) -> int:
    args = build_parser().parse_args(argv)
    try:
        logging.setup("info")
        code = args.run(args)
        sys.stdout.flush()
        return code
    except YunqueError as error:
        print(f"yunque {args.command}: {error}", file=sys.stderr)
        return STOPPED if isinstance(error, Interrupted) else MISTAKE
    except KeyboardInterrupt:
        print(f"yunque {args.command}: stopped", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:
        raise
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        print(f"yunque {args.command}: {place}{error.strerror or error}", file=sys.stderr)
        return MISTAKE


def _drop_unwritten() -> None:
    """Output that cannot be written is given up, lest the end of the process tries again and complains."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

"""``yunque chat``: a conversation in the terminal, with a checkpoint or a server."""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunque.cli.engines import add_engine_options, load_engine
from yunque.cli.process import tune
from yunque.core.errors import ConfigError, YunqueError

if TYPE_CHECKING:
    from yunque.agents import ChatClient
    from yunque.cli.chat_input import Prompter
    from yunque.cli.chat_session import ChatSession
    from yunque.cli.chat_view import ChatView


def add_commands(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "chat",
        help="talk with a checkpoint or a server",
        description="A conversation in the terminal; /help lists what can be changed in it. Piped input is a message "
        "a line.",
        epilog="example:  yunque chat runs/quickstart/model\n"
        "          yunque chat http://127.0.0.1:8000 --tools my_tools.py\n"
        '          echo "What is 3 plus 4?" | yunque chat CKPT --temperature 0',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="CKPT|URL", help="a checkpoint, or the address of a server with OpenAI's API")
    parser.add_argument("--system", metavar="TEXT", help="what the assistant is told first")
    parser.add_argument(
        "--tools", type=Path, metavar="FILE.py", help="run this file and offer its public, typed functions as tools"
    )
    parser.add_argument("--no-think", action="store_true", help="ask for replies without a thought")
    parser.add_argument("--fold", action="store_true", help="show of a thought only how long it is")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: the best token; default: the server's, or 1")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the most of one reply; default: as many as fit")
    parser.add_argument("--max-turns", type=int, default=16, metavar="N", help="replies to one message; default 16")
    parser.add_argument("--seed", type=int, metavar="N", help="decides the draws; default: every reply differs")
    parser.add_argument("--whole-input", action="store_true", help="piped input is one message")
    parser.add_argument("--model", metavar="NAME", help="the server's model (with a URL); default: its first")
    parser.add_argument("--api-key", metavar="KEY", help="for the server; default: YUNQUE_API_KEY or OPENAI_API_KEY")
    add_engine_options(parser)
    parser.set_defaults(run=run_chat, max_running=1)


def run_chat(args: argparse.Namespace) -> int:
    """Talk until the input ends. Piped input stops at the first error."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    is_local = not args.target.startswith(("http://", "https://"))
    if is_local:
        tune()
    if args.max_turns < 1:
        raise ConfigError(f"--max-turns is {args.max_turns}; it must be at least 1")
    from yunque.agents import ChatOptions, HttpChatClient, Toolset, load_tools
    from yunque.cli.chat_session import ChatSession, SessionSettings, tools_line
    from yunque.cli.chat_view import ChatView

    options = ChatOptions(
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        enable_thinking=False if args.no_think else None,
        session=uuid.uuid4().hex,
    )
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    view = ChatView(sys.stdout, sys.stderr, is_terminal=is_terminal)
    view.folds_thoughts = args.fold
    with ExitStack() as stack:
        tools = Toolset()
        if args.tools is not None:
            view.note(f"running {args.tools}")
            tools = Toolset(load_tools(args.tools))
            view.note(tools_line(tools))
        runner = stack.enter_context(asyncio.Runner())
        if is_local:
            client, name = _local(args, stack)
        else:
            client = HttpChatClient(args.target, _http_settings(args), model=args.model)
            name = runner.run(client.model())
        stack.callback(lambda: runner.run(client.close()))
        session = ChatSession(client, view, options, SessionSettings(args.max_turns, args.seed, args.system), tools)
        if is_terminal:
            view.note(f"{name}; /help lists the commands, Ctrl-D ends")
            _talk(session, view, _terminal(), runner)
        else:
            _read_out(session, _piped(args), runner)
    return 0


def _talk(session: ChatSession, view: ChatView, prompter: Prompter, runner: asyncio.Runner) -> None:
    """At a terminal, Ctrl-C stops the reply or the line, and errors are lines."""
    while not session.is_over:
        try:
            text = prompter.read()
        except KeyboardInterrupt:
            print()
            continue
        if text is None:
            print()
            return
        try:
            if text.strip():
                runner.run(session.take(text))
        except KeyboardInterrupt:
            view.stopped()
        except (YunqueError, OSError) as error:
            view.note(str(error))


def _read_out(session: ChatSession, prompter: Prompter, runner: asyncio.Runner) -> None:
    while not session.is_over and (text := prompter.read()) is not None:
        runner.run(session.take(text))


def _local(args: argparse.Namespace, stack: ExitStack) -> tuple[ChatClient, str]:
    from yunque.cli.local_chat import LocalChatClient

    if args.model is not None or args.api_key is not None:
        raise ConfigError("--model and --api-key are for servers; this is a checkpoint")
    engine, renderer = load_engine(args.target, args)
    stack.enter_context(engine)
    return LocalChatClient(engine, renderer), engine.info.model_name


def _http_settings(args: argparse.Namespace) -> Any:
    from yunque.protocol.clients import HttpSettings

    keys = (args.api_key, os.environ.get("YUNQUE_API_KEY"), os.environ.get("OPENAI_API_KEY"))
    return HttpSettings(api_key=next((key for key in keys if key), None), attempts=3)


def _terminal() -> Prompter:
    from yunque.cli.chat_input import History, TerminalInput, state_folder

    return TerminalInput(History(state_folder() / "chat_history"))


def _piped(args: argparse.Namespace) -> Prompter:
    from yunque.cli.chat_input import PipedInput

    return PipedInput(sys.stdin, is_whole=args.whole_input)

"""``yunque generate``: a completion, or the reply to a message, on standard output."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunque.cli.chat_formats import CHAT_FORMATS, chat_format_in
from yunque.cli.process import tune
from yunque.core.errors import ConfigError

if TYPE_CHECKING:
    from yunque.core.records import Message, ToolSpec
    from yunque.model.generate import Sampling
    from yunque.model.transformer import Transformer
    from yunque.text import Renderer, Tokenizer


def add_commands(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "generate",
        help="let a checkpoint write",
        description="Continue a prompt, or with --chat answer it as a user's message.",
        epilog='example:  yunque generate runs/quickstart/model "import os" --max-new-tokens 64\n'
        '          yunque generate runs/quickstart/model "What is 3 plus 4?" --chat --tools tools.json',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint folder, a snapshot, or a run's snapshots")
    parser.add_argument("prompt", help="text; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message, in the chat format")
    parser.add_argument("--tools", type=Path, metavar="FILE", help="JSON list of tools in OpenAI's shape")
    parser.add_argument(
        "--chat-format", choices=CHAT_FORMATS, help="how messages are written (with --chat); default: the checkpoint's"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message (with --chat)")
    parser.add_argument("--no-think", action="store_true", help="ask for a reply without reasoning (with --chat)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default): the best token")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides the draws; default %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as stored")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default %(default)s")
    parser.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    """Write to standard output as tokens come."""
    tune()
    from yunque.core.records import Message
    from yunque.model.generate import Sampling

    try:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not {error.encoding} at byte {error.start}") from error
    if not args.chat and (args.tools or args.system or args.no_think or args.chat_format):
        raise ConfigError(
            "--tools, --system, --no-think and --chat-format need --chat: a plain completion has no messages"
        )
    try:
        sampling = Sampling(args.temperature, args.top_p, args.max_new_tokens)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal cannot show
    tools = _read_tools(args.tools)
    writer = Writer.load(args.checkpoint, dtype=args.dtype, device=args.device, chat_format=args.chat_format)
    if args.chat:
        messages = [Message(role="system", content=args.system)] if args.system else []
        messages.append(Message(role="user", content=prompt))
        print(writer.reply(messages, tools, sampling, seed=args.seed, thinks=not args.no_think))
        return 0
    for number, piece in enumerate(writer.complete(prompt, sampling, seed=args.seed)):
        print(piece if number else prompt + piece, end="", flush=True)
    print()
    return 0


def _read_tools(path: Path | None) -> list[ToolSpec]:
    from yunque.core.files import read_json
    from yunque.core.records import ToolSpec

    if path is None:
        return []
    data = read_json(path)
    if not isinstance(data, list):
        raise ConfigError(f"{path}: expected a JSON list of tools, found {type(data).__name__}")
    return [ToolSpec.from_openai(tool) for tool in data]


@dataclass(frozen=True)
class Writer:
    """A model with its tokenizer, and the folder and format that its conversations are written by."""

    model: Transformer
    tokenizer: Tokenizer
    folder: Path
    chat_format: str | None

    @classmethod
    def load(
        cls, path: str | Path, *, dtype: str | None = None, device: str = "auto", chat_format: str | None = None
    ) -> Writer:
        """Load model and tokenizer from a checkpoint folder, a snapshot or a run's snapshots.

        ``chat_format`` stands in for the one of the folder's template. Raises ``CheckpointError`` or
        ``ConfigError`` when a part is missing.
        """
        import torch

        from yunque.ops.device import pick_device
        from yunque.text import Tokenizer
        from yunque.weights import find_checkpoint, load_model

        folder = find_checkpoint(path)
        wanted = None if dtype is None else getattr(torch, dtype)
        model = load_model(folder, dtype=wanted, device=pick_device(device)).eval().join_projections()
        return cls(model, Tokenizer.load(folder), folder, chat_format)

    @cached_property
    def renderer(self) -> Renderer:
        """Writes conversations; a template that is none of ours is taken for GLM-5's, with a warning."""
        from yunque.text import Renderer

        return Renderer(self.tokenizer, self.chat_format or chat_format_in(self.folder))

    def complete(self, prompt: str, sampling: Sampling, *, seed: int) -> Iterator[str]:
        """Text after ``prompt``, piece by piece; ends at an end token."""
        from yunque.text import IncrementalDecoder

        decoder = IncrementalDecoder(self.tokenizer)
        stops = frozenset(self.tokenizer.special.eos_ids)
        for token in self._tokens(self.tokenizer.encode(prompt), sampling, seed):
            if token in stops:
                break
            yield decoder.push(token)
        yield decoder.finish()

    def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampling: Sampling,
        *,
        seed: int = 0,
        thinks: bool = True,
    ) -> str:
        """The assistant's turn as people read it: thought, text, one line per tool call."""
        from yunque.text import TurnParser

        rendered = self.renderer.render(messages, tools, add_generation_prompt=True, enable_thinking=thinks)
        parser = TurnParser(self.tokenizer, tools, in_reasoning=rendered.opens_reasoning)
        for token in self._tokens(rendered.tokens, sampling, seed):
            parser.feed(token)
        turn = parser.finish()
        lines = [f"thinks: {turn.reasoning}"] if turn.reasoning else []
        lines += [turn.content] if turn.content else []
        for call in turn.tool_calls:
            lines.append(f"calls: {call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})")
        lines += [f"malformed: {failure}" for failure in turn.failures]
        return "\n".join(lines)

    def _tokens(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Iterator[int]:
        from dataclasses import replace

        import torch

        from yunque.core.seeds import Seeds
        from yunque.model.generate import generate

        stops = frozenset(self.tokenizer.special.eos_ids)
        generator = torch.Generator().manual_seed(Seeds(seed).stream("generate") % 2**63)
        try:
            yield from generate(self.model, prompt, replace(sampling, stop_ids=stops), generator)
        except ValueError as error:
            raise ConfigError(str(error)) from error

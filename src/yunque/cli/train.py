"""``yunque train`` and ``yunque quickstart``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunque.cli.process import make_console, tune
from yunque.cli.recipe_files import recipe_names, run_file

if TYPE_CHECKING:
    from rich.console import Console

    from yunque.train.results import RunSummary
    from yunque.train.settings import RunConfig

#: What ``--quick`` changes: the same stages, a few steps each.
QUICK_OVERRIDES = (
    "name=quickstart-quick",
    "stage.*.tokens=16_384",
    "stage.pretrain.schedule.warmup_tokens=4096",
    "stage.sft.schedule.warmup_tokens=4096",
    "tokenizer.max_bytes=500_000",
    "data.held_out_batches=1",
    "data.sources.tools.num_train=100",
)


def add_commands(commands: Any) -> None:
    """Register both commands."""
    train = commands.add_parser(
        "train",
        help="train a model as a run file says",
        description="Train a model as a run file says; an interrupted run goes on from its last snapshot.",
        epilog="example:  yunque train quickstart output=runs/mine stage.pretrain.tokens=400_000 --dry-run\n"
        f"recipes:  {', '.join(recipe_names())}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("run_file", metavar="RUN.toml", help="a run file, or the name of a recipe")
    train.add_argument("overrides", nargs="*", metavar="key.path=value", help="values to change, as TOML")
    train.add_argument("--dry-run", action="store_true", help="print the resolved run and its memory, then exit")
    train.set_defaults(run=run_train)
    quickstart = commands.add_parser(
        "quickstart",
        help="pre-train, adapt, fine-tune and use a small GLM-5 in minutes",
        description="The whole pipeline on two CPU cores: pre-train on text and code, adapt to sparse attention, "
        "fine-tune on tool calls, then write a completion and a tool call.",
        epilog="example:  yunque quickstart --quick",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    quickstart.add_argument("overrides", nargs="*", metavar="key.path=value", help="values to change, as TOML")
    quickstart.add_argument("--quick", action="store_true", help="the same stages, a few steps each")
    quickstart.set_defaults(run=run_quickstart)


def run_train(args: argparse.Namespace) -> int:
    """Run or, with ``--dry-run``, only show the run."""
    tune()
    from yunque.train.settings import load_run

    console = make_console()
    run = load_run(run_file(args.run_file), args.overrides)
    if args.dry_run:
        from yunque.train.plan import plan
        from yunque.train.plan_view import show_plan

        show_plan(plan(run), console)
        return 0
    _execute(run, console)
    console.print(f'next:  yunque generate {run.folder / "model"} "..."', highlight=False)
    return 0


def run_quickstart(args: argparse.Namespace) -> int:
    """Run the quickstart recipe, then let the model write."""
    tune()
    from yunque.train.settings import load_run

    console = make_console()
    overrides = [*(QUICK_OVERRIDES if args.quick else ()), *args.overrides]
    run = load_run(run_file("quickstart"), overrides)
    console.print(
        f"A small GLM-5 is trained in {len(run.stage)} stages in [bold]{run.folder}[/bold]. "
        "Stop with Ctrl-C at any moment; the same command goes on.",
        highlight=False,
    )
    summary = _execute(run, console)
    _show_writing(run.folder / summary.stages[-2:][0].snapshot, run.folder / "model", console)
    _show_next(run.folder, console)
    return 0


def _execute(run: RunConfig, console: Console) -> RunSummary:
    from yunque.train.run import execute

    summary = execute(run, console)
    summary.show(console)
    return summary


def _show_writing(base: Path, tuned: Path, console: Console) -> None:
    """A completion by the model before fine-tuning, a tool call by the one after."""
    from yunque.cli.generate import Writer
    from yunque.core.records import Message, ToolSpec
    from yunque.data.tool_chats import ToolChatSource, tool_chats
    from yunque.model.generate import Sampling

    prompt = "    def close(self):\n"
    console.rule("a completion, by the model before fine-tuning")
    console.print(prompt, style="dim", end="", highlight=False, markup=False)
    sampling = Sampling(temperature=0.7, top_p=0.9, max_new_tokens=60)
    console.print("".join(Writer.load(base).complete(prompt, sampling, seed=0)), highlight=False, markup=False)
    console.rule("a tool call, to a question that was held out")
    writer = Writer.load(tuned)
    rows = tool_chats(ToolChatSource(), "held_out")
    row = next(row for row in rows if "tool_calls" in row["messages"][1])
    question = Message.from_openai(row["messages"][0])
    tools = [ToolSpec.from_openai(tool) for tool in row["tools"]]
    console.print(f"user: {question.content}", style="dim", highlight=False, markup=False)
    turn = writer.reply([question], tools, Sampling(max_new_tokens=120))
    console.print(turn, highlight=False, markup=False)


def _show_next(folder: Path, console: Console) -> None:
    console.rule("what is where")
    for name, what in (
        ("model", "the model, loadable by transformers, vLLM and SGLang"),
        ("curves.png", "loss curves"),
        ("summary.json", "the table above as JSON"),
        ("run.toml", "the run, resolved"),
    ):
        console.print(f"{folder / name}  {what}", highlight=False)
    console.print(f'next:  .venv/bin/yunque generate {folder / "model"} "import os"', highlight=False)

"""What a stage shows while it runs."""

from __future__ import annotations

import io
import re

from rich.console import Console
from toy_training import ToyLoader, ToyModel, toy_loss, toy_state

from yunque.model.batch import PackedBatch
from yunque.model.objectives import LossOutput
from yunque.train.loop import fit
from yunque.train.progress import ProgressHook


def test_without_a_terminal_lines_come_at_the_interval_and_at_the_end() -> None:
    """Steps of 24 tokens and 3 s, a line every 9 s: after 3 of 10 steps 8 tokens/s and 21 s to go."""
    now = [0.0]

    def slow_loss(model: ToyModel, batch: PackedBatch) -> LossOutput:
        now[0] += 3.0
        return toy_loss(model, batch)

    out = io.StringIO()
    state = toy_state(clock=lambda: now[0])
    with ProgressHook(Console(file=out, width=200), "pretrain", steps=10, interval_s=9.0) as progress:
        fit(state, iter(ToyLoader()), slow_loss, steps=10, hooks=[progress])
    lines = [re.sub(r"loss \S+", "loss", line) for line in out.getvalue().splitlines()]
    assert lines == [
        "pretrain: step 3/10, loss  8 tokens/s  left 0:00:21",
        "pretrain: step 6/10, loss  8 tokens/s  left 0:00:12",
        "pretrain: step 9/10, loss  8 tokens/s  left 0:00:03",
        "pretrain: step 10/10, loss  8 tokens/s  left 0:00:00",
    ]


def test_on_a_terminal_a_bar_shows_steps_speed_and_time_left() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with ProgressHook(console, "sft", steps=3) as progress:
        fit(toy_state(), iter(ToyLoader()), toy_loss, steps=3, hooks=[progress])
    shown = out.getvalue()
    assert "sft" in shown
    assert "3/3" in shown
    assert "tokens/s" in shown
    assert "left" in shown

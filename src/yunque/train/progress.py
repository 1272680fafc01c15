"""The progress of a stage: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from yunque.train.state import TrainState
from yunque.train.step import StepReport

_WINDOW_STEPS = 30


class ProgressHook:
    """Shows steps, loss, tokens per second and the time left of one stage while its block runs.

    Speed is wall time over the last 30 steps, data and hooks included. Without a terminal a line is printed
    every ``interval_s`` seconds and after the last step.
    """

    def __init__(self, console: Console, title: str, *, steps: int, start: int = 0, interval_s: float = 10.0) -> None:
        self._console = console
        self._title = title
        self._steps = steps
        self._interval_s = interval_s
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW_STEPS + 1)
        self._printed_at_s: float | None = None
        self._bar = Progress(
            TextColumn("[bold]{task.description:<12}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            expand=True,
        )
        self._task = self._bar.add_task(title, total=steps, completed=start, status="")

    def __enter__(self) -> ProgressHook:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def after_step(self, state: TrainState, report: StepReport) -> None:
        now = state.clock()
        if not self._recent:
            self._recent.append((now - report.seconds, state.step - 1, report.tokens - report.step_tokens))
            self._printed_at_s = now - report.seconds
        self._recent.append((now, state.step, report.tokens))
        status = self._status(report)
        self._bar.update(self._task, completed=state.step, status=status)
        assert self._printed_at_s is not None
        is_last = state.step >= self._steps
        if not self._console.is_terminal and (is_last or now - self._printed_at_s >= self._interval_s):
            self._printed_at_s = now
            self._console.print(f"{self._title}: step {state.step:,}/{self._steps:,}, {status}", highlight=False)

    def _status(self, report: StepReport) -> str:
        (then, first_step, first_tokens), (now, step, tokens) = self._recent[0], self._recent[-1]
        elapsed = max(now - then, 1e-9)
        left_s = (self._steps - step) * elapsed / max(1, step - first_step)
        return (
            f"loss {report.loss:.3f}  {(tokens - first_tokens) / elapsed:,.0f} tokens/s  "
            f"left {timedelta(seconds=round(left_s))}"
        )

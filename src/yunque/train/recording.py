"""Hooks that write numbers down: every step's report, and held-out losses every so many tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from yunque.core.errors import ConfigError
from yunque.core.metrics import MetricSink
from yunque.train.cadence import is_due
from yunque.train.state import TrainState
from yunque.train.step import StepReport


class RecordHook:
    """Writes each step's report to every sink."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = sinks

    def after_step(self, state: TrainState, report: StepReport) -> None:
        for sink in self._sinks:
            sink.write(state.step, report.values())


class EvaluationHook:
    """Measures held-out losses every ``every_tokens`` and writes them to every sink.

    ``evaluate`` gives named losses, of which ``judge`` is the one that decides what is best; ``best`` is its
    lowest value so far, ``last`` the latest values with the step they belong to.
    """

    def __init__(
        self,
        evaluate: Callable[[], Mapping[str, float]],
        judge: str,
        *,
        every_tokens: int,
        sinks: Sequence[MetricSink],
    ) -> None:
        self._evaluate = evaluate
        self._judge = judge
        self._every_tokens = every_tokens
        self._sinks = sinks
        self.best: float | None = None
        self.last: tuple[int, Mapping[str, float]] | None = None

    def after_step(self, state: TrainState, report: StepReport) -> None:
        if is_due(report.tokens, report.step_tokens, self._every_tokens):
            self.measure(state.step)

    def measure(self, step: int) -> Mapping[str, float]:
        """Evaluate now and write the losses down under ``step``, unless that was done at this step
        already."""
        if self.last is not None and self.last[0] == step:
            return self.last[1]
        values = self._evaluate()
        for sink in self._sinks:
            if values:
                sink.write(step, values)
        self.last = (step, values)
        return values

    def metric_at(self, step: int) -> float | None:
        """The judged loss, if it was measured at exactly this step."""
        if self.last is None or self.last[0] != step:
            return None
        return self.last[1].get(self._judge)

    def improved_at(self, step: int) -> bool:
        """Whether this step's loss was measured and is the lowest so far; it then becomes ``best``."""
        metric = self.metric_at(step)
        if metric is None or (self.best is not None and metric >= self.best):
            return False
        self.best = metric
        return True


class TensorBoardSink:
    """Writes scalars for TensorBoard into ``folder``; steps after ``resumed_at`` from an earlier process are
    hidden."""

    def __init__(self, folder: Path, *, resumed_at: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "hooks.tensorboard needs the package tensorboard: pip install 'yunque[tensorboard]', or "
                "set it to false (metrics.jsonl has the same numbers)"
            ) from error
        self._writer: Any = SummaryWriter(str(folder), purge_step=resumed_at + 1 if resumed_at else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()

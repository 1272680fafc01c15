"""The hook that saves snapshots: by tokens, by time, on a new best, and when the run is asked to stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from yunque.core.errors import Interrupted
from yunque.train.cadence import is_due
from yunque.train.recording import EvaluationHook
from yunque.train.signals import StopRequest
from yunque.train.state import TrainState
from yunque.train.step import StepReport


class SnapshotHook:
    """Calls ``save``, which returns the snapshot's folder, when one is due.

    It stands after the evaluation hook. After a request to stop it saves and raises ``Interrupted``.
    """

    def __init__(
        self,
        save: Callable[[], Path],
        evaluation: EvaluationHook,
        stop: StopRequest,
        *,
        every_tokens: int,
        every_s: float,
        keeps_best: bool,
    ) -> None:
        self._save = save
        self._evaluation = evaluation
        self._stop = stop
        self._every_tokens = every_tokens
        self._every_s = every_s
        self._keeps_best = keeps_best
        self._saved_at_s: float | None = None

    def after_step(self, state: TrainState, report: StepReport) -> None:
        now = state.clock()
        if self._saved_at_s is None:
            self._saved_at_s = now - report.seconds
        is_best = self._evaluation.improved_at(state.step) and self._keeps_best
        by_time = 0 < self._every_s <= now - self._saved_at_s
        by_tokens = is_due(report.tokens, report.step_tokens, self._every_tokens)
        if not (is_best or by_time or by_tokens or self._stop.requested):
            return
        folder = self._save()
        self._saved_at_s = state.clock()
        if self._stop.requested:
            raise Interrupted(
                f"stopped by {self._stop.requested} after step {state.step:,}; saved {folder}; the "
                "same command goes on from there"
            )

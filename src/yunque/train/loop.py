"""The training loop: steps until there are enough, hooks after each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from yunque.core.errors import DataError
from yunque.model.batch import PackedBatch
from yunque.model.objectives import LossFn
from yunque.train.state import TrainState
from yunque.train.step import StepReport, train_step


class Hook(Protocol):
    """Something that happens after a step: reporting, evaluating, saving. It may stop the run by raising."""

    def after_step(self, state: TrainState, report: StepReport) -> None:
        """Called once after every step, in the order the hooks are given."""
        ...


def fit(
    state: TrainState, batches: Iterator[PackedBatch], loss: LossFn, *, steps: int, hooks: Sequence[Hook] = ()
) -> None:
    """Train until ``state.step == steps``. Hooks run in the order given."""
    while state.step < steps:
        report = train_step(state, take(batches, state.microbatches), loss)
        for hook in hooks:
            hook.after_step(state, report)


def take(batches: Iterator[PackedBatch], count: int) -> list[PackedBatch]:
    """The next ``count`` batches; raises ``DataError`` when the data ends first."""
    taken = list(islice(batches, count))
    if len(taken) < count:
        raise DataError(
            f"the data ended {count - len(taken)} batch(es) short of a step; let its sources be read more "
            "often (max_epochs) or lower the stage's tokens"
        )
    return taken

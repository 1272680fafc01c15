"""What training a stage consists of between two steps: the model, its optimiser and how far they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from yunque.model.transformer import Transformer
from yunque.train.optimizer import Optimizer
from yunque.train.schedule import Pace, Schedule, learning_rate


@dataclass(kw_only=True)
class TrainState:
    """The moving parts of one stage.

    ``total_tokens`` is the stage's budget, by which the learning rate is scheduled; ``step`` and ``tokens``
    say what is done. ``router_bias_rate`` is the step of the loss-free balancing rule (0: frozen).
    ``place(n)`` says where in the data the n-th latest microbatch came from, for error messages. ``clock``
    gives seconds.
    """

    model: Transformer
    optimizer: Optimizer
    schedule: Schedule
    pace: Pace
    total_tokens: int
    router_bias_rate: float = 0.0
    step: int = 0
    tokens: int = 0
    place: Callable[[int], str] = lambda _: "an unknown place"
    clock: Callable[[], float] = time.perf_counter

    @property
    def microbatches(self) -> int:
        """Microbatches of the next step."""
        return self.pace.microbatches_at(self.tokens)

    def lr_after(self, tokens: int) -> float:
        """The learning rate of a step that ends at ``tokens``."""
        return learning_rate(self.schedule, tokens, self.total_tokens)

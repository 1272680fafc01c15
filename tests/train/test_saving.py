"""Snapshots are taken by tokens, by time, on a new best and on request; a request ends the run after
saving."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from toy_training import ToyLoader, toy_loss, toy_state

from yunque.core.errors import Interrupted
from yunque.train.loop import fit
from yunque.train.recording import EvaluationHook
from yunque.train.saving import SnapshotHook
from yunque.train.signals import StopRequest


def _saved_steps(
    *,
    steps: int,
    losses: list[float] | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    **cadence: float,
) -> list[tuple[int, float | None]]:
    """(step, metric) of every snapshot of a run of 24 tokens a step that is evaluated every second step."""
    saved: list[tuple[int, float | None]] = []
    values = iter(losses or [])
    evaluation = EvaluationHook(lambda: {"loss": next(values)}, "loss", every_tokens=48 if losses else 0, sinks=[])
    state = toy_state(clock=clock)

    def save() -> Path:
        saved.append((state.step, evaluation.metric_at(state.step)))
        return Path(f"step-{state.step}")

    settings = {"every_tokens": 0, "every_s": 0.0} | cadence
    hook = SnapshotHook(save, evaluation, StopRequest(), keeps_best=True, **settings)
    fit(state, iter(ToyLoader()), toy_loss, steps=steps, hooks=[evaluation, hook])
    return saved


def test_by_tokens() -> None:
    assert _saved_steps(steps=6, every_tokens=72) == [(3, None), (6, None)]


def test_by_time() -> None:
    """A clock that moves 1 s at every look; a step looks five times, so that 10 s have passed after three
    steps."""
    now = iter(range(1000))
    steps = [step for step, _ in _saved_steps(steps=9, every_s=10.0, clock=lambda: float(next(now)))]
    gaps = [after - before for before, after in zip([0, *steps], steps, strict=False)]
    assert len(steps) >= 2
    assert all(2 <= gap <= 4 for gap in gaps)


def test_a_new_best_is_saved_with_its_metric_and_a_worse_one_is_not() -> None:
    assert _saved_steps(steps=8, losses=[3.0, 2.0, 2.5, 1.0]) == [(2, 3.0), (4, 2.0), (8, 1.0)]


def test_a_request_to_stop_saves_and_says_where_and_how_to_go_on() -> None:
    stop, saved = StopRequest(), []
    state = toy_state()
    evaluation = EvaluationHook(dict, "loss", every_tokens=0, sinks=[])

    class AskToStop:
        def after_step(self, state, report) -> None:  # noqa: ARG002
            if state.step == 2:
                stop.requested = "SIGINT"

    def save() -> Path:
        saved.append(state.step)
        return Path("somewhere/step-2")

    hook = SnapshotHook(save, evaluation, stop, every_tokens=0, every_s=0.0, keeps_best=True)
    with pytest.raises(Interrupted, match=r"SIGINT after step 2; saved somewhere/step-2; .* goes on from there"):
        fit(state, iter(ToyLoader()), toy_loss, steps=9, hooks=[AskToStop(), hook])
    assert saved == [2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_becomes_a_request_and_handlers_come_back(number: signal.Signals) -> None:
    before, lines, stop = signal.getsignal(number), [], StopRequest()
    with stop.listening(lines.append):
        os.kill(os.getpid(), number)
        assert stop.requested == number.name
        assert signal.getsignal(number) is signal.SIG_DFL
    assert signal.getsignal(number) is before
    assert lines == ["stopping after this step and saving; once more to stop at once"]


def test_a_second_signal_ends_the_process_at_once() -> None:
    program = (
        "import os, signal, time\n"
        "from yunque.train.signals import StopRequest\n"
        "with StopRequest().listening(print):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == -signal.SIGINT

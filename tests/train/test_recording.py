"""Metrics and evaluations are written where they are due, and the same whether a run was interrupted or
not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from toy_training import ToyLoader, toy_loss, toy_state

from yunque.core.metrics import JsonlSink, read_jsonl
from yunque.train.cadence import is_due
from yunque.train.loop import fit
from yunque.train.recording import EvaluationHook, RecordHook, TensorBoardSink


def test_due_once_for_every_multiple_crossed_whatever_the_step_size() -> None:
    """Steps of 30 tokens, every 100: due at 120, 210 and 300."""
    assert [t for t in range(30, 331, 30) if is_due(t, 30, 100)] == [120, 210, 300]
    assert not is_due(100, 100, 0)


def test_every_step_leaves_one_line_with_its_report(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    state = toy_state()
    fit(state, iter(ToyLoader()), toy_loss, steps=3, hooks=[RecordHook([sink])])
    sink.close()
    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["tokens"] for row in rows] == [24, 48, 72]
    assert all(row["loss"] == pytest.approx(row["objective"], rel=1e-6) for row in rows)
    assert {"lr", "grad_norm", "tokens_per_s", "seconds", "expert_imbalance"} <= rows[0].keys()


def test_evaluation_happens_at_its_cadence_and_knows_the_best(tmp_path: Path) -> None:
    """Every 48 tokens = every second step; losses 3, 2, 4: the second is the best."""
    losses = iter([3.0, 2.0, 4.0])

    def evaluate() -> Mapping[str, float]:
        return {"heldout_dense": next(losses)}

    sink = JsonlSink(tmp_path / "metrics.jsonl")
    hook = EvaluationHook(evaluate, "heldout_dense", every_tokens=48, sinks=[sink])
    improved = []

    class Ask:
        def after_step(self, state, report) -> None:  # noqa: ARG002
            improved.append((state.step, hook.metric_at(state.step), hook.improved_at(state.step)))

    fit(toy_state(), iter(ToyLoader()), toy_loss, steps=6, hooks=[hook, Ask()])
    sink.close()
    assert [(row["step"], row["heldout_dense"]) for row in read_jsonl(tmp_path / "metrics.jsonl")] == [
        (2, 3.0), (4, 2.0), (6, 4.0)
    ]  # fmt: skip
    assert improved == [
        (1, None, False), (2, 3.0, True), (3, None, False), (4, 2.0, True), (5, None, False), (6, 4.0, False)
    ]  # fmt: skip
    assert hook.best == 2.0


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    state = toy_state()
    fit(state, iter(ToyLoader()), toy_loss, steps=2, hooks=[RecordHook([sink])])
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2]
    assert [event.value for event in events.Scalars("tokens")] == [24.0, 48.0]

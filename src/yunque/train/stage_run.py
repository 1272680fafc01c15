"""One stage of a run, from where it stands to its record: measured, trained, saved."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from yunque.core.config import to_toml
from yunque.core.errors import Interrupted
from yunque.core.files import sha256_file
from yunque.core.logging import get_logger
from yunque.core.metrics import JsonlSink, MetricSink
from yunque.ops.device import peak_memory_bytes
from yunque.train.loop import fit
from yunque.train.losses import compared_attentions, held_out_losses, segments, stage_loss
from yunque.train.progress import ProgressHook
from yunque.train.recording import EvaluationHook, RecordHook, TensorBoardSink
from yunque.train.results import StageResult
from yunque.train.saving import SnapshotHook
from yunque.train.stage_build import Progress, StageParts, build_stage, check_start
from yunque.train.stages import Attention
from yunque.train.state import TrainState
from yunque.train.step import StepReport
from yunque.train.workshop import Workshop
from yunque.weights.checkpoint import MANIFEST
from yunque.weights.snapshots import SnapshotParts

RECORD = "stage.json"
METRICS = "metrics.jsonl"

#: Weight of the newest step in the running mean that ``last_loss`` is: about the last ten steps count.
_NEWEST = 0.1

_log = get_logger(__name__)


def run_stage(shop: Workshop, index: int, previous: StageResult | None) -> StageResult:
    """Train stage ``index`` to its end; a finished one is only read.

    ``previous`` is the record of the stage before. Raises ``ConfigError`` where the folder holds the stage
    with other settings or starting weights, and ``Interrupted``, after saving, when the run is asked to stop.
    """
    record = shop.stage_folder(index) / RECORD
    if record.exists():
        result = StageResult.read(record)
        shop.check_same(index, result.settings)
        check_start(record.parent, result.started_from, previous)
        return result
    parts = build_stage(shop, index, previous)
    if parts.is_resumed:
        _tell_resumption(shop, parts)
    snapshot, after = _train_and_measure(shop, index, parts)
    progress = parts.progress
    result = StageResult(
        title=parts.stage.title,
        kind=parts.stage.kind_name,
        steps=parts.state.step,
        tokens=parts.state.tokens,
        seconds=progress.seconds,
        first_loss=progress.first_loss,
        last_loss=progress.last_loss,
        before=progress.before or {},
        after=after,
        peak_memory_bytes=peak_memory_bytes(shop.device),
        threads=torch.get_num_threads(),
        snapshot=str(snapshot.relative_to(shop.folder)),
        fingerprint=sha256_file(snapshot / MANIFEST),
        started_from=progress.started_from,
        settings=shop.settings(index),
    )
    result.write(record)
    if shop.stop.requested and index + 1 < len(shop.run.stage):
        raise Interrupted(
            f"stopped by {shop.stop.requested} after stage {result.title!r}; the same command goes on from there"
        )
    return result


def _tell_resumption(shop: Workshop, parts: StageParts) -> None:
    title = parts.stage.title
    shop.console.print(f"{title}: going on after step {parts.state.step:,} of {parts.stage.steps:,}", highlight=False)
    if parts.progress.threads != torch.get_num_threads():
        _log.warning(
            "%s was trained with %d threads before, with %d now: the result will not be equal to the bit",
            *(title, parts.progress.threads, torch.get_num_threads()),
        )


def _train_and_measure(shop: Workshop, index: int, parts: StageParts) -> tuple[Path, dict[str, float]]:
    """Train to the last step; the final snapshot and the held-out losses it has."""
    state, progress, hooks = parts.state, parts.progress, shop.run.hooks
    attentions = compared_attentions(parts.stage)
    with contextlib.ExitStack() as stack:
        sinks = _sinks(shop, index, parts, stack)
        evaluation = EvaluationHook(
            lambda: _held_out(parts, attentions),
            f"heldout_{attentions[-1]}",
            every_tokens=hooks.evaluate_every_tokens,
            sinks=sinks,
        )
        evaluation.best = progress.best
        if progress.measured is not None:
            evaluation.last = (progress.measured_at, progress.measured)
        stack.enter_context(shop.stop.listening(lambda line: shop.console.print(line)))
        if progress.before is None:
            progress.before = dict(evaluation.measure(0))
        snapshots = SnapshotHook(
            lambda: _save(shop, index, parts, evaluation),
            evaluation,
            shop.stop,
            every_tokens=hooks.snapshot_every_tokens,
            every_s=hooks.snapshot_every_s,
            keeps_best=hooks.keep_best > 0,
        )
        bar = ProgressHook(shop.console, parts.stage.title, steps=parts.stage.steps, start=state.step)
        with bar:
            for segment in segments(parts.stage):
                state.router_bias_rate = segment.weights.router_bias_rate
                every_step = (_Tally(progress), RecordHook(sinks), evaluation, bar, snapshots)
                loss = stage_loss(parts.stage, segment.weights)
                fit(state, parts.feed, loss, steps=segment.end_step, hooks=every_step)
        after = dict(evaluation.measure(state.step))
        evaluation.improved_at(state.step)
        return _save(shop, index, parts, evaluation), after


def _held_out(parts: StageParts, attentions: tuple[Attention, ...]) -> dict[str, float]:
    if not parts.held_out:
        return {}
    return held_out_losses(parts.state.model, parts.held_out, attentions, chunk_tokens=parts.stage.loss_chunk)


class _Tally:
    """Keeps the stage's own figures up to date."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def after_step(self, state: TrainState, report: StepReport) -> None:
        self._progress.step, self._progress.tokens = state.step, state.tokens
        self._progress.seconds += report.seconds
        if self._progress.first_loss is None or self._progress.last_loss is None:
            self._progress.first_loss = self._progress.last_loss = report.loss
        self._progress.last_loss += _NEWEST * (report.loss - self._progress.last_loss)


def _sinks(shop: Workshop, index: int, parts: StageParts, stack: contextlib.ExitStack) -> Sequence[MetricSink]:
    """Where the stage's numbers go; what an earlier process wrote after the snapshot is forgotten."""
    folder = shop.stage_folder(index)
    jsonl = JsonlSink(folder / METRICS)
    stack.callback(jsonl.close)
    jsonl.truncate_after(parts.state.step if parts.is_resumed else -1)
    if not shop.run.hooks.tensorboard:
        return (jsonl,)
    board = TensorBoardSink(shop.folder / "tensorboard" / folder.name, resumed_at=parts.state.step)
    stack.callback(board.close)
    return jsonl, board


def _save(shop: Workshop, index: int, parts: StageParts, evaluation: EvaluationHook) -> Path:
    """A snapshot of this moment, with the held-out loss as its metric if that was measured at this very
    step."""
    progress, state = parts.progress, parts.state
    progress.loader, progress.best = parts.loader.state(), evaluation.best
    if evaluation.last is not None:
        progress.measured_at, progress.measured = evaluation.last[0], dict(evaluation.last[1])
    progress.threads, progress.settings = torch.get_num_threads(), shop.settings(index)
    content = SnapshotParts(
        config=parts.config,
        model=state.model.state_dict(),
        optimizer=state.optimizer.state(),
        progress=progress.to_tree(),
        run_toml=to_toml(shop.run),
        files=shop.text.files,
    )
    return parts.store.save(state.step, content, metric=evaluation.metric_at(state.step))

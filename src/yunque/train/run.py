"""A whole run: every stage in order, finished ones skipped, the last one's model written out, a summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from yunque.core.config import to_toml
from yunque.core.errors import ConfigError
from yunque.core.files import claimed, write_atomic
from yunque.core.logging import get_logger
from yunque.ops.device import pick_device
from yunque.train.curves import StageCurve, draw_curves
from yunque.train.inputs import missing_inputs
from yunque.train.results import RunSummary, StageResult
from yunque.train.settings import RunConfig
from yunque.train.signals import StopRequest
from yunque.train.stage_run import METRICS, run_stage
from yunque.train.vocabulary import prepare_text
from yunque.train.workshop import Workshop
from yunque.weights.models import convert

RUN_FILE = "run.toml"
SUMMARY = "summary.json"
CURVES = "curves.png"
MODEL = "model"

_log = get_logger(__name__)


def execute(
    run: RunConfig,
    console: Console,
    *,
    stop: StopRequest | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> RunSummary:
    """Train all stages of ``run`` in its folder, going on where an earlier process left off.

    Leaves ``run.toml``, a folder per stage (metrics, snapshots, record), ``curves.png``, ``summary.json`` and
    the final model as a checkpoint folder. Raises ``Interrupted`` after saving when the run is asked to stop,
    and ``ConfigError``, before anything is made, for a new run that reads from a path which does not exist.
    """
    if run.threads:
        torch.set_num_threads(run.threads)
    device = pick_device(run.device)
    folder = run.folder
    if not (folder / RUN_FILE).exists() and (missing := missing_inputs(run)):
        raise ConfigError(f"the run cannot begin without what it reads; not there: {', '.join(missing)}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with claimed(folder / ".lock"):
            return _execute(run, console, device, stop or StopRequest(), clock)
    except BlockingIOError as error:
        raise ConfigError(f"another process trains in {folder}; wait for it, or choose another output") from error


def _execute(
    run: RunConfig, console: Console, device: torch.device, stop: StopRequest, clock: Callable[[], float]
) -> RunSummary:
    folder = run.folder
    write_atomic(folder / RUN_FILE, to_toml(run))
    text = prepare_text(run.tokenizer, run.data, folder / "tokenizer")
    shop = Workshop(run=run, text=text, device=device, console=console, stop=stop, clock=clock)
    results: list[StageResult] = []
    try:
        for index in range(len(run.stage)):
            results.append(run_stage(shop, index, results[-1] if results else None))
    except BaseException:
        _try_to_draw(shop)
        raise
    summary = RunSummary(name=run.name, stages=tuple(results), model=str(_export(shop, results[-1])))
    summary.write(folder / SUMMARY)
    _draw(shop)
    return summary


def _export(shop: Workshop, last: StageResult) -> Path:
    """The final model as a folder that Hugging Face, vLLM and SGLang load; made from the last stage's
    snapshot."""
    return convert(shop.folder / last.snapshot, shop.folder / MODEL, overwrite=True)


def _try_to_draw(shop: Workshop) -> None:
    """Draw while an error is under way, which no failure of the picture may hide."""
    try:
        _draw(shop)
    except Exception as error:  # noqa: BLE001  (whatever it is, the error under way is the one to tell)
        _log.warning("%s was not drawn: %s", shop.folder / CURVES, error)


def _draw(shop: Workshop) -> None:
    """Draw the curves of all stages that have begun."""
    curves, before = [], 0
    for index, stage in enumerate(shop.run.stage):
        metrics = shop.stage_folder(index) / METRICS
        if metrics.exists():
            curves.append(StageCurve(stage.title, metrics, before))
        before += stage.tokens
    if curves:
        draw_curves(curves, shop.folder / CURVES)

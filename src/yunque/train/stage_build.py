"""The working parts of one stage: model, data, optimiser, new or as the latest snapshot has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from yunque.core.errors import CheckpointError, ConfigError, DataError
from yunque.core.logging import get_logger
from yunque.core.seeds import Seeds
from yunque.data.loader import Loader, build_held_out, build_loader
from yunque.model.batch import PackedBatch
from yunque.model.config import ModelConfig
from yunque.model.init import init_weights
from yunque.model.names import module_specs
from yunque.model.transformer import Transformer
from yunque.train.feed import Feed
from yunque.train.optimizer import Optimizer
from yunque.train.results import StageResult
from yunque.train.roles import assign
from yunque.train.stages import Stage
from yunque.train.state import TrainState
from yunque.train.workshop import Workshop
from yunque.weights.load import load_tensors
from yunque.weights.models import open_any
from yunque.weights.snapshots import SnapshotState, SnapshotStore, load_snapshot

_log = get_logger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(kw_only=True)
class Progress:
    """Where a stage stands, as a snapshot stores it beside weights and optimiser.

    ``seconds`` of training, the first training loss, a running mean of the latest ones and the held-out losses
    ``before`` belong to the stage's record; ``best`` is the lowest held-out loss so far, ``measured`` the latest
    losses, of step ``measured_at``; ``started_from`` is the fingerprint of the snapshot that the stage began with.
    """

    step: int = 0
    tokens: int = 0
    loader: Any = None
    best: float | None = None
    measured_at: int = -1
    measured: dict[str, float] | None = None
    seconds: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    before: dict[str, float] | None = None
    threads: int = 0
    settings: dict[str, Any] | None = None
    started_from: str = ""

    def to_tree(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: Any) -> Progress:
        """Raises ``CheckpointError`` for what another program saved."""
        names = {field.name for field in fields(cls)}
        if not isinstance(tree, dict) or set(tree) != names:
            raise CheckpointError("the snapshot was not saved by a stage of a training run")
        return cls(**tree)


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """Everything that a stage in training consists of."""

    stage: Stage
    config: ModelConfig
    store: SnapshotStore
    loader: Loader
    feed: Feed
    held_out: Sequence[PackedBatch]
    state: TrainState
    progress: Progress
    is_resumed: bool


def build_stage(shop: Workshop, index: int, previous: StageResult | None) -> StageParts:
    """Stage ``index``, at its beginning or where its latest snapshot left it.

    Weights come from that snapshot, else from the previous stage, else from ``start_from``, else from a
    random draw. Raises ``ConfigError`` when the snapshot was made with other settings.
    """
    stage, config = shop.run.stage[index], shop.model_config(index)
    hooks, seeds = shop.run.hooks, Seeds(shop.run.seed)
    store = SnapshotStore(shop.stage_folder(index) / "snapshots", keep_last=hooks.keep_last, keep_best=hooks.keep_best)
    model = Transformer(config).to(DTYPES[shop.run.dtype]).to(shop.device)
    snapshot = _load_weights(shop, previous, store, model)
    loader, held_out = _data(shop, index, Seeds(seeds.stream("data", index)))
    feed = Feed(loader, shop.device, remember=stage.microbatches)
    settings = shop.run.optimizer_at(index)
    assignments = assign(module_specs(config), settings, config, stage.trainable)
    state = TrainState(
        model=model,
        optimizer=Optimizer(model, assignments, settings),
        schedule=stage.schedule,
        pace=stage.pace,
        total_tokens=stage.tokens,
        place=feed.place,
        clock=shop.clock,
    )
    progress = Progress(started_from=fingerprint(previous))
    if snapshot is not None:
        progress = Progress.from_tree(snapshot.progress)
        shop.check_same(index, progress.settings or {})
        check_start(store.folder.parent, progress.started_from, previous)
        state.optimizer.restore(snapshot.optimizer)
        state.step, state.tokens = progress.step, progress.tokens
        loader.restore(progress.loader)
    elif previous is not None and stage.optimizer_state == "carry":
        earlier = load_snapshot(shop.folder / previous.snapshot, model=model.state_dict()).optimizer
        _log.info("%s: %d parameters keep their optimiser state", stage.title, state.optimizer.carry(earlier))
    return StageParts(
        stage=stage,
        config=config,
        store=store,
        loader=loader,
        feed=feed,
        held_out=held_out,
        state=state,
        progress=progress,
        is_resumed=snapshot is not None,
    )


def fingerprint(previous: StageResult | None) -> str:
    """What identifies the weights that the stage after ``previous`` begins with."""
    return previous.fingerprint if previous is not None else ""


def check_start(folder: Path, started_from: str, previous: StageResult | None) -> None:
    """Raise ``ConfigError`` when the stage in ``folder`` began with other weights than ``previous`` has."""
    if started_from != fingerprint(previous):
        raise ConfigError(
            f"{folder} was trained from other weights than the stage before has now; delete it to train it anew"
        )


def _load_weights(
    shop: Workshop, previous: StageResult | None, store: SnapshotStore, model: Transformer
) -> SnapshotState | None:
    """Fill ``model``; the snapshot it came from, where it is one of this very stage."""
    target = model.state_dict()
    latest: Path | None = store.latest()
    if latest is not None:
        return load_snapshot(latest, model=target)
    if previous is not None:
        load_snapshot(shop.folder / previous.snapshot, model=target)
    elif shop.run.start_from:
        load_tensors(open_any(shop.run.start_from), target)
    else:
        init_weights(model, torch.Generator().manual_seed(Seeds(shop.run.seed).stream("init")))
    return None


def _data(shop: Workshop, index: int, seeds: Seeds) -> tuple[Loader, list[PackedBatch]]:
    """The stage's training batches and its held-out ones, which are few and stay in memory."""
    data = shop.run.data.for_stage(shop.run.stage[index])
    places = {"cache": shop.cache, "renderer": shop.text.renderer}
    loader = build_loader(data, shop.text.tokenizer, seeds, **places)
    if not (data.held_out_share and data.held_out_batches):
        return loader, []
    held_out = [batch.to(shop.device) for batch in build_held_out(data, shop.text.tokenizer, **places)]
    if not any(float(batch.loss_mask_T.sum()) for batch in held_out):
        raise DataError(
            f"stage {shop.run.stage[index].title!r}: no token of the held-out batches counts in the loss; "
            f"sequence_length {data.packing.sequence_length} may cut off everything that is to be learned"
        )
    return loader, held_out

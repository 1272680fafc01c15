"""From configured sources to packed batches, resumable at every batch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from yunque.core.checks import at_least, share_below_one
from yunque.core.errors import ConfigError, DataError, unknown
from yunque.core.logging import get_logger
from yunque.core.seeds import Seeds
from yunque.data.documents import Split, TokenDocument
from yunque.data.mixture import Mixture, MixtureConfig, Phase
from yunque.data.packing import Packer, PackingConfig, PackReport, Piece
from yunque.data.sources import AnySource, SourceOpener
from yunque.data.store import TokenStore
from yunque.model.batch import NO_TARGET, PackedBatch
from yunque.text.render import Renderer
from yunque.text.tokenizer import Tokenizer

_log = get_logger(__name__)


@dataclass(frozen=True)
class DataConfig:
    """The ``[data]`` table of a run.

    ``held_out_share`` of each source (by file, or by content where a file holds many documents) is never
    trained on; ``held_out_batches`` batches of it at most make the held-out set.
    """

    packing: PackingConfig
    sources: dict[str, AnySource]
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    held_out_share: float = 0.05
    held_out_batches: int = 16

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("sources is empty; the simplest is sources.python = {kind = 'builtin'}")
        share_below_one(held_out_share=self.held_out_share)
        at_least(0, held_out_batches=self.held_out_batches)
        for phase in self.mixture.phases:
            for name in phase.weights:
                if name not in self.sources:
                    raise ConfigError(unknown("source", name, self.sources, where="mixture.phases"))


class Loader:
    """An iterator of batches, each of exactly ``tokens_per_batch`` rows but, where the data ends, the last.

    ``state`` after any batch, given to ``restore`` of a loader made from the same settings, makes that one
    yield exactly the batches this one goes on to yield.
    """

    def __init__(
        self, stores: Mapping[str, TokenStore], mixture: Mixture, packing: PackingConfig, *, pad_id: int
    ) -> None:
        self._stores = stores
        self._mixture = mixture
        self._packer = Packer(packing, mixture.draw)
        self._pad_id = pad_id
        self.last_pieces: tuple[Piece, ...] = ()

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        packed = self._packer.next_batch()
        if packed is None:
            raise StopIteration
        pieces, padding = packed
        self.last_pieces = tuple(pieces)
        documents = [self._stores[p.source].read(p.document, p.start, p.stop) for p in pieces]
        return assemble(documents, padding=padding, pad_id=self._pad_id)

    @property
    def report(self) -> PackReport:
        """What has been packed so far, runs before a restore included."""
        return self._packer.report

    @property
    def epochs(self) -> dict[str, float]:
        """How often each source has been drawn from end to end."""
        return self._mixture.epochs

    def state(self) -> dict[str, Any]:
        """Where the loader stands: a small JSON-able mapping of positions."""
        digests = {name: store.digest for name, store in self._stores.items()}
        return {"stores": digests, "mixture": self._mixture.state(), "packer": self._packer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken. Raises DataError where the data is not what it was then."""
        for name, store in self._stores.items():
            if name in state["stores"] and state["stores"][name] != store.digest:
                raise DataError(f"source {name!r} does not hold the documents it held when the state was saved")
        self._mixture.restore(state["mixture"])
        self._packer.restore(state["packer"])


@dataclass(frozen=True)
class HeldOut:
    """The held-out batches: a finite set, the same at every iteration and for every seed of the run."""

    stores: Mapping[str, TokenStore]
    mixture: MixtureConfig
    packing: PackingConfig
    num_batches: int
    pad_id: int

    def __iter__(self) -> Iterator[PackedBatch]:
        once = dict.fromkeys(self.stores, 1)
        mixture = Mixture(self.mixture, self.stores, Seeds(0), max_epochs=once)
        loader = Loader(self.stores, mixture, self.packing, pad_id=self.pad_id)
        for _, batch in zip(range(self.num_batches), loader, strict=False):
            yield batch


def build_loader(
    config: DataConfig, tokenizer: Tokenizer, seeds: Seeds, *, cache: Path, renderer: Renderer | None = None
) -> Loader:
    """The loader of the training split, at its beginning. ``cache`` keeps what was tokenised.

    Sources of conversations need ``renderer``. Raises DataError where a source has nothing to train on.
    """
    stores = _open_all(config, "train", tokenizer, cache, renderer)
    for name, store in stores.items():
        if store.num_documents == 0:
            raise DataError(f"source {name!r} has nothing to train on: {store.report}")
        _warn_of_truncation(name, store, config.packing.sequence_length)
    max_epochs = {name: source.max_epochs for name, source in config.sources.items()}
    phases = tuple(_phase_of(phase, stores, "train") for phase in config.mixture.phases)
    mixture = Mixture(replace(config.mixture, phases=phases), stores, seeds, max_epochs=max_epochs)
    return Loader(stores, mixture, config.packing, pad_id=tokenizer.special.pad_id)


def build_held_out(
    config: DataConfig, tokenizer: Tokenizer, *, cache: Path, renderer: Renderer | None = None
) -> HeldOut:
    """The held-out batches, mixed by the weights of the last phase. Raises DataError where there are none."""
    stores = _open_all(config, "held_out", tokenizer, cache, renderer)
    if not any(store.num_documents for store in stores.values()):
        raise DataError(
            f"no source has held-out documents: raise held_out_share ({config.held_out_share}) or give one "
            "with split = 'held_out'"
        )
    phase = _phase_of(replace(config.mixture.phases[-1], until_tokens=0), stores, "held_out")
    return HeldOut(stores, MixtureConfig((phase,)), config.packing, config.held_out_batches, tokenizer.special.pad_id)


def assemble(documents: Sequence[TokenDocument], *, padding: int = 0, pad_id: int = 0) -> PackedBatch:
    """Documents end to end, then ``padding`` rows, each a document of one token with nothing to predict.

    Equal to ``PackedBatch.from_documents`` of the same documents, without going through lists.
    """
    lengths = [len(document.tokens) for document in documents] + [1] * padding
    ends = np.cumsum(lengths)
    tokens = np.concatenate([*(d.tokens for d in documents), np.full(padding, pad_id, dtype=np.int64)])
    targets = np.append(tokens[1:], NO_TARGET)
    targets[ends - 1] = NO_TARGET
    masks = [np.ones(len(d.tokens), dtype=np.uint8) if d.mask is None else d.mask for d in documents]
    weights = np.append(np.concatenate([*masks, np.zeros(padding)])[1:], 0)
    weights[ends - 1] = 0
    return PackedBatch(
        tokens_T=torch.from_numpy(tokens),
        targets_T=torch.from_numpy(targets),
        loss_mask_T=torch.from_numpy(weights.astype(np.float32)),
        document_start_T=torch.from_numpy(np.repeat(ends - lengths, lengths)),
    )


def _open_all(
    config: DataConfig, split: Split, tokenizer: Tokenizer, cache: Path, renderer: Renderer | None
) -> dict[str, TokenStore]:
    opener = SourceOpener(tokenizer, cache, config.held_out_share, renderer)
    return {
        name: opener.open(name, source, split)
        for name, source in config.sources.items()
        if source.split in ("auto", split)
    }


def _phase_of(phase: Phase, stores: Mapping[str, TokenStore], split: Split) -> Phase:
    """The phase with the weights of the sources that this split has."""
    weights = {name: weight for name, weight in phase.weights.items() if name in stores}
    if phase.weights and not any(weights.values()):
        raise ConfigError(f"weights {phase.weights}: none of these sources has a {split} split")
    return replace(phase, weights=weights)


def _warn_of_truncation(name: str, store: TokenStore, sequence_length: int) -> None:
    if not store.whole:
        return
    too_long = np.flatnonzero(np.diff(store.offsets) > sequence_length).tolist()
    kept = (store.read(document, 0, sequence_length).mask for document in too_long)
    num_unlearned = sum(mask is not None and not mask.any() for mask in kept)
    if too_long:
        _log.warning(
            "%s: %d of %d conversations have more than sequence_length %d tokens and lose their ends; "
            "of %d nothing that is learned remains",
            *(name, len(too_long), store.num_documents, sequence_length, num_unlearned),
        )

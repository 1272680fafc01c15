"""Which source the next document comes from: weighted by tokens, in phases, the same at every run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from yunque.core.checks import at_least
from yunque.core.errors import ConfigError, DataError, unknown
from yunque.core.seeds import Seeds
from yunque.data.packing import Piece


@dataclass(frozen=True)
class Phase:
    """The share of each source, in tokens, until ``until_tokens`` have been drawn in all; 0 means to the end.

    Weights are relative; a source that is not named is not read. No weights at all: each source by its size.
    """

    weights: dict[str, float] = field(default_factory=dict)
    until_tokens: int = 0

    def __post_init__(self) -> None:
        at_least(0, **{f"weights.{name}": weight for name, weight in self.weights.items()})
        if self.weights and not any(self.weights.values()):
            raise ConfigError("all weights are 0: nothing would be read")


@dataclass(frozen=True)
class MixtureConfig:
    """``phases`` in their order; the last may end the data with its ``until_tokens``.

    When a source has been read ``max_epochs`` times, "drop" leaves its share to the others and ends when all
    are read, "stop" ends the data at once.
    """

    phases: tuple[Phase, ...] = (Phase(),)
    on_exhausted: Literal["drop", "stop"] = "drop"

    def __post_init__(self) -> None:
        if not self.phases:
            raise ConfigError("phases is empty; leave it out to read each source by its size")
        ends = [phase.until_tokens for phase in self.phases]
        bounds = ends if ends[-1] else ends[:-1]
        if any(after <= before for before, after in zip([0, *bounds], bounds, strict=False)):
            raise ConfigError(f"until_tokens {ends} must rise from phase to phase; only the last may be 0 (no end)")


class Source(Protocol):
    """What a mixture needs to know of a token store."""

    @property
    def num_documents(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def whole(self) -> bool: ...
    def length(self, document: int) -> int: ...


@dataclass
class _Reading:
    """How far a source has been read: its epoch, the position in that epoch's order, tokens in this phase."""

    epoch: int = 0
    position: int = 0
    phase_tokens: int = 0


class Mixture:
    """Draws documents one at a time, from the source that lags most behind its share of the phase's tokens.

    Inside a source every epoch has its own random order (none with ``shuffle`` false). ``max_epochs`` limits
    the sources it names.
    """

    def __init__(
        self,
        config: MixtureConfig,
        sources: Mapping[str, Source],
        seeds: Seeds,
        *,
        max_epochs: Mapping[str, int],
        shuffle: bool = True,
    ) -> None:
        for phase in config.phases:
            for name in phase.weights:
                if name not in sources:
                    raise ConfigError(unknown("source", name, sources, where="the weights of a phase"))
        self._config = config
        self._sources = sources
        self._seeds = seeds
        self._max_epochs = max_epochs
        self._shuffle = shuffle
        self._phase = 0
        self._tokens = 0
        self._readings = {name: _Reading() for name in sources}
        self._orders: dict[str, tuple[int, npt.NDArray[np.int64]]] = {}

    @property
    def tokens(self) -> int:
        """Tokens drawn so far."""
        return self._tokens

    @property
    def epochs(self) -> dict[str, float]:
        """How often each source has been read, with the part of the epoch that has begun."""
        counts = {name: max(1, source.num_documents) for name, source in self._sources.items()}
        return {name: r.epoch + r.position / counts[name] for name, r in self._readings.items()}

    def draw(self) -> Piece | None:
        """The next document, whole in extent; None when the data ends."""
        if not self._enter_phase():
            return None
        name = self._lagging_source()
        if name is None:
            return None
        reading, source = self._readings[name], self._sources[name]
        document = self._document_at(name, reading)
        length = source.length(document)
        self._tokens += length
        reading.phase_tokens += length
        reading.position += 1
        if reading.position == source.num_documents:
            reading.epoch, reading.position = reading.epoch + 1, 0
        return Piece(name, document, 0, length, source.whole)

    def state(self) -> dict[str, Any]:
        """JSON-able: positions, not data."""
        readings = {name: [r.epoch, r.position, r.phase_tokens] for name, r in self._readings.items()}
        return {"phase": self._phase, "tokens": self._tokens, "readings": readings}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``. Raises DataError where it was taken with other sources or phases."""
        if set(state["readings"]) != set(self._sources):
            raise DataError(f"the state has sources {sorted(state['readings'])}, this run {sorted(self._sources)}")
        if state["phase"] > len(self._config.phases):
            raise DataError(f"the state is in phase {state['phase']}, this run has {len(self._config.phases)}")
        self._phase, self._tokens = state["phase"], state["tokens"]
        self._readings = {name: _Reading(*state["readings"][name]) for name in self._sources}

    def _enter_phase(self) -> bool:
        """Move to the phase that the tokens drawn so far are in; False past the last."""
        phases = self._config.phases
        while self._phase < len(phases) and 0 < phases[self._phase].until_tokens <= self._tokens:
            self._phase += 1
            for reading in self._readings.values():
                reading.phase_tokens = 0
        return self._phase < len(phases)

    def _lagging_source(self) -> str | None:
        weights = self._config.phases[self._phase].weights or {n: s.num_tokens for n, s in self._sources.items()}
        wanted = [name for name in self._sources if weights.get(name, 0) > 0]
        unread = [name for name in wanted if not self._is_exhausted(name)]
        if not unread or (self._config.on_exhausted == "stop" and len(unread) < len(wanted)):
            return None
        return min(unread, key=lambda name: self._readings[name].phase_tokens / weights[name])

    def _is_exhausted(self, name: str) -> bool:
        limit = self._max_epochs.get(name, 0)
        return self._sources[name].num_documents == 0 or 0 < limit <= self._readings[name].epoch

    def _document_at(self, name: str, reading: _Reading) -> int:
        if not self._shuffle:
            return reading.position
        known = self._orders.get(name)
        if known is None or known[0] != reading.epoch:
            order = self._seeds.numpy("data order", name, reading.epoch).permutation(self._sources[name].num_documents)
            known = self._orders[name] = (reading.epoch, order)
        return int(known[1][reading.position])

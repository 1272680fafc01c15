"""Which pieces of which documents share a batch: best fit over a bounded buffer, exactly full batches."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from yunque.core.checks import at_least
from yunque.core.errors import ConfigError


@dataclass(frozen=True)
class PackingConfig:
    """``tokens_per_batch`` tokens in a batch, at most ``sequence_length`` of them in one piece of a document.

    ``buffer_documents`` documents are chosen from at a time: 1 keeps the order of the stream and cuts
    documents wherever a batch ends; more gives fewer cuts (and, for conversations, less padding).
    """

    tokens_per_batch: int
    sequence_length: int
    buffer_documents: int = 64

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise ConfigError(f"sequence_length {self.sequence_length} leaves nothing to predict; at least 2")
        if self.tokens_per_batch < self.sequence_length:
            raise ConfigError(
                f"tokens_per_batch {self.tokens_per_batch} is below sequence_length {self.sequence_length}"
            )
        at_least(1, buffer_documents=self.buffer_documents)


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop`` of a source's document; ``whole`` forbids cutting it."""

    source: str
    document: int
    start: int
    stop: int
    whole: bool

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class PackReport:
    """What packing has done so far.

    ``pieces`` exceeds ``documents`` by the number of cuts; ``padding`` counts the rows of batches that hold
    no token because no conversation fitted; ``truncated_tokens`` were cut off the ends of
    ``truncated_documents``.
    """

    batches: int = 0
    tokens: int = 0
    padding: int = 0
    documents: int = 0
    pieces: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0

    @property
    def waste(self) -> float:
        """The share of rows that are padding."""
        return self.padding / max(1, self.tokens + self.padding)

    def __str__(self) -> str:
        text = f"{self.batches:,} batches of {self.tokens:,} tokens, {self.waste:.2%} padding"
        text += f"; {self.documents:,} documents in {self.pieces:,} pieces"
        if self.truncated_documents:
            text += f"; {self.truncated_documents:,} truncated by {self.truncated_tokens:,} tokens"
        return text


class Packer:
    """Draws documents into a buffer and takes from it, batch by batch.

    A batch starts with the piece that has waited longest and goes on with the longest that still fits (ties:
    the one that waited longer). A document longer than ``sequence_length`` offers that many tokens at a time
    and then waits its turn again, unless it is whole: then its end is cut off and counted. When nothing fits,
    the longest document that may be cut fills the batch exactly; where all are whole, the rest is padding.
    """

    def __init__(self, config: PackingConfig, draw: Callable[[], Piece | None]) -> None:
        self._config = config
        self._draw = draw
        self._waiting: list[Piece] = []
        self._is_exhausted = False
        self.report = PackReport()

    def next_batch(self) -> tuple[list[Piece], int] | None:
        """The pieces of the next batch and its rows of padding; None at the end of the data.

        Pieces and padding make up ``tokens_per_batch``, except in the last batch, which is as long as what is
        left.
        """
        taken: list[Piece] = []
        num_finished = 0
        space = self._config.tokens_per_batch
        self._fill()
        while space and self._waiting:
            index = 0 if not taken else self._best_fit(space)
            if index is None:
                break
            piece, is_finished = self._take(index, space)
            taken.append(piece)
            num_finished += is_finished
            space -= piece.length
            self._fill()
        if not taken:
            return None
        padding = space if self._waiting else 0
        self.report = replace(
            self.report,
            batches=self.report.batches + 1,
            tokens=self.report.tokens + sum(piece.length for piece in taken),
            padding=self.report.padding + padding,
            documents=self.report.documents + num_finished,
            pieces=self.report.pieces + len(taken),
        )
        return taken, padding

    def state(self) -> dict[str, Any]:
        """JSON-able: the documents that wait, by position, and the report."""
        waiting = [list(piece) for piece in self._waiting]
        return {"waiting": waiting, "is_exhausted": self._is_exhausted, "report": asdict(self.report)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self._waiting = [Piece(*row) for row in state["waiting"]]
        self._is_exhausted = state["is_exhausted"]
        self.report = PackReport(**state["report"])

    def _fill(self) -> None:
        while not self._is_exhausted and len(self._waiting) < self._config.buffer_documents:
            piece = self._draw()
            if piece is None:
                self._is_exhausted = True
                return
            excess = piece.length - self._config.sequence_length
            is_truncated = piece.whole and excess > 0
            self.report = replace(
                self.report,
                truncated_documents=self.report.truncated_documents + is_truncated,
                truncated_tokens=self.report.truncated_tokens + (excess if is_truncated else 0),
            )
            self._waiting.append(piece._replace(stop=piece.stop - excess) if is_truncated else piece)

    def _offer(self, piece: Piece) -> int:
        return min(piece.length, self._config.sequence_length)

    def _best_fit(self, space: int) -> int | None:
        """The piece to take next into ``space`` rows: the longest offer that fits, else one to cut."""
        fitting = [index for index, piece in enumerate(self._waiting) if self._offer(piece) <= space]
        if fitting:
            return max(fitting, key=lambda index: self._offer(self._waiting[index]))
        cuttable = [index for index, piece in enumerate(self._waiting) if not piece.whole]
        return max(cuttable, key=lambda index: self._waiting[index].length, default=None)

    def _take(self, index: int, space: int) -> tuple[Piece, bool]:
        """Remove the piece, or as much of it as is offered and fits, and whether that was all of it.

        What is left joins the end of the queue.
        """
        piece = self._waiting.pop(index)
        stop = piece.start + min(self._offer(piece), space)
        if stop < piece.stop:
            self._waiting.append(piece._replace(start=stop))
        return piece._replace(stop=stop), stop == piece.stop

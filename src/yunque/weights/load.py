"""Fill a model from a checkpoint folder, and prove that every element of it was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from yunque.core.errors import CheckpointError
from yunque.core.logging import get_logger
from yunque.weights.checkpoint import Checkpoint
from yunque.weights.matching import match, shorten
from yunque.weights.reader import batches_of, open_reader

_logger = get_logger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """What was read, and what a careful user should know about it (the notes are logged as warnings too)."""

    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...]


def load_tensors(
    checkpoint: Checkpoint,
    target: Mapping[str, Tensor],
    *,
    ignore: Sequence[str] = (),
    exact: bool = False,
    threads: int = 2,
) -> LoadReport:
    """Fill ``target`` (a module's ``state_dict()``: module names, live tensors) from an opened checkpoint.

    Names, shapes and dtypes are checked before the first byte is read: nothing may be missing, left over or
    stay uninitialised; see ``matching.match`` for ``ignore`` and ``exact``. Where the dtypes agree and the
    target is in CPU memory, bytes are read straight into it; otherwise small pieces are converted on the way
    (FP8 times its scales). After an error while reading, the target's values are undefined.
    """
    matching = match(checkpoint, target, ignore, exact=exact)
    written: Counter[str] = Counter()
    with open_reader(matching) as reader:
        with ThreadPoolExecutor(threads, thread_name_prefix="yunque-load") as pool:
            for counts in pool.map(reader.fill, list(batches_of(matching))):
                written.update(counts)
        check_covered(target, written, where=checkpoint.folder)
        for copy, main in matching.copies:
            reader.check_copy(copy, main)
    for note in matching.notes:
        _logger.warning("%s: %s", checkpoint.folder, note)
    entries = [fill.entry for fill in matching.fills] + [fill.scale for fill in matching.fills if fill.scale]
    return LoadReport(len(entries), sum(entry.num_bytes for entry in entries), matching.notes)


def check_covered(target: Mapping[str, Tensor], written: Mapping[str, int], *, where: Path) -> None:
    """Raise unless all elements of every tensor were ``written``: experts are counted one by one."""
    partly = [
        f"{name} ({written.get(name, 0)} of {tensor.numel()} elements)"
        for name, tensor in target.items()
        if written.get(name, 0) != tensor.numel()
    ]
    if partly:
        raise CheckpointError(f"{where}: left uninitialised: {shorten(partly)}")

"""What a run reads from the disk: which of the paths that its file names do not exist."""

from __future__ import annotations

from collections.abc import Iterator

from yunque.data.folders import place_exists
from yunque.data.source import FileSource
from yunque.train.settings import RunConfig


def missing_inputs(run: RunConfig) -> tuple[str, ...]:
    """``key = path`` for each path that ``run`` would read and that does not exist.

    Only sources that a stage or the tokenizer uses count.
    """
    return tuple(f"{key} = {path!r}" for key, path in _paths(run) if not place_exists(path))


def _paths(run: RunConfig) -> Iterator[tuple[str, str]]:
    if run.start_from:
        yield "start_from", run.start_from
    if run.tokenizer.path:
        yield "tokenizer.path", run.tokenizer.path
    used = {name for stage in run.stage for name in stage.sources} | set(run.tokenizer.sources)
    for name, source in run.data.sources.items():
        if name in used and isinstance(source, FileSource):
            yield f"data.sources.{name}.path", source.path

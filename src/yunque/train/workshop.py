"""What the stages of one run share: its settings, its folder, its text side, its device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from yunque.core.config import to_mapping
from yunque.core.errors import ConfigError
from yunque.model.config import ModelConfig
from yunque.train.settings import RunConfig
from yunque.train.signals import StopRequest
from yunque.train.vocabulary import TextSide


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """Where and with what the stages of ``run`` are worked on."""

    run: RunConfig
    text: TextSide
    device: torch.device
    console: Console
    stop: StopRequest = field(default_factory=StopRequest)
    clock: Callable[[], float] = time.perf_counter

    @property
    def folder(self) -> Path:
        return self.run.folder.absolute()

    def stage_folder(self, index: int) -> Path:
        return self.folder / f"{index + 1:02d}-{self.run.stage[index].title}"

    @property
    def cache(self) -> Path:
        """Where tokenised text is kept."""
        return Path(self.run.data.cache) if self.run.data.cache else self.folder / "cache"

    def model_config(self, index: int) -> ModelConfig:
        """The model of stage ``index``, with the tokenizer's special ids where the run file names none."""
        return self.text.fitted(self.run.model_at(index))

    def settings(self, index: int) -> dict[str, Any]:
        """Everything that decides what stage ``index`` does to the weights, as plain values."""
        run, stage = self.run, self.run.stage[index]
        return {
            "seed": run.seed,
            "dtype": run.dtype,
            "start_from": run.start_from if index == 0 else "",
            "model": to_mapping(run.model_at(index)),
            "tokenizer": to_mapping(run.tokenizer),
            "optimizer": to_mapping(run.optimizer_at(index)),
            "stage": to_mapping(stage),
            "sources": {name: to_mapping(run.data.sources[name]) for name in stage.sources},
            "held_out_share": run.data.held_out_share,
        }

    def check_same(self, index: int, before: Mapping[str, Any]) -> None:
        """Raise ``ConfigError``, naming the first difference, unless stage ``index`` was run as it is now."""
        then, now = dict(_flat(before, "")), dict(_flat(self.settings(index), ""))
        for key in [*now, *then]:
            if then.get(key) != now.get(key):
                raise ConfigError(
                    f"{self.stage_folder(index)} was run with {key} = {then.get(key)!r}, it "
                    f"is {now.get(key)!r} now; choose another output, or delete that folder "
                    "to train the stage anew"
                )


def _flat(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables and lists by dotted key; tuples and lists are alike."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        yield from ((f"{where}[{i}]{key}", leaf) for i, item in enumerate(value) for key, leaf in _flat(item, ""))
        yield f"{where}.length", len(value)
    else:
        yield where, value

"""A run file: everything that decides a training run, from one TOML file to one frozen record."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from yunque.core.checks import at_least, share_below_one
from yunque.core.config import from_mapping, to_mapping, with_overrides
from yunque.core.errors import ConfigError, unknown
from yunque.data.loader import DataConfig
from yunque.data.mixture import MixtureConfig
from yunque.data.source import ChatSource
from yunque.data.sources import AnySource
from yunque.model.config import ModelConfig
from yunque.model.presets import preset
from yunque.text.special import CONTROL_TOKENS, TAG_TOKENS
from yunque.train.roles import OptimizerConfig
from yunque.train.stages import Stage
from yunque.weights.checkpoint import read_config
from yunque.weights.models import find_checkpoint

_SMALLEST_VOCABULARY = 256 + len(CONTROL_TOKENS) + len(TAG_TOKENS)


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """A released tokenizer at ``path``, or one of ``vocab_size`` ids trained on the run's own text
    ``sources``.

    Training reads at most ``max_bytes`` of text. ``chat_format`` is the format that conversations are written
    in.
    """

    path: str = ""
    vocab_size: int = 0
    sources: tuple[str, ...] = ()
    max_bytes: int = 12_000_000
    chat_format: Literal["glm-5", "glm-5.1", "glm-5.2", "glm-5.3"] = "glm-5"

    def __post_init__(self) -> None:
        at_least(1, max_bytes=self.max_bytes)
        if bool(self.path) == bool(self.vocab_size):
            raise ConfigError("give either path (a tokenizer to load) or vocab_size (one to train)")
        if self.vocab_size and not self.sources:
            raise ConfigError("vocab_size asks for a tokenizer to be trained; name the text sources to train it on")
        if self.vocab_size and self.vocab_size < _SMALLEST_VOCABULARY:
            raise ConfigError(
                f"vocab_size is {self.vocab_size}; it must be at least {_SMALLEST_VOCABULARY}: 256 bytes and the GLM "
                "tokens"
            )


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The sources that stages choose from, and how much of each is held out; see ``yunque.data``.

    ``cache`` keeps tokenised text from run to run; empty: inside the run's folder.
    """

    sources: dict[str, AnySource]
    held_out_share: float = 0.05
    held_out_batches: int = 16
    cache: str = ""

    def __post_init__(self) -> None:
        share_below_one(held_out_share=self.held_out_share)
        at_least(0, held_out_batches=self.held_out_batches)

    def for_stage(self, stage: Stage) -> DataConfig:
        """What the stage reads, packed as it says."""
        return DataConfig(
            packing=stage.packing,
            sources={name: self.sources[name] for name in stage.sources},
            mixture=stage.mixture or MixtureConfig(),
            held_out_share=self.held_out_share,
            held_out_batches=self.held_out_batches,
        )


@dataclass(frozen=True, kw_only=True)
class HookSettings:
    """What happens beside training; nothing here changes a weight. 0 switches a cadence off.

    Evaluation also happens before and after every stage; a snapshot also ends every stage and every
    interruption.
    """

    evaluate_every_tokens: int = 0
    snapshot_every_tokens: int = 0
    snapshot_every_s: float = 60.0
    keep_last: int = 2
    keep_best: int = 1
    tensorboard: bool = False

    def __post_init__(self) -> None:
        at_least(0, evaluate_every_tokens=self.evaluate_every_tokens, keep_best=self.keep_best)
        at_least(0, snapshot_every_tokens=self.snapshot_every_tokens, snapshot_every_s=self.snapshot_every_s)
        at_least(1, keep_last=self.keep_last)  # a run needs one to go on from


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run: a model, its data and the stages it goes through, in order.

    ``start_from`` is a checkpoint or snapshot folder to take the first weights from. ``output`` is the run's
    folder (empty: ``runs/NAME``). ``threads`` 0 leaves torch's choice; a resumed run is equal to the bit only
    with as many.
    """

    name: str
    output: str = ""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 0
    start_from: str = ""
    model: ModelConfig
    tokenizer: TokenizerSettings
    data: DataSettings
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    stage: tuple[Stage, ...]
    hooks: HookSettings = field(default_factory=HookSettings)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ConfigError(
                f"name is {self.name!r}; it becomes a folder: letters, digits, '_', '-' and '.', but neither "
                "'-' nor '.' at the start"
            )
        at_least(0, threads=self.threads)
        if not self.stage:
            raise ConfigError("a run needs at least one [[stage]]")
        _refuse_equal_names([stage.title for stage in self.stage])
        self._check_vocabulary()
        for stage in self.stage:
            self._check_stage(stage)
        for name in self.tokenizer.sources:
            self._check_source(name, "[tokenizer]")
            if isinstance(self.data.sources[name], ChatSource):
                raise ConfigError(f"tokenizer.sources: {name!r} holds conversations; name sources of text")

    def _check_vocabulary(self) -> None:
        model, wanted = self.model, self.tokenizer.vocab_size
        if model.vocab_size < wanted:
            raise ConfigError(
                f"model.vocab_size is {model.vocab_size}, below the {wanted} of tokenizer.vocab_size; make them equal"
            )
        padding = () if model.pad_token_id is None else (model.pad_token_id,)
        for key, ids in (("eos_token_id", model.eos_token_id), ("pad_token_id", padding)):
            for token_id in ids:
                if not 0 <= token_id < model.vocab_size:
                    raise ConfigError(f"model.{key}: {token_id} is no token; valid: 0..{model.vocab_size - 1}")

    def _check_stage(self, stage: Stage) -> None:
        place = f"stage {stage.title!r}"
        if stage.sequence_length > self.model.max_position_embeddings:
            raise ConfigError(
                f"{place}: sequence_length {stage.sequence_length} exceeds the model's "
                f"max_position_embeddings {self.model.max_position_embeddings}"
            )
        for name in stage.sources:
            self._check_source(name, place)
        for phase in stage.mixture.phases if stage.mixture else ():
            for name in phase.weights:
                if name not in stage.sources:
                    raise ConfigError(unknown("source", name, stage.sources, where=f"the mixture of {place}"))
        if stage.weights_at(0).mtp and not self.model.num_nextn_predict_layers:
            raise ConfigError(f"{place}: mtp_weight is above 0, but the model has no MTP layer; set mtp_weight = 0")

    def _check_source(self, name: str, place: str) -> None:
        if name not in self.data.sources:
            raise ConfigError(unknown("source", name, self.data.sources, where=place))

    @property
    def folder(self) -> Path:
        return Path(self.output or f"runs/{self.name}")

    def model_at(self, index: int) -> ModelConfig:
        """The model's config during stage ``index``: a stage's ``rope_theta`` holds from then on."""
        bases = [stage.rope_theta for stage in self.stage[: index + 1] if stage.rope_theta is not None]
        return replace(self.model, rope_theta=bases[-1]) if bases else self.model

    def optimizer_at(self, index: int) -> OptimizerConfig:
        return self.stage[index].optimizer or self.optimizer


def load_run(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file with ``key.path=value`` overrides.

    ``stage.NAME.key=value`` reaches the stage of that name (its kind, where it has none),
    ``stage.*.key=value`` all. In ``[model]``, ``preset`` names an architecture that the other keys change;
    without ``[model]`` the architecture is that of ``start_from``. Raises ``ConfigError`` with the file's
    name in front.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        return run_from_mapping(_overridden(data, overrides))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    except ConfigError as error:
        source = f"{path} with {' '.join(overrides)}" if overrides else f"{path}"
        raise ConfigError(f"{source}: {error}") from error


def run_from_mapping(data: Mapping[str, Any]) -> RunConfig:
    """A run from the tables of its file; see ``load_run`` for what ``[model]`` may say."""
    tables = dict(data)
    tables["model"] = _model(tables)
    return from_mapping(RunConfig, tables)


def _model(tables: Mapping[str, Any]) -> ModelConfig:
    table = tables.get("model", {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"model = {table!r}: expected a table")
    own = {key: value for key, value in table.items() if key != "preset"}
    if "preset" in table:
        return from_mapping(ModelConfig, to_mapping(preset(str(table["preset"]))) | own, where="model")
    if tables.get("start_from"):
        return from_mapping(
            ModelConfig,
            to_mapping(read_config(find_checkpoint(str(tables["start_from"])))) | own,
            where="model",
        )
    return from_mapping(ModelConfig, own, where="model")


def _overridden(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """``with_overrides``, with the list of stages seen as a table of stages by name."""
    stages = data.get("stage", [])
    if not isinstance(stages, list) or not all(isinstance(stage, Mapping) for stage in stages):
        raise ConfigError("stage is no list of tables; write each stage under [[stage]]")
    names = [str(stage.get("name") or stage.get("kind") or index) for index, stage in enumerate(stages)]
    _refuse_equal_names(names)
    by_name = dict(zip(names, stages, strict=True))
    spelled = [one for override in overrides for one in _per_stage(override, by_name)]
    result = with_overrides({**data, "stage": by_name}, spelled)
    named = result["stage"]
    return result | {"stage": list(named.values()) if isinstance(named, dict) else named}


def _refuse_equal_names(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"two stages are called {twice[0]!r}; give each a name of its own: name = ... under [[stage]]"
        )


def _per_stage(override: str, stages: Mapping[str, Any]) -> list[str]:
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if parts[0] != "stage" or len(parts) < 3:
        return [override]
    if parts[1] == "*":
        return [f"{'.'.join(['stage', name, *parts[2:]])}{equals}{value}" for name in stages]
    if parts[1] not in stages:
        raise ConfigError(f"override {override!r}: {unknown('stage', parts[1], stages)}")
    return [override]

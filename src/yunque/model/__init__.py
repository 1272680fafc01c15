"""The model: config, attention, indexer, experts, multi-token prediction, cache views, objectives."""

from yunque.model.batch import NO_TARGET, PackedBatch
from yunque.model.cache import CacheView, PackedView, SequenceCache
from yunque.model.config import ModelConfig
from yunque.model.forward import ForwardMode, ForwardOutput, Replay, Trace
from yunque.model.generate import Sampling, generate
from yunque.model.init import init_weights
from yunque.model.objectives import (
    Evaluation,
    IndexerWarmupLoss,
    LanguageModelLoss,
    LossConfig,
    LossOutput,
    Ratio,
    evaluate,
)
from yunque.model.presets import PRESETS, preset
from yunque.model.report import ModelReport, model_report
from yunque.model.transformer import MTPState, Transformer

__all__ = [
    "NO_TARGET",
    "PRESETS",
    "CacheView",
    "Evaluation",
    "ForwardMode",
    "ForwardOutput",
    "IndexerWarmupLoss",
    "LanguageModelLoss",
    "LossConfig",
    "LossOutput",
    "MTPState",
    "ModelConfig",
    "ModelReport",
    "PackedBatch",
    "PackedView",
    "Ratio",
    "Replay",
    "Sampling",
    "SequenceCache",
    "Trace",
    "Transformer",
    "evaluate",
    "generate",
    "init_weights",
    "model_report",
    "preset",
]

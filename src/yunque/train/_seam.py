from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from yunque.model.batch import PackedBatch


@dataclass(frozen=True)
class Ratio:
    sum: Tensor
    count: Tensor


@dataclass(frozen=True)
class LossOutput:
    sum: Tensor
    count: Tensor
    metrics: Mapping[str, Ratio] = field(default_factory=dict)
    expert_load_LE: Tensor | None = None


class LossFn(Protocol):
    def __call__(self, model: Any, batch: PackedBatch) -> LossOutput: ...

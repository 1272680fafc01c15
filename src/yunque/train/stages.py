"""The kinds of stages: what each one trains, with which attention and losses, and what a run file may set."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

from yunque.core.checks import above_zero, at_least
from yunque.core.errors import ConfigError
from yunque.data.mixture import MixtureConfig
from yunque.data.packing import PackingConfig
from yunque.model.names import Role
from yunque.train.roles import ALL_ROLES, BACKBONE_ROLES, INDEXER_ROLES, OptimizerConfig
from yunque.train.schedule import BatchRamp, Pace, Schedule, Stepwise, check_stepwise, stepwise_value

Attention = Literal["dense", "sparse"]


@dataclass(frozen=True, kw_only=True)
class StageSettings(ABC):
    """What all stages share.

    ``tokens`` is the budget, rounded up to whole steps of ``tokens_per_step`` in ``microbatches`` equal parts
    (fewer while ``batch_ramp`` rises). ``sources`` names the data sources to read, mixed by ``mixture``
    (none: by size). ``optimizer`` replaces the run's; ``optimizer_state`` "carry" goes on with the previous
    stage's momenta where both stages have them.
    """

    name: str = ""
    tokens: int
    sequence_length: int
    tokens_per_step: int
    microbatches: int = 1
    batch_ramp: BatchRamp | None = None
    schedule: Schedule
    sources: tuple[str, ...]
    mixture: MixtureConfig | None = None
    #: Documents to choose from when packing; more gives fewer cuts.
    packing_buffer: int = 64
    #: A new rotary base, which later stages inherit.
    rope_theta: float | None = None
    optimizer: OptimizerConfig | None = None
    optimizer_state: Literal["fresh", "carry"] = "fresh"
    #: Tokens of logits that exist at a time.
    loss_chunk: int = 512
    #: Recompute each layer's activations in the backward pass: less memory, about a third more work.
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        at_least(1, tokens=self.tokens, tokens_per_step=self.tokens_per_step, microbatches=self.microbatches)
        at_least(1, packing_buffer=self.packing_buffer, loss_chunk=self.loss_chunk)
        at_least(2, sequence_length=self.sequence_length)  # one token leaves nothing to predict
        if self.rope_theta is not None:
            above_zero(rope_theta=self.rope_theta)
        if not re.fullmatch(r"[A-Za-z0-9_-]*", self.name):
            raise ConfigError(f"name is {self.name!r}; it becomes a folder: letters, digits, '_' and '-' only")
        if not self.sources:
            raise ConfigError("sources is empty; name at least one table of [data.sources]")
        if self.tokens_per_step % self.microbatches:
            raise ConfigError(
                f"tokens_per_step {self.tokens_per_step} is not divisible by microbatches {self.microbatches}"
            )
        if self.tokens_per_step // self.microbatches < self.sequence_length:
            raise ConfigError(
                f"a microbatch of {self.tokens_per_step // self.microbatches} tokens (tokens_per_step / "
                f"microbatches) is below sequence_length {self.sequence_length}"
            )
        if self.batch_ramp is not None and self.batch_ramp.start_tokens > self.tokens_per_step:
            raise ConfigError(
                f"batch_ramp starts at {self.batch_ramp.start_tokens}, above tokens_per_step {self.tokens_per_step}"
            )
        if self.schedule.warmup_tokens >= self.tokens:
            raise ConfigError(f"warmup_tokens {self.schedule.warmup_tokens} leaves nothing of {self.tokens} tokens")

    @property
    def kind_name(self) -> str:
        """The ``kind`` of the subclass."""
        return str(getattr(self, "kind"))  # noqa: B009  (declared by every subclass, in its own literal type)

    @property
    def title(self) -> str:
        """The stage's name; its kind where the run file gives none."""
        return self.name or self.kind_name

    @property
    def pace(self) -> Pace:
        return Pace(
            microbatch_tokens=self.tokens_per_step // self.microbatches,
            microbatches=self.microbatches,
            ramp=self.batch_ramp,
        )

    @property
    def packing(self) -> PackingConfig:
        return PackingConfig(
            tokens_per_batch=self.pace.microbatch_tokens,
            sequence_length=self.sequence_length,
            buffer_documents=self.packing_buffer,
        )

    @property
    def steps(self) -> int:
        return self.pace.steps(self.tokens)

    @property
    @abstractmethod
    def attends(self) -> Attention:
        """The attention that the stage trains with and is judged by."""

    @property
    @abstractmethod
    def trainable(self) -> frozenset[Role]:
        """The roles whose parameters move; all others are frozen."""

    @abstractmethod
    def weights_at(self, tokens: int) -> LossWeights:
        """The loss weights and the balancing rate from ``tokens`` of the stage on."""

    @property
    def stepwise(self) -> tuple[Stepwise, ...]:
        """The settings that may change during the stage."""
        return ()


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Weights beside the next-token loss (1), and the step of the router's balancing rule."""

    mtp: float = 0.0
    mtp_steps: int = 1
    balance: float = 0.0
    index_kl: float = 0.0
    router_bias_rate: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LanguageStage(StageSettings):
    """Stages that train the backbone on the next-token loss, with dense attention and the indexer frozen."""

    #: Weight of the multi-token-prediction loss; GLM-4.5: 0.3 for 15 T tokens, then 0.1.
    mtp_weight: Stepwise = 0.3
    #: How often the MTP layer is unrolled; GLM-5: 3, with shared parameters.
    mtp_steps: int = 3
    #: Weight of the sequence-level balance loss (GLM-4.5).
    balance_weight: float = 1e-4
    #: Step of the router bias's sign rule; GLM-4.5: 0.001 for 15 T tokens, then 0.
    router_bias_rate: Stepwise = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stepwise("mtp_weight", self.mtp_weight)
        at_least(0, balance_weight=self.balance_weight)
        check_stepwise("router_bias_rate", self.router_bias_rate)
        if self.mtp_steps < 1:
            raise ConfigError(
                f"mtp_steps is {self.mtp_steps}; it must be at least 1 (switch MTP off by mtp_weight = 0)"
            )

    @property
    def attends(self) -> Attention:
        return "dense"

    @property
    def trainable(self) -> frozenset[Role]:
        return BACKBONE_ROLES

    def weights_at(self, tokens: int) -> LossWeights:
        return LossWeights(
            mtp=stepwise_value(self.mtp_weight, tokens),
            mtp_steps=self.mtp_steps,
            balance=self.balance_weight,
            router_bias_rate=stepwise_value(self.router_bias_rate, tokens),
        )

    @property
    def stepwise(self) -> tuple[Stepwise, ...]:
        return self.mtp_weight, self.router_bias_rate


@dataclass(frozen=True, kw_only=True)
class Pretrain(LanguageStage):
    """Next-token and MTP loss with dense attention; the indexer is frozen."""

    kind: Literal["pretrain"] = "pretrain"


@dataclass(frozen=True, kw_only=True)
class Midtrain(LanguageStage):
    """Pre-training gone on with: longer sequences, usually a new ``rope_theta``."""

    kind: Literal["midtrain"] = "midtrain"
    mtp_weight: Stepwise = 0.1


@dataclass(frozen=True, kw_only=True)
class DsaWarmup(StageSettings):
    """Only the indexers learn, the MTP layer's included, by KL divergence from the dense attention they
    imitate."""

    kind: Literal["dsa_warmup"] = "dsa_warmup"

    @property
    def attends(self) -> Attention:
        return "dense"

    @property
    def trainable(self) -> frozenset[Role]:
        return INDEXER_ROLES

    def weights_at(self, tokens: int) -> LossWeights:  # noqa: ARG002  (one weight for the whole stage)
        return LossWeights(index_kl=1.0)


@dataclass(frozen=True, kw_only=True)
class SparseStage(LanguageStage):
    """Stages that attend to the indexer's selection: the backbone learns by the language-model loss, the
    indexer only by its own KL divergence, gradients apart."""

    mtp_weight: Stepwise = 0.1
    #: Weight of the indexer's loss; it reaches no other parameter. 0 freezes the indexer.
    index_kl_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, index_kl_weight=self.index_kl_weight)

    @property
    def attends(self) -> Attention:
        return "sparse"

    @property
    def trainable(self) -> frozenset[Role]:
        return ALL_ROLES if self.index_kl_weight else BACKBONE_ROLES

    def weights_at(self, tokens: int) -> LossWeights:
        return replace(super().weights_at(tokens), index_kl=self.index_kl_weight)


@dataclass(frozen=True, kw_only=True)
class DsaSparse(SparseStage):
    """The model adapts to sparse attention: all weights learn."""

    kind: Literal["dsa_sparse"] = "dsa_sparse"


@dataclass(frozen=True, kw_only=True)
class Sft(SparseStage):
    """Fine-tuning on conversations: only what the assistant wrote is in the loss, all of it stays in context.

    Thinking modes are settings of the conversation sources. The router's bias and the indexer rest by
    default, as in the public post-training scripts.
    """

    kind: Literal["sft"] = "sft"
    attention: Attention = "sparse"
    balance_weight: float = 0.0
    router_bias_rate: Stepwise = 0.0
    index_kl_weight: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention == "dense" and self.index_kl_weight:
            raise ConfigError("index_kl_weight needs attention = 'sparse': dense attention does not run the indexer")

    @property
    def attends(self) -> Attention:
        return self.attention


Stage = Pretrain | Midtrain | DsaWarmup | DsaSparse | Sft

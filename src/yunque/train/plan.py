"""What a run will do before it does it: resolved stages, parameters by part, and an estimate of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from yunque.model.config import ModelConfig
from yunque.model.names import FP32_ROLES, Role, TensorSpec, module_specs
from yunque.model.report import ModelReport, model_report
from yunque.train.optimizer import SLOTS
from yunque.train.roles import Assignment, RoleRow, assign, by_role
from yunque.train.settings import RunConfig
from yunque.train.stages import Stage

_FP32_BYTES = 4


Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes a stage needs at its peak, by what needs them. Activations are of one microbatch.

    Weights, gradients and optimiser state are exact; activations count the tensors that a backward pass keeps
    (attention scores excluded: they are computed blockwise and not kept) and are a guide, not a measurement.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage, resolved."""

    title: str
    stage: Stage
    model: ModelConfig
    steps: int
    trainable: int
    table: tuple[RoleRow, ...]
    memory: MemoryEstimate


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run, resolved: what ``--dry-run`` prints."""

    run: RunConfig
    report: ModelReport
    stages: tuple[StagePlan, ...]


def plan(run: RunConfig) -> RunPlan:
    """Resolve every stage of ``run`` from shapes alone: no model is built, no data is read."""
    specs = module_specs(run.model)  # a stage may change the rotary base, but no shape
    return RunPlan(
        run=run,
        report=model_report(run.model),
        stages=tuple(_stage_plan(run, index, specs) for index in range(len(run.stage))),
    )


def _stage_plan(run: RunConfig, index: int, specs: Specs) -> StagePlan:
    stage, model = run.stage[index], run.model_at(index)
    assignments = assign(specs, run.optimizer_at(index), model, stage.trainable)
    return StagePlan(
        title=stage.title,
        stage=stage,
        model=model,
        steps=stage.steps,
        trainable=sum(a.numel for a in assignments if a.method != "frozen"),
        table=by_role(assignments),
        memory=_memory(run, stage, specs, assignments),
    )


def _memory(run: RunConfig, stage: Stage, specs: Specs, assignments: tuple[Assignment, ...]) -> MemoryEstimate:
    model = run.model
    width = _FP32_BYTES if run.dtype == "float32" else 2
    moving = [a for a in assignments if a.method != "frozen"]
    master = 0 if width == _FP32_BYTES else 1
    slots = {method: sum(slot != "step" for slot in names) for method, names in SLOTS.items()}
    tokens = stage.pace.microbatch_tokens
    chunk = min(stage.loss_chunk, tokens)
    head = model.vocab_size * model.hidden_size if Role.HEAD in stage.trainable else 0
    logits = 0 if stage.kind_name == "dsa_warmup" else 3 * chunk * model.vocab_size + head
    return MemoryEstimate(
        weights=sum(prod(s.shape) * (_FP32_BYTES if s.role in FP32_ROLES else width) for s in specs.values()),
        gradients=sum(a.numel for a in moving) * (_FP32_BYTES + master * width),
        optimizer=sum(a.numel * (slots[a.method] + (master and a.role not in FP32_ROLES)) for a in moving)
        * _FP32_BYTES,
        activations=_activations(stage, model) * tokens * width,
        logits=logits * _FP32_BYTES,
    )


def _activations(stage: Stage, model: ModelConfig) -> int:
    """Elements kept per token for the backward pass."""
    layers = [_layer_activations(model, layer, stage) for layer in range(model.num_hidden_layers)]
    weights = stage.weights_at(0)
    if model.num_nextn_predict_layers and (weights.mtp or stage.kind_name == "dsa_warmup"):
        mtp = _layer_activations(model, model.num_hidden_layers, stage) + 3 * model.hidden_size
        layers += [mtp] * weights.mtp_steps
    if stage.checkpoint_activations:
        return model.hidden_size * len(layers) + max(layers)
    return sum(layers)


def _layer_activations(model: ModelConfig, layer: int, stage: Stage) -> int:
    D, H, C = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
    indexer = 0
    if model.has_indexer(layer) and stage.weights_at(0).index_kl:
        indexer = 2 * model.index_n_heads * model.index_head_dim + 3 * model.index_head_dim + 2 * model.index_n_heads
    if stage.kind_name == "dsa_warmup":
        return indexer + D + model.q_lora_rank
    attention = 2 * D + 2 * model.q_lora_rank + 2 * model.latent_dim
    attention += H * (2 * model.qk_head_dim + model.latent_dim + C + model.v_head_dim)
    if model.is_dense(layer):
        mlp = 3 * model.intermediate_size
    else:
        k, width = model.num_experts_per_tok, model.moe_intermediate_size
        mlp = k * (3 * width + 2 * D) + 3 * model.n_shared_experts * width + 2 * model.n_routed_experts
    return attention + 2 * D + mlp + indexer

"""What a model costs by its config alone: parameters by part, work per token, cache and weight bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from yunque.model.config import ModelConfig
from yunque.model.names import Role, TensorSpec, tensor_specs

#: Bytes of a value by storage type.
BYTES: Mapping[str, float] = {"float32": 4, "bfloat16": 2, "float8": 1, "int4": 0.5}

_PARTS: Mapping[Role, str] = {
    Role.EMBEDDING: "embedding",
    Role.HEAD: "head",
    Role.NORM: "norms",
    Role.Q_UP: "attention",
    Role.KV_UP: "attention",
    Role.ATTENTION: "attention",
    Role.INDEXER: "indexer",
    Role.INDEXER_HEADS: "indexer",
    Role.INDEXER_NORM: "indexer",
    Role.ROUTER: "router",
    Role.ROUTER_BIAS: "router",
    Role.MLP: "dense MLP",
    Role.EXPERT: "routed experts",
    Role.SHARED_EXPERT: "shared experts",
    Role.MTP_PROJECTION: "MTP projection",
}


@dataclass(frozen=True)
class PartSize:
    """Parameters of one part: all of them, and those that one token uses."""

    total: int
    active: int


@dataclass(frozen=True)
class ModelReport:
    """Counts of one config; the MTP layer is a part of its own ("MTP layer") and not in ``main``.

    ``flops_per_token`` is the forward pass of the main model for one token at the context length given: two
    operations per active matrix parameter, plus index scores over the context and attention over the kept keys.
    ``cache_values_per_token`` counts latent and index-key values of all main layers.
    """

    parts: Mapping[str, PartSize]
    main: PartSize
    with_mtp: PartSize
    num_tensors: int
    context: int
    flops_per_token: int
    cache_values_per_token: int
    weight_bytes: Mapping[str, int]

    def cache_bytes_per_token(self, dtype: str) -> int:
        """Bytes of the latents and index keys that one token adds; ``dtype`` is a key of ``BYTES``."""
        return int(self.cache_values_per_token * BYTES[dtype])


def model_report(config: ModelConfig, *, context: int | None = None) -> ModelReport:
    """Count ``config``; ``context`` (default: its whole context length) sets what attention costs."""
    context = config.max_position_embeddings if context is None else context
    specs = tensor_specs(config)
    mtp_prefix = f"model.layers.{config.num_hidden_layers}."
    total: dict[str, int] = {}
    active: dict[str, float] = {}
    for name, spec in specs.items():
        part = "MTP layer" if name.startswith(mtp_prefix) else _PARTS[spec.role]
        size = prod(spec.shape)
        total[part] = total.get(part, 0) + size
        active[part] = active.get(part, 0) + _used(config, spec, size)
    parts = {part: PartSize(total[part], round(active[part])) for part in total}
    main = [size for part, size in parts.items() if part != "MTP layer"]
    both = list(parts.values())
    return ModelReport(
        parts=parts,
        main=PartSize(sum(s.total for s in main), sum(s.active for s in main)),
        with_mtp=PartSize(sum(s.total for s in both), sum(s.active for s in both)),
        num_tensors=len(specs),
        context=context,
        flops_per_token=_flops(config, parts, context),
        cache_values_per_token=_cache_values(config),
        weight_bytes={dtype: _weight_bytes(specs, dtype) for dtype in BYTES},
    )


def _used(config: ModelConfig, spec: TensorSpec, size: int) -> float:
    """Parameters of a tensor that one token uses, on average over experts."""
    if spec.role is Role.EXPERT:
        return size * config.num_experts_per_tok / config.n_routed_experts
    return size


def _full_layers(config: ModelConfig) -> int:
    return sum(config.has_indexer(layer) for layer in range(config.num_hidden_layers))


def _flops(config: ModelConfig, parts: Mapping[str, PartSize], context: int) -> int:
    lookups = ("embedding", "norms", "MTP layer", "MTP projection")
    matrices = sum(size.active for part, size in parts.items() if part not in lookups)
    scores = _full_layers(config) * context * config.index_n_heads * (config.index_head_dim + 1)
    width = config.latent_dim + config.kv_lora_rank
    kept = min(context, config.index_topk)
    attention = config.num_hidden_layers * kept * config.num_attention_heads * width
    return 2 * (matrices + scores + attention)


def _cache_values(config: ModelConfig) -> int:
    return config.num_hidden_layers * config.latent_dim + _full_layers(config) * config.index_head_dim


def _weight_bytes(specs: Mapping[str, TensorSpec], dtype: str) -> int:
    """Tensors that stay fp32 count 4 bytes a value in every type; scales of narrow types are not counted."""
    return int(sum(prod(s.shape) * (4 if s.keeps_fp32 else BYTES[dtype]) for s in specs.values()))

"""Every tensor of a checkpoint by its Hugging Face name: shape, role, and whether it stays in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from yunque.model.config import ModelConfig


class Role(StrEnum):
    """What a parameter does; optimisers, quantisation and reports decide by it."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    Q_UP = "q_up"
    KV_UP = "kv_up"
    ATTENTION = "attention"
    INDEXER = "indexer"
    INDEXER_HEADS = "indexer_heads"
    INDEXER_NORM = "indexer_norm"
    ROUTER = "router"
    ROUTER_BIAS = "router_bias"
    MLP = "mlp"
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    MTP_PROJECTION = "mtp_projection"


#: Tensors that stay fp32 whatever the model's dtype (the router's bias has a spread below bf16's resolution).
FP32_ROLES = frozenset({Role.ROUTER, Role.ROUTER_BIAS})

_BY_LAST_NAMES: tuple[tuple[str, Role], ...] = (
    ("embed_tokens.weight", Role.EMBEDDING),
    ("lm_head.weight", Role.HEAD),
    ("indexer.k_norm.weight", Role.INDEXER_NORM),
    ("indexer.k_norm.bias", Role.INDEXER_NORM),
    ("indexer.weights_proj.weight", Role.INDEXER_HEADS),
    ("indexer.wq_b.weight", Role.INDEXER),
    ("indexer.wk.weight", Role.INDEXER),
    ("norm.weight", Role.NORM),
    ("self_attn.q_b_proj.weight", Role.Q_UP),
    ("self_attn.kv_b_proj.weight", Role.KV_UP),
    ("self_attn.q_a_proj.weight", Role.ATTENTION),
    ("self_attn.kv_a_proj_with_mqa.weight", Role.ATTENTION),
    ("self_attn.o_proj.weight", Role.ATTENTION),
    ("mlp.gate.weight", Role.ROUTER),
    ("mlp.gate.e_score_correction_bias", Role.ROUTER_BIAS),
    ("eh_proj.weight", Role.MTP_PROJECTION),
)


def role_of(name: str) -> Role:
    """Role of the parameter or buffer ``name`` (Hugging Face names and our stacked experts alike).

    Raises ``KeyError`` for a name that no GLM-5 model has.
    """
    if ".mlp.experts." in name:
        return Role.EXPERT
    if ".mlp.shared_experts." in name:
        return Role.SHARED_EXPERT
    for ending, role in _BY_LAST_NAMES:
        if name.endswith(ending):
            return role
    if name.endswith(("enorm.weight", "hnorm.weight", "layernorm.weight")):
        return Role.NORM
    if name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")):
        return Role.MLP
    raise KeyError(f"no role for tensor {name!r}")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and role of one checkpoint tensor."""

    shape: tuple[int, ...]
    role: Role

    @property
    def keeps_fp32(self) -> bool:
        return self.role in FP32_ROLES


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors of a checkpoint under their Hugging Face names, experts one by one, MTP layer included."""
    return {name: TensorSpec(shape, role_of(name)) for name, shape in _shapes(config)}


def module_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """The same tensors as the module holds them: routed experts stacked to [E, 2I, D] (gate first) and [E, D, I]."""
    specs = {n: s for n, s in tensor_specs(config).items() if s.role is not Role.EXPERT}
    E, I, D = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size  # noqa: E741
    for layer in range(config.first_k_dense_replace, config.num_layers_with_mtp):
        prefix = f"model.layers.{layer}.mlp.experts."
        specs[prefix + "gate_up_proj"] = TensorSpec((E, 2 * I, D), Role.EXPERT)
        specs[prefix + "down_proj"] = TensorSpec((E, D, I), Role.EXPERT)
    return specs


def _shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    D, V = config.hidden_size, config.vocab_size
    yield "model.embed_tokens.weight", (V, D)
    for layer in range(config.num_layers_with_mtp):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (D,)
        yield prefix + "post_attention_layernorm.weight", (D,)
        yield from _attention(config, layer, prefix + "self_attn.")
        yield from _mlp(config, layer, prefix + "mlp.")
        if layer == config.num_hidden_layers:
            yield prefix + "enorm.weight", (D,)
            yield prefix + "hnorm.weight", (D,)
            yield prefix + "eh_proj.weight", (D, 2 * D)
            yield prefix + "shared_head.norm.weight", (D,)
    yield "model.norm.weight", (D,)
    yield "lm_head.weight", (V, D)


def _attention(config: ModelConfig, layer: int, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    D, H, Q, C = config.hidden_size, config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
    yield prefix + "q_a_proj.weight", (Q, D)
    yield prefix + "q_a_layernorm.weight", (Q,)
    yield prefix + "q_b_proj.weight", (H * config.qk_head_dim, Q)
    yield prefix + "kv_a_proj_with_mqa.weight", (config.latent_dim, D)
    yield prefix + "kv_a_layernorm.weight", (C,)
    yield prefix + "kv_b_proj.weight", (H * (config.qk_nope_head_dim + config.v_head_dim), C)
    yield prefix + "o_proj.weight", (D, H * config.v_head_dim)
    if config.has_indexer(layer):
        yield prefix + "indexer.wq_b.weight", (config.index_n_heads * config.index_head_dim, Q)
        yield prefix + "indexer.wk.weight", (config.index_head_dim, D)
        yield prefix + "indexer.k_norm.weight", (config.index_head_dim,)
        yield prefix + "indexer.k_norm.bias", (config.index_head_dim,)
        yield prefix + "indexer.weights_proj.weight", (config.index_n_heads, D)


def _mlp(config: ModelConfig, layer: int, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    D, width = config.hidden_size, config.moe_intermediate_size
    if config.is_dense(layer):
        yield from _gated(prefix, D, config.intermediate_size)
        return
    yield prefix + "gate.weight", (config.n_routed_experts, D)
    yield prefix + "gate.e_score_correction_bias", (config.n_routed_experts,)
    for expert in range(config.n_routed_experts):
        yield from _gated(f"{prefix}experts.{expert}.", D, width)
    yield from _gated(prefix + "shared_experts.", D, width * config.n_shared_experts)


def _gated(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (width, hidden)
    yield prefix + "up_proj.weight", (width, hidden)
    yield prefix + "down_proj.weight", (hidden, width)

"""Named architectures, from a model for tests to the released ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from yunque.core.errors import ConfigError, unknown
from yunque.model.config import ModelConfig, index_share_schedule


def _glm5() -> ModelConfig:
    """GLM-5 and 5.1 (released ``config.json``; GLM-5 report, table 10)."""
    return ModelConfig(
        vocab_size=154_880,
        hidden_size=6144,
        intermediate_size=12_288,
        moe_intermediate_size=2048,
        num_hidden_layers=78,
        first_k_dense_replace=3,
        num_attention_heads=64,
        q_lora_rank=2048,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=2048,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        max_position_embeddings=202_752,
        eos_token_id=(154_820, 154_827, 154_829),
        pad_token_id=154_820,
    )


def _glm52() -> ModelConfig:
    """GLM-5.2 and 5.3: indexers on 21 of 78 layers, RoPE base 8e6, context 1,048,576."""
    from dataclasses import replace

    return replace(
        _glm5(),
        indexer_types=index_share_schedule(78, freq=4, offset=3),
        index_share_for_mtp_iteration=True,
        rope_theta=8_000_000.0,
        max_position_embeddings=1_048_576,
    )


def _tiny() -> ModelConfig:
    """About 2 M parameters: the quickstart's shape at a vocabulary of 4,096."""
    return ModelConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        rope_theta=10_000.0,
        max_position_embeddings=2048,
    )


def _nano() -> ModelConfig:
    """About 0.1 M parameters, every mechanism present: for tests."""
    return ModelConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=2,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        rope_theta=10_000.0,
        max_position_embeddings=512,
    )


def _mini() -> ModelConfig:
    """7.0 M parameters at a vocabulary of 512: the shape that the speed comparison uses."""
    return ModelConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=8,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=48,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
        num_nextn_predict_layers=0,
        latent_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_position_embeddings=32_768,
    )


PRESETS: Mapping[str, Callable[[], ModelConfig]] = {
    "nano": _nano,
    "tiny": _tiny,
    "mini": _mini,
    "glm-5": _glm5,
    "glm-5.1": _glm5,
    "glm-5.2": _glm52,
    "glm-5.3": _glm52,
}


def preset(name: str) -> ModelConfig:
    """The architecture called ``name``; raises ``ConfigError`` naming the nearest valid one."""
    if name not in PRESETS:
        raise ConfigError(unknown("model preset", name, PRESETS))
    return PRESETS[name]()

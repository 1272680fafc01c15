"""Every tensor of a GGUF file of architecture ``glm-dsa``: its name, its shape, and what it is made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from yunque.core.errors import CheckpointError
from yunque.model.config import ModelConfig
from yunque.model.names import TensorSpec, role_of, tensor_specs

# Shapes: H heads, N unrotated key dimensions, V value dimensions, C latent, Q query latent, D model, R = C + rotary.

#: Side of llama.cpp's smallest Hadamard matrix.
_HADAMARD = 64
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
#: Within a layer, our name and GGUF's; the experts and the key-value projection are built from several or split.
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "eh_proj.weight": "nextn.eh_proj.weight",
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "shared_head.norm.weight": "nextn.shared_head_norm.weight",
}
_EXPERTS = {
    "gate_proj": "ffn_gate_exps.weight",
    "up_proj": "ffn_up_exps.weight",
    "down_proj": "ffn_down_exps.weight",
}


@dataclass(frozen=True)
class Source:
    """One checkpoint tensor and what becomes of it (float32 in, float32 out)."""

    name: str
    change: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as the file holds it.

    ``shape`` has the slowest axis first (the file lists it last). ``sources`` follow each other along that
    axis. All are of the same role, ``spec.role``.
    """

    name: str
    shape: tuple[int, ...]
    spec: TensorSpec
    sources: tuple[Source, ...]


def gguf_tensors(config: ModelConfig) -> Iterator[GgufTensor]:
    """The whole file's tensors, layer by layer, the MTP layer last; every checkpoint tensor is used.

    The file has one epsilon for all RMS norms. Where the latent norms have another, their inputs are scaled
    by ``s = sqrt(rms_norm_eps / latent_eps)``, which gives the same normed values:
    ``s x / sqrt(s² m + rms_norm_eps) = x / sqrt(m + latent_eps)`` with ``m`` the mean of ``x²``.

    llama.cpp turns index queries and keys by a Hadamard matrix of side 64 or more. A narrower indexer is
    widened: the key is repeated, which leaves mean and variance of its norm as they are, and the query is
    padded with zeros, so that every score is the same up to one positive factor, and every selection is too.
    """
    specs = tensor_specs(config)
    for name, gguf_name in _OUTER.items():
        yield GgufTensor(gguf_name, specs[name].shape, specs[name], (Source(name, _unchanged),))
    for layer in range(config.num_layers_with_mtp):
        prefix = f"model.layers.{layer}."
        for name, gguf_name in _LAYER.items():
            if (spec := specs.get(prefix + name)) is not None:
                change, copies = _change(config, name)
                shape = (spec.shape[0] * copies, *spec.shape[1:])
                yield GgufTensor(f"blk.{layer}.{gguf_name}", shape, spec, (Source(prefix + name, change),))
        yield from _key_value(config, layer, specs[f"{prefix}self_attn.kv_b_proj.weight"])
        if not config.is_dense(layer):
            yield from _experts(config, layer, specs)


def refuse_unsupported(config: ModelConfig) -> None:
    """Raise ``CheckpointError`` for a model that llama.cpp's ``glm-dsa`` cannot run, or would compute otherwise."""
    if config.model_type != "glm_moe_dsa":
        raise CheckpointError(f"model_type is {config.model_type!r}; GGUF is written for 'glm_moe_dsa' only")
    for name in ("rope_interleave", "indexer_rope_interleave"):
        if not getattr(config, name):
            raise CheckpointError(f"{name} is false; architecture glm-dsa of GGUF rotates pairs (2i, 2i+1) only")
    if config.index_head_dim & (config.index_head_dim - 1):
        raise CheckpointError(
            f"index_head_dim {config.index_head_dim} is no power of two; llama.cpp turns keys by a Hadamard matrix"
        )
    if config.topk_group < config.n_group == config.n_routed_experts:
        raise CheckpointError(f"n_group {config.n_group} leaves one expert a group; llama.cpp scores a group by two")


def index_width(config: ModelConfig) -> int:
    """Width of an index head in the file: the model's, at least 64."""
    return max(config.index_head_dim, _HADAMARD)


def _unchanged(values: Tensor) -> Tensor:
    return values


def _change(config: ModelConfig, name: str) -> tuple[Callable[[Tensor], Tensor], int]:
    """What is done to the tensor called ``name`` within its layer, and by how much its rows are multiplied."""
    scale = math.sqrt(config.rms_norm_eps / config.latent_eps)
    copies = index_width(config) // config.index_head_dim
    if name == "self_attn.q_a_proj.weight" and scale != 1:
        return partial(_scale_rows, rows=config.q_lora_rank, scale=scale), 1
    if name == "self_attn.kv_a_proj_with_mqa.weight" and scale != 1:
        return partial(_scale_rows, rows=config.kv_lora_rank, scale=scale), 1
    if name == "self_attn.indexer.wq_b.weight" and copies > 1:
        return partial(_pad_heads, heads=config.index_n_heads, copies=copies), copies
    if name.startswith(("self_attn.indexer.wk.", "self_attn.indexer.k_norm.")) and copies > 1:
        return partial(_repeat, copies=copies), copies
    return _unchanged, 1


def _scale_rows(values: Tensor, *, rows: int, scale: float) -> Tensor:
    values[:rows] *= scale
    return values


def _pad_heads(values: Tensor, *, heads: int, copies: int) -> Tensor:
    """Rows of ``heads`` heads, each followed by zeros until it is ``copies`` times as wide."""
    padded = values.new_zeros(heads, copies, values.shape[0] // heads, values.shape[1])
    padded[:, 0] = values.view(heads, -1, values.shape[1])
    return padded.view(copies * values.shape[0], values.shape[1])


def _repeat(values: Tensor, *, copies: int) -> Tensor:
    return values.repeat(copies, *[1] * (values.dim() - 1))


def _key_value(config: ModelConfig, layer: int, spec: TensorSpec) -> Iterator[GgufTensor]:
    """``kv_b_proj`` [H (N + V), C] as keys [H, C, N] and values [H, V, C], for the absorbed form."""
    H, C = config.num_attention_heads, config.kv_lora_rank
    N, V = config.qk_nope_head_dim, config.v_head_dim
    name = f"model.layers.{layer}.self_attn.kv_b_proj.weight"

    def keys(values: Tensor) -> Tensor:
        return values.view(H, N + V, C)[:, :N].transpose(1, 2).contiguous()

    def values_of(values: Tensor) -> Tensor:
        return values.view(H, N + V, C)[:, N:].contiguous()

    yield GgufTensor(f"blk.{layer}.attn_k_b.weight", (H, C, N), spec, (Source(name, keys),))
    yield GgufTensor(f"blk.{layer}.attn_v_b.weight", (H, V, C), spec, (Source(name, values_of),))


def _experts(config: ModelConfig, layer: int, specs: dict[str, TensorSpec]) -> Iterator[GgufTensor]:
    for matrix, gguf_name in _EXPERTS.items():
        names = [
            f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight" for expert in range(config.n_routed_experts)
        ]
        shape = (len(names), *specs[names[0]].shape)
        spec = TensorSpec(shape, role_of(names[0]))
        yield GgufTensor(f"blk.{layer}.{gguf_name}", shape, spec, tuple(Source(name, _unchanged) for name in names))

"""The architecture of one GLM-5-shaped model, under the Hugging Face key names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from yunque.core.config import from_mapping
from yunque.core.errors import ConfigError

IndexerType = Literal["full", "shared"]

_ARCHITECTURES: Mapping[str, str] = {
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
}

#: Keys of a Hugging Face config that change the numbers and that this model supports in one value only.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "tie_word_embeddings": (False,),
    "moe_layer_freq": (1,),
    "moe_router_dtype": ("float32", "fp32"),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of a model: MLA + lightning indexer + mixture of experts + MTP.

    Field names are the keys of a released ``config.json``. Layers ``0 .. first_k_dense_replace - 1`` have a
    dense MLP, the others experts. Layer ``i`` runs its own indexer when ``indexer_types[i] == "full"`` and
    reuses the selection of the nearest full layer below when it is ``"shared"`` (IndexShare, GLM-5.2/5.3).
    ``num_nextn_predict_layers`` says whether the multi-token-prediction layer exists (0 or 1): its parameters
    are shared by every prediction step.

    Raises ``ConfigError`` for shapes that cannot work; never changes a value.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int = 1
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = 1
    #: One entry per main layer; empty means that every layer is full. The MTP layer is always full.
    indexer_types: tuple[IndexerType, ...] = ()
    #: Whether later MTP steps reuse the first step's selection (GLM-5.2) or select anew.
    index_share_for_mtp_iteration: bool = False
    rms_norm_eps: float = 1e-5
    #: Epsilon of the two latent norms; ``None`` means ``rms_norm_eps`` (the trainer and the public servers),
    #: ``transformers`` uses 1e-6.
    latent_norm_eps: float | None = None
    rope_theta: float = 1_000_000.0
    #: Rotary pairs are (2i, 2i+1) when true, (i, i + d/2) when false.
    rope_interleave: bool = True
    indexer_rope_interleave: bool = True
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    model_type: Literal["glm_moe_dsa", "deepseek_v32"] = "glm_moe_dsa"

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        self._check_experts()
        self._check_indexers()
        if self.num_nextn_predict_layers not in (0, 1):
            raise ConfigError(
                f"num_nextn_predict_layers is {self.num_nextn_predict_layers}; valid: 0, 1 (one layer, unrolled)"
            )
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            raise ConfigError(
                f"first_k_dense_replace {self.first_k_dense_replace} is outside 0..{self.num_hidden_layers} layers"
            )
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim {self.qk_rope_head_dim} is odd; rotary pairs need an even width")
        for name in ("rms_norm_eps", "latent_norm_eps", "rope_theta", "routed_scaling_factor", "initializer_range"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be a number above 0")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ConfigError(f"index_head_dim {self.index_head_dim} is below qk_rope_head_dim {self.qk_rope_head_dim}")

    def _check_experts(self) -> None:
        if self.n_routed_experts % self.n_group:
            raise ConfigError(f"n_routed_experts {self.n_routed_experts} is not divisible by n_group {self.n_group}")
        if not 1 <= self.topk_group <= self.n_group:
            raise ConfigError(f"topk_group {self.topk_group} is outside 1..{self.n_group} (n_group)")
        reachable = self.n_routed_experts // self.n_group * self.topk_group
        if not 1 <= self.num_experts_per_tok <= reachable:
            raise ConfigError(
                f"num_experts_per_tok {self.num_experts_per_tok} is outside 1..{reachable} reachable experts"
            )

    def _check_indexers(self) -> None:
        if not self.indexer_types:
            return
        if len(self.indexer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"indexer_types has {len(self.indexer_types)} entries for {self.num_hidden_layers} layers"
            )
        if self.indexer_types[0] != "full":
            raise ConfigError("indexer_types[0] is 'shared', but layer 0 has no layer below to share with; use 'full'")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of one cached row: normed latent, then rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def latent_eps(self) -> float:
        return self.rms_norm_eps if self.latent_norm_eps is None else self.latent_norm_eps

    @property
    def num_layers_with_mtp(self) -> int:
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def has_indexer(self, layer: int) -> bool:
        """Whether ``layer`` (the MTP layer is ``num_hidden_layers``) owns an indexer."""
        if layer >= self.num_hidden_layers or not self.indexer_types:
            return True
        return self.indexer_types[layer] == "full"

    def is_dense(self, layer: int) -> bool:
        """Whether ``layer`` has a dense MLP instead of experts."""
        return layer < self.first_k_dense_replace

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Read a released ``config.json``; a key that asks for other numbers than ours, or holds a value of another
        type, raises ``ConfigError``."""
        try:
            return from_mapping(cls, _values_of(data))
        except (TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"a key of the config holds a value of another type: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` mapping that Hugging Face, vLLM and SGLang read."""
        skip = {"rope_theta", "indexer_types", "latent_norm_eps", "eos_token_id"}
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skip}
        out.update(
            architectures=[_ARCHITECTURES[self.model_type]],
            num_key_value_heads=self.num_attention_heads,
            head_dim=self.qk_rope_head_dim,
            hidden_act="silu",
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            attention_bias=False,
            attention_dropout=0.0,
            tie_word_embeddings=False,
            moe_layer_freq=1,
            moe_router_dtype="float32",
            eos_token_id=list(self.eos_token_id) or None,
            indexer_types=[("full" if self.has_indexer(i) else "shared") for i in range(self.num_hidden_layers)],
            mlp_layer_types=[("dense" if self.is_dense(i) else "sparse") for i in range(self.num_hidden_layers)],
            rope_parameters={"rope_theta": self.rope_theta, "rope_type": "default"},
        )
        if self.latent_norm_eps is not None:
            out["latent_norm_eps"] = self.latent_norm_eps
        return out


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
)
_POSITIVE = (*_REQUIRED, "n_shared_experts", "n_group", "topk_group", "max_position_embeddings")


def _values_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``ModelConfig`` that a released ``config.json`` gives."""
    model_type = data.get("model_type", "glm_moe_dsa")
    if model_type not in _ARCHITECTURES:
        raise ConfigError(f"model_type is {model_type!r}; valid: {', '.join(_ARCHITECTURES)}")
    for key, allowed in _FIXED.items():
        if key in data and data[key] is not None and data[key] not in allowed:
            raise ConfigError(f"config key {key} is {data[key]!r}; this model supports {allowed[0]!r} only")
    values: dict[str, Any] = {f.name: data[f.name] for f in fields(ModelConfig) if data.get(f.name) is not None}
    values.update({**_rope(data), **_experts(data), "model_type": model_type})
    missing = [name for name in (*_REQUIRED, "first_k_dense_replace", "rope_theta") if name not in values]
    if missing:
        raise ConfigError(f"config lacks {', '.join(missing)}")
    values["eos_token_id"] = _ids(data.get("eos_token_id"))
    values["indexer_types"] = _indexer_types(data, int(values["num_hidden_layers"]))
    values.setdefault("num_nextn_predict_layers", 0)
    # Without the key the layout is that of the family: transformers' GLM class has no other, DeepSeek's no key.
    values.setdefault("indexer_rope_interleave", model_type == "glm_moe_dsa")
    return values


def _rope(data: Mapping[str, Any]) -> dict[str, Any]:
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"rope type {kind!r} is not supported; valid: 'default'")
    theta = rope.get("rope_theta", data.get("rope_theta"))
    return {} if theta is None else {"rope_theta": float(theta)}


def _experts(data: Mapping[str, Any]) -> dict[str, Any]:
    types: Sequence[str] | None = data.get("mlp_layer_types")
    if types is None:
        return {}
    dense = sum(kind == "dense" for kind in types)
    if list(types) != ["dense"] * dense + ["sparse"] * (len(types) - dense):
        raise ConfigError(f"mlp_layer_types must be dense layers followed by sparse ones, got {list(types)}")
    if min(data.get("first_k_dense_replace", dense), len(types)) != dense:
        raise ConfigError(
            f"first_k_dense_replace {data['first_k_dense_replace']} disagrees with mlp_layer_types ({dense} dense)"
        )
    return {"first_k_dense_replace": dense}


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def index_share_schedule(num_layers: int, *, freq: int, offset: int) -> tuple[IndexerType, ...]:
    """Layer ``i`` is full when ``max(i - offset + 1, 0) mod freq == 0`` (4 and 3 in GLM-5.2: 0, 1, 2, 6, 10, ...)."""
    return tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers))


def _indexer_types(data: Mapping[str, Any], num_layers: int) -> tuple[IndexerType, ...]:
    """Precedence: explicit list, pattern string of F and S, frequency and offset (defaults 1 and 2)."""
    explicit: Sequence[str] | None = data.get("indexer_types") or data.get("index_topk_pattern")
    if explicit:
        names: dict[str, IndexerType] = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
        bad = [kind for kind in explicit if kind not in names]
        if bad:
            raise ConfigError(f"indexer type {bad[0]!r} is unknown; valid: {', '.join(names)}")
        return tuple(names[kind] for kind in explicit)
    freq = max(int(data.get("index_topk_freq") or 1), 1)
    offset = data.get("index_skip_topk_offset")
    return index_share_schedule(num_layers, freq=freq, offset=2 if offset is None else int(offset))

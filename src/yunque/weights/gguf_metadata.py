"""What a GGUF file says about its model: the architecture's numbers, the tokenizer, the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from yunque.core.errors import CheckpointError
from yunque.core.logging import get_logger
from yunque.model.config import ModelConfig
from yunque.model.indexer import KEY_NORM_EPS
from yunque.text.chat_template import CHAT_TEMPLATE_FILE
from yunque.text.tokenizer import SPLIT_PATTERN, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from yunque.weights.gguf_names import index_width

if TYPE_CHECKING:
    from gguf import GGUFWriter

ARCHITECTURE = "glm-dsa"
#: llama.cpp's name for a way of cutting text before merging, by the expression in ``tokenizer.json``.
PRE_TOKENIZERS: Mapping[str, str] = {
    SPLIT_PATTERN: "qwen2",
    SPLIT_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"): "glm4",
}
#: Ids that end a generation, in the order of ``eos_token_id``: GLM's are endoftext, user, observation.
_END_KEYS = ("eos", "eot", "eom")
_END_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5

_logger = get_logger(__name__)


def add_architecture(writer: GGUFWriter, config: ModelConfig) -> None:
    """All keys that llama.cpp reads for ``glm-dsa``; the latent cache is declared as one key head (absorbed)."""
    prefix = ARCHITECTURE
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers_with_mtp)
    writer.add_nextn_predict_layers(config.num_nextn_predict_layers)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.latent_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_layer_norm_eps(KEY_NORM_EPS)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_uint32(f"{prefix}.expert_gating_func", 2)  # sigmoid
    if config.topk_group < config.n_group:  # all groups kept is no grouping, and llama.cpp refuses it as one
        writer.add_uint32(f"{prefix}.expert_group_count", config.n_group)
        writer.add_uint32(f"{prefix}.expert_group_used_count", config.topk_group)
    writer.add_uint32(f"{prefix}.attention.indexer.head_count", config.index_n_heads)
    writer.add_uint32(f"{prefix}.attention.indexer.key_length", index_width(config))
    writer.add_uint32(f"{prefix}.attention.indexer.top_k", config.index_topk)
    types = [config.has_indexer(layer) for layer in range(config.num_hidden_layers)]
    writer.add_array(f"{prefix}.attention.indexer.types", types)


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE as GGUF holds it: the spelling and type of every id, merges as ``"left right"``."""

    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    pre_tokenizer: str

    @classmethod
    def read(cls, content: Mapping[str, Any], vocab_size: int) -> Vocabulary:
        """From a parsed ``tokenizer.json``. Ids up to ``vocab_size`` that it lacks become ``[PADn]``, unused.

        Raises ``CheckpointError`` when the tokenizer has ids that the model has no embedding for, or is no
        BPE.
        """
        model = content.get("model", {})
        if not isinstance(model.get("vocab"), dict) or not isinstance(model.get("merges"), list):
            raise CheckpointError(f"{TOKENIZER_FILE}: no vocab and merges; GGUF takes the tokenizer of a BPE")
        spelled = {index: (token, _NORMAL) for token, index in model["vocab"].items()}
        for token in content.get("added_tokens", []):
            spelled[token["id"]] = (token["content"], _CONTROL if token["special"] else _USER_DEFINED)
        if max(spelled) >= vocab_size:
            token, _ = spelled[max(spelled)]
            raise CheckpointError(
                f"{TOKENIZER_FILE}: token {token!r} has id {max(spelled)}, the model's vocab_size is {vocab_size}"
            )
        rows = [spelled.get(index, (f"[PAD{index}]", _UNUSED)) for index in range(vocab_size)]
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        return cls([row[0] for row in rows], [row[1] for row in rows], merges, pre_tokenizer_of(content))

    def id_of(self, token: str) -> int | None:
        return self.tokens.index(token) if token in self.tokens else None


def pre_tokenizer_of(content: Mapping[str, Any]) -> str:
    """llama.cpp's name for the cutting expression of a ``tokenizer.json``.

    Ours is ``qwen2``'s (single digits), the GLM releases' ``glm4``'s (up to three digits). For any other
    expression the nearer of the two is taken, with a warning: text may then be cut differently.
    """
    patterns = list(_patterns(content.get("pre_tokenizer")))
    if len(patterns) == 1 and patterns[0] in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[patterns[0]]
    nearest = "glm4" if any(r"\p{N}{1,3}" in pattern for pattern in patterns) else "qwen2"
    _logger.warning("%s: %s is no expression GGUF has a name for; %s is the nearest", TOKENIZER_FILE, patterns, nearest)
    return nearest


def add_text(writer: GGUFWriter, config: ModelConfig, files: Mapping[str, bytes]) -> None:
    """Tokenizer, ids that end a generation, and chat template, from a checkpoint's text files.

    Raises ``CheckpointError`` without a ``tokenizer.json``: llama.cpp's server dies of a file that has no
    vocabulary.
    """
    if TOKENIZER_FILE not in files:
        raise CheckpointError(f"the checkpoint has no {TOKENIZER_FILE}; a GGUF file holds the tokenizer too")
    if (template := _chat_template(files)) is not None:
        writer.add_chat_template(template)
    vocabulary = Vocabulary.read(json.loads(files[TOKENIZER_FILE]), config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    for key, index in _special_ids(config, vocabulary).items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", index)


def _special_ids(config: ModelConfig, vocabulary: Vocabulary) -> dict[str, int]:
    """``bos`` is [gMASK], which starts every rendered conversation but is never added; the ends are the config's."""
    named = [index for token in _END_TOKENS if (index := vocabulary.id_of(token)) is not None]
    ends = list(config.eos_token_id) or named
    if len(ends) > len(_END_KEYS):
        _logger.warning("GGUF names %d ids that end a generation; left out: %s", len(_END_KEYS), ends[len(_END_KEYS) :])
    found = dict(zip(_END_KEYS, ends, strict=False))
    first = {"bos": vocabulary.id_of("[gMASK]"), "padding": config.pad_token_id}
    return found | {key: index for key, index in first.items() if index is not None}


def _chat_template(files: Mapping[str, bytes]) -> str | None:
    if CHAT_TEMPLATE_FILE in files:
        return files[CHAT_TEMPLATE_FILE].decode("utf-8")
    template = json.loads(files.get(TOKENIZER_CONFIG_FILE, b"{}")).get("chat_template")
    return template if isinstance(template, str) else None


def _patterns(pre_tokenizer: Any) -> list[str]:
    """The expressions of every ``Split`` in a pre-tokenizer, nested sequences included."""
    if not isinstance(pre_tokenizer, dict):
        return []
    if pre_tokenizer.get("type") == "Split":
        return [str(pre_tokenizer.get("pattern", {}).get("Regex", pre_tokenizer.get("pattern")))]
    return [pattern for part in pre_tokenizer.get("pretokenizers", []) for pattern in _patterns(part)]

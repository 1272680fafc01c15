"""Drawn tiny configurations, models with weights that leave nothing at a neutral value, and batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from yunque.model.batch import PackedBatch
from yunque.model.cache import PackedView, SequenceCache
from yunque.model.config import ModelConfig
from yunque.model.forward import ForwardMode, ForwardOutput
from yunque.model.names import Role, role_of
from yunque.model.transformer import Transformer


def draw_config(seed: int, **fixed: Any) -> ModelConfig:
    """A tiny architecture of random shapes: odd head counts, unequal widths, groups, shared indexers."""
    draw = random.Random(seed)
    num_layers = draw.randint(2, 4)
    n_group = draw.choice([1, 2, 3])
    topk_group = draw.randint(1, n_group)
    per_group = draw.randint(2, 4)
    rope = draw.choice([4, 8])
    types = ("full", *(draw.choice(["full", "shared"]) for _ in range(num_layers - 1)))
    nope, value = draw.sample([4, 5, 8, 9, 12], 2)
    values: dict[str, Any] = {
        "vocab_size": draw.choice([37, 64]),
        "hidden_size": draw.choice([20, 32]),
        "intermediate_size": draw.choice([28, 48]),
        "moe_intermediate_size": draw.choice([12, 20]),
        "num_hidden_layers": num_layers,
        "num_attention_heads": draw.choice([1, 3, 4, 5]),
        "q_lora_rank": draw.choice([12, 20]),
        "kv_lora_rank": draw.choice([8, 16]),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "index_n_heads": draw.choice([3, 4, 16]),
        "index_head_dim": draw.choice([rope, rope + 3, 16]),
        "index_topk": draw.choice([3, 5, 8]),
        "n_routed_experts": n_group * per_group,
        "num_experts_per_tok": draw.randint(1, min(3, topk_group * per_group)),
        "first_k_dense_replace": draw.randint(0, num_layers - 1),
        "n_shared_experts": draw.choice([1, 2]),
        "n_group": n_group,
        "topk_group": topk_group,
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "norm_topk_prob": draw.random() < 0.8,
        "indexer_types": types,
        "rms_norm_eps": draw.choice([1e-5, 1e-6]),
        "rope_theta": 10_000.0,
        "max_position_embeddings": 256,
    }
    if "num_hidden_layers" in fixed and "indexer_types" not in fixed:
        values["indexer_types"] = ()
    return ModelConfig(**values | fixed)


@torch.no_grad()
def randomise(model: Transformer, seed: int = 0) -> Transformer:
    """Normal matrices that keep a vector's size, norms between 0.5 and 1.5, small biases; returns the model."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        role = role_of(name)
        if role in (Role.NORM, Role.INDEXER_NORM) and name.endswith("weight"):
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
        elif tensor.dim() == 1:
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
        else:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)
    return model


def build(config: ModelConfig, seed: int = 0, *, batch_invariant: bool = False) -> Transformer:
    """A model in fp32 with random weights."""
    return randomise(Transformer(config, batch_invariant=batch_invariant), seed)


def random_documents(config: ModelConfig, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Documents of the given lengths."""
    draw = random.Random(seed)
    return [[draw.randrange(config.vocab_size) for _ in range(length)] for length in lengths]


def random_batch(config: ModelConfig, lengths: Sequence[int], seed: int = 0) -> PackedBatch:
    """A packed batch whose loss mask has zeros, ones and fractions."""
    draw = random.Random(seed + 1)
    masks = [[draw.choice([0.0, 1.0, 1.0, 0.5]) for _ in range(length)] for length in lengths]
    return PackedBatch.from_documents(random_documents(config, lengths, seed), masks)


def run(model: Transformer, batch: PackedBatch, **mode: Any) -> ForwardOutput:
    """A traced pass over a packed batch."""
    return model(batch.tokens_T, PackedView(batch), ForwardMode(trace=True, **mode))


@torch.no_grad()
def run_in_steps(
    model: Transformer, documents: Sequence[Sequence[int]], steps: Sequence[Sequence[int]], **mode: Any
) -> list[Tensor]:
    """Log-probabilities [length, V] of every document, fed through one cache.

    ``steps[i][s]`` tokens of document ``s`` are taken in step ``i``.
    """
    capacity = max(len(document) for document in documents) + 3
    dtype = model.lm_head.weight.dtype
    cache = SequenceCache(model.config, num_sequences=len(documents), capacity=capacity, dtype=dtype)
    parts: list[list[Tensor]] = [[] for _ in documents]
    for counts in steps:
        spans = [(s, cache.lengths[s], count) for s, count in enumerate(counts)]
        tokens = [token for s, start, count in spans for token in documents[s][start : start + count]]
        out = model(torch.tensor(tokens, dtype=torch.int64), cache.step(counts), ForwardMode(**mode))
        log_probs = model.logits(out.hidden_TD).log_softmax(-1)
        for s, part in enumerate(log_probs.split(list(counts))):
            parts[s].append(part)
    return [torch.cat(part) for part in parts]


def kept_counts(output: ForwardOutput, layer: int) -> Tensor:
    """How many keys each query of ``layer`` kept, int64 [T]; fails where nothing was selected."""
    assert output.trace is not None
    selection = output.trace.selections[layer]
    assert selection is not None, f"layer {layer} has no selection"
    return (selection.positions_TK >= 0).sum(dim=1)


def gradients(model: Transformer) -> dict[str, Tensor]:
    """A copy of every gradient that exists, by name; forgets them."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def largest_difference(left: Tensor, right: Tensor) -> float:
    """max |left - right|, relative to the largest value of ``right`` where that exceeds 1."""
    assert left.shape == right.shape
    if not left.numel():
        return 0.0
    return (left - right).abs().max().item() / max(1.0, right.abs().max().item())

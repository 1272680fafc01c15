"""The models that the engine's benchmark decodes with: random weights, float32, with all that the shapes cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from yunque.core.seeds import Seeds
from yunque.model import ModelConfig, Transformer, init_weights, preset
from yunque.text.tokenizer import train_bpe
from yunque.weights import save_model, write_gguf


def hundred_million() -> ModelConfig:
    """107 M parameters, 29 M of them active: 32 experts of which 4 are chosen, 256 kept keys, 16 index heads."""
    return ModelConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        moe_intermediate_size=256,
        num_hidden_layers=8,
        first_k_dense_replace=1,
        num_attention_heads=8,
        q_lora_rank=256,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        index_n_heads=16,
        index_head_dim=64,
        index_topk=256,
        n_routed_experts=32,
        num_experts_per_tok=4,
        num_nextn_predict_layers=0,
        latent_norm_eps=1e-6,  # what transformers computes with
        rope_theta=10_000.0,
        max_position_embeddings=32_768,
    )


def model_of(config: ModelConfig, *, batch_invariant: bool = False) -> Transformer:
    """Random weights, made ready for inference as ``Engine.load`` does."""
    model = Transformer(config, batch_invariant=batch_invariant).eval()
    init_weights(model, torch.Generator().manual_seed(Seeds(0).stream("weights") % 2**63))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.join_projections()


@dataclass(frozen=True)
class Subject:
    """One model, and the suffix of its figures. Files go into ``scratch``."""

    name: str
    suffix: str
    model: Transformer
    scratch: Path

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @cached_property
    def gguf(self) -> Path:
        """The same weights as a float32 GGUF file, with a small vocabulary (a server wants one; prompts are ids)."""
        tokenizer = train_bpe([Path(__file__).read_text(encoding="utf-8")], 400)
        text = self.scratch / f"{self.name}-text"
        tokenizer.save(text)
        files = {path.name: path.read_bytes() for path in text.iterdir()}
        folder = save_model(self.scratch / self.name, self.config, self.model.state_dict(), files=files)
        return write_gguf(folder, self.scratch / f"{self.name}.gguf", dtype="f32")

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def subjects(scratch: Path, *, quick: bool) -> list[Subject]:
    """The small and the large model; in a smoke run two smaller ones."""
    small, large = preset("mini"), hundred_million()
    if quick:
        small, large = replace(preset("nano"), vocab_size=512), replace(preset("tiny"), vocab_size=512)
    return [
        Subject("tiny" if suffix == "" else "100m", suffix, model_of(config), scratch)
        for config, suffix in ((small, ""), (large, "_100m"))
    ]


def prompts_of(config: ModelConfig, batch: int, length: int, seed: int = 0) -> list[list[int]]:
    """``batch`` prompts of random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (batch, length), generator=generator).tolist()

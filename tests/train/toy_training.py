"""A real, small model with the parameter names of a GLM-5, and its loss: what the loop is tested on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from yunque.model.batch import PackedBatch
from yunque.model.config import ModelConfig
from yunque.model.names import TensorSpec, role_of
from yunque.model.objectives import LossOutput, Ratio
from yunque.model.presets import preset
from yunque.train.optimizer import Optimizer
from yunque.train.roles import OptimizerConfig, assign
from yunque.train.schedule import Constant, Pace
from yunque.train.state import TrainState

VOCAB, WIDTH = 32, 16


def toy_config() -> ModelConfig:
    return preset("nano")


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 24, bias=False)
        self.up_proj = nn.Linear(WIDTH, 24, bias=False)
        self.down_proj = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, WIDTH))
        self.register_buffer("e_score_correction_bias", torch.zeros(4))


class _Layer(nn.Module):
    def __init__(self, has_router: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH)
        self.mlp = _Mlp()
        if has_router:
            self.mlp.gate = _Gate()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.input_layernorm(x))


class ToyModel(nn.Module):
    """Embedding, two MLP layers (the second with a router whose load the loss reports), head."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.model.layers = nn.ModuleList([_Layer(False), _Layer(True)])
        self.model.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.to(dtype)

    def hidden(self, tokens_T: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens_T)
        for layer in self.model.layers:
            x = layer(x)
        return self.model.norm(x)

    def specs(self) -> dict[str, TensorSpec]:
        return {n: TensorSpec(tuple(p.shape), role_of(n)) for n, p in self.named_parameters()}

    @property
    def bias_E(self) -> Tensor:
        return self.model.layers[1].mlp.gate.e_score_correction_bias


def toy_loss(model: ToyModel, batch: PackedBatch) -> LossOutput:
    """Next-token cross-entropy; every token "goes" to expert token mod 4."""
    hidden_TD = model.hidden(batch.tokens_T)
    logits_TV = model.lm_head(hidden_TD).float() + (model.model.layers[1].mlp.gate.weight.float().sum() * 0)
    loss_T = torch.nn.functional.cross_entropy(logits_TV, batch.targets_T.clamp(min=0), reduction="none")
    total, count = (loss_T * batch.loss_mask_T).sum(), batch.loss_mask_T.sum()
    load_LE = torch.bincount(batch.tokens_T % 4, minlength=4)[None]
    return LossOutput(total, count, {"loss": Ratio(total.detach(), count)}, load_LE)


class ToyLoader:
    """Endless reproducible batches of two documents, with a position that can be saved."""

    def __init__(self, tokens: int = 24, seed: int = 7) -> None:
        self.tokens, self.seed, self.index = tokens, seed, 0

    def __iter__(self) -> Iterator[PackedBatch]:
        while True:
            generator = torch.Generator().manual_seed(self.seed * 1000 + self.index)
            start = int(torch.randint(0, VOCAB, (), generator=generator))
            first, second = self.tokens // 3, self.tokens - self.tokens // 3
            self.index += 1
            documents = [[(start + i) % VOCAB for i in range(n)] for n in (first, second)]
            yield PackedBatch.from_documents(documents)

    def state(self) -> dict[str, Any]:
        return {"index": self.index}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.index = state["index"]


def toy_state(model: ToyModel | None = None, *, clip: float = 1e9, lr: float = 0.01, **values: Any) -> TrainState:
    """AdamW at a constant rate, steps of one batch of 24 tokens."""
    model = model or ToyModel()
    config = OptimizerConfig(kind="adamw", clip_norm=clip)
    optimizer = Optimizer(model, assign(model.specs(), config, toy_config()), config)
    fields = {"schedule": Constant(lr_peak=lr), "pace": Pace(microbatch_tokens=24), "total_tokens": 2400}
    return TrainState(model=model, optimizer=optimizer, **(fields | values))

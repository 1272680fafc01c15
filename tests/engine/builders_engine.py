"""Small engines over drawn models, and what a plain forward pass says about the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from builders import build, draw_config

from yunque.engine.core import EngineCore
from yunque.engine.settings import EngineSettings
from yunque.model.batch import PackedBatch
from yunque.model.cache import PackedView
from yunque.model.config import ModelConfig
from yunque.model.transformer import Transformer
from yunque.protocol.generation import Completion, GenerationRequest, SamplingParams, TokenDelta


def engine_config(seed: int, **fixed: object) -> ModelConfig:
    """A drawn architecture with one prediction layer."""
    return draw_config(seed, num_nextn_predict_layers=1, **fixed)


def make_core(
    model: Transformer | int = 0, *, num_pages: int = 256, page_size: int = 4, **settings: object
) -> EngineCore:
    """An engine over ``model`` (or a drawn one of that seed)."""
    if isinstance(model, int):
        model = build(engine_config(model), model)
    return EngineCore(model, EngineSettings(page_size=page_size, **settings), num_pages=num_pages)


class Collector:
    """A sink that keeps a reply's deltas."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []

    def __call__(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)

    @property
    def is_finished(self) -> bool:
        return bool(self.deltas) and self.deltas[-1].finish is not None


def submit(core: EngineCore, id: str, tokens: Sequence[int], **sampling: object) -> Collector:
    """Queue a request; ``priority`` and ``prompt_logprobs`` go to the request, the rest to its sampling."""
    own = {
        name: sampling.pop(name)
        for name in ("priority", "prompt_logprobs", "session", "cache_salt")
        if name in sampling
    }
    request = GenerationRequest(id, tuple(tokens), SamplingParams(**sampling), **own)
    collector = Collector()
    core.enqueue(core.intake.prepare(request), collector)
    return collector


def finish(core: EngineCore, *collectors: Collector, max_steps: int = 2000) -> list[Completion]:
    """Step until all are finished; their completions."""
    for _ in range(max_steps):
        if all(c.is_finished for c in collectors):
            break
        core.step()
    return [Completion.of(c.deltas, prompt_tokens=0) for c in collectors]


def complete(core: EngineCore, tokens: Sequence[int], **sampling: object) -> Completion:
    """One request alone."""
    return finish(core, submit(core, "only", tokens, **sampling))[0]


def training_logits(model: Transformer, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of the forward pass that training runs, gradients on."""
    batch = PackedBatch.from_documents([list(tokens)])
    return model.logits(model(batch.tokens_T, PackedView(batch)).hidden_TD).detach()


def training_logprobs(model: Transformer, prompt: Sequence[int], reply: Sequence[int]) -> torch.Tensor:
    """Log-probability of every token of ``reply`` after ``prompt`` by that pass."""
    logprobs = torch.log_softmax(training_logits(model, [*prompt, *reply]), -1)
    rows = logprobs[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(reply)[:, None])[:, 0]

"""Decode speed of our engine, one step at a time in this thread, and the floor that memory sets."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from engine_models import Subject

from yunque.engine import EngineCore, EngineSettings, GenerationRequest, SamplingParams, TokenDelta
from yunque.engine.pages import pages_for
from yunque.model import ModelConfig, Transformer
from yunque.model.names import Role, module_specs

PAGE_SIZE = 16
#: Read at once where bandwidth is measured: far more than any cache holds.
SUMMED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Pace:
    """CPU seconds of ``steps`` decode steps that made ``tokens`` tokens."""

    seconds: float
    steps: int
    tokens: int

    @property
    def ms_per_step(self) -> float:
        return self.seconds / self.steps * 1e3

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Inbox:
    """A sink that counts what one request got."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_finished = False
        self.cached_tokens = 0

    def __call__(self, delta: TokenDelta) -> None:
        self.tokens += delta.tokens
        self.is_finished = delta.finish is not None
        self.cached_tokens += delta.cached_tokens or 0


def core_for(model: Transformer, num_tokens: int, *, num_requests: int = 1, num_drafts: int = 0) -> EngineCore:
    """An engine whose cache holds ``num_requests`` requests of ``num_tokens`` tokens each."""
    pages = num_requests * (pages_for(num_tokens + num_drafts, PAGE_SIZE) + 1) + 8
    settings = EngineSettings(page_size=PAGE_SIZE, num_drafts=num_drafts)
    return EngineCore(model, settings, num_pages=pages)


def submit(core: EngineCore, id: str, prompt: Sequence[int], sampling: SamplingParams) -> Inbox:
    inbox = Inbox()
    core.enqueue(core.intake.prepare(GenerationRequest(id, tuple(prompt), sampling)), inbox)
    return inbox


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=count)


class Decoding:
    """All of ``prompts`` (equally long) in the middle of their replies, at most ``most_steps`` steps long.

    The prompts are computed first and found in the prefix cache afterwards, so that all begin at the same step.
    """

    def __init__(self, model: Transformer, prompts: Sequence[Sequence[int]], most_steps: int) -> None:
        self._core = core_for(model, len(prompts[0]) + most_steps + 2, num_requests=len(prompts))
        self._inboxes: list[Inbox] = []
        for count in (0, most_steps + 2):
            self._inboxes = [submit(self._core, str(i), prompt, greedy(count)) for i, prompt in enumerate(prompts)]
            while not all(inbox.tokens or inbox.is_finished for inbox in self._inboxes):
                self._core.step()
        assert all(len(inbox.tokens) == 1 for inbox in self._inboxes), "not all prompts began at the same step"

    def run(self, steps: int) -> Pace:
        """The next ``steps`` decode steps of all."""
        before = sum(len(inbox.tokens) for inbox in self._inboxes)
        started = time.process_time()
        for _ in range(steps):
            self._core.step()
        seconds = time.process_time() - started
        tokens = sum(len(inbox.tokens) for inbox in self._inboxes) - before
        assert tokens == steps * len(self._inboxes), f"{tokens} tokens in {steps} steps"
        return Pace(seconds, steps, tokens)


def serve_mixed(model: Transformer, batch: int, *, longest: int, seed: int) -> Pace:
    """``batch`` requests of unequal prompts and replies at once, prefill included; ``tokens`` are the replies'."""
    draw = random.Random(seed)
    lengths = [(draw.randint(longest // 16, longest), draw.randint(longest // 32, longest // 8)) for _ in range(batch)]
    core = core_for(model, longest + longest // 8, num_requests=batch)
    for i, (prompt, reply) in enumerate(lengths):
        submit(core, str(i), [draw.randrange(model.config.vocab_size) for _ in range(prompt)], greedy(reply))
    started, steps = time.process_time(), 0
    while core.has_work:
        core.step()
        steps += 1
    return Pace(time.process_time() - started, steps, sum(reply for _, reply in lengths))


def read_bytes_per_s(repetitions: int = 7) -> float:
    """What one thread reads of memory: the median over sums of a large array."""
    array = torch.ones(SUMMED_BYTES // 4)
    rates = []
    for _ in range(repetitions):
        started = time.process_time()
        array.sum()
        rates.append(SUMMED_BYTES / (time.process_time() - started))
    return statistics.median(rates)


def bytes_per_step(config: ModelConfig, context: int) -> int:
    """What decoding one token after ``context`` others must read, float32: the weights that take part (of the routed
    experts the chosen ones, of the embedding nothing), the index keys of all positions where there is a choice, and
    the latents that are attended to."""
    weights = 0
    for name, spec in module_specs(config).items():
        if spec.role is Role.EMBEDDING or name.startswith(f"model.layers.{config.num_hidden_layers}."):
            continue  # one row is read; the prediction layer is not run
        size = torch.Size(spec.shape).numel()
        weights += size * config.num_experts_per_tok // config.n_routed_experts if spec.role is Role.EXPERT else size
    seen = min(context, config.index_topk)
    indexed = sum(config.has_indexer(layer) for layer in range(config.num_hidden_layers))
    keys = indexed * config.index_head_dim * context if context > config.index_topk else 0
    return 4 * (weights + keys + config.num_hidden_layers * config.latent_dim * seen)


def floor_seconds(subject: Subject, context: int, bytes_per_s: float) -> float:
    """Least time of a decode step of one sequence."""
    return bytes_per_step(subject.config, context) / bytes_per_s

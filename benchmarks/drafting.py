"""What drafts of the multi-token-prediction layer bring: a model trained here, with and without them."""

from __future__ import annotations

import io
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding import PAGE_SIZE, Pace, submit
from rich.console import Console

from yunque.engine import EngineCore, EngineSettings, SamplingParams
from yunque.engine.speculation import Acceptance
from yunque.model import Transformer
from yunque.text import Tokenizer
from yunque.train.run import execute
from yunque.train.settings import run_from_mapping
from yunque.weights import load_model

VOCABULARY = 768
PROMPT_TOKENS = 96
NEW_TOKENS = 192
DRAFTS = (1, 2, 3)


@dataclass(frozen=True)
class Trained:
    """A model with a prediction layer, and a prompt of unseen text for each seed."""

    model: Transformer
    prompts: list[list[int]]


@dataclass(frozen=True)
class Drafted:
    """A reply's pace, and its tokens (for a seed, equal with and without drafts where acceptance is coupled)."""

    pace: Pace
    tokens: list[int]

    @property
    def acceptance_length(self) -> float:
        """Tokens of a verification step."""
        return self.pace.tokens / self.pace.steps


def records(seed: int, count: int) -> str:
    """Lines of a made-up tool log: fixed keys, counted steps, few names, and numbers that nobody can foresee."""
    draw, lines = random.Random(seed), []
    step = draw.randrange(100)
    for _ in range(count):
        step += 1
        tool = draw.choice(("read_file", "search", "edit", "run_tests"))
        path = f"src/{draw.choice(('core', 'engine', 'serve'))}/{draw.choice(('pages', 'sampler', 'router'))}.py"
        record = {"step": step, "tool": tool, "arguments": {"path": path, "line": draw.randrange(100)}, "status": "ok"}
        lines.append(json.dumps(record))
    return "\n".join(lines) + "\n"


def train(scratch: Path, seeds: Sequence[int], *, quick: bool) -> Trained:
    """One dense stage of the ``tiny`` shape with the prediction layer unrolled three times."""
    texts = scratch / "texts"
    texts.mkdir()
    for number in range(20 if quick else 200):
        (texts / f"{number}.txt").write_text(records(number, 40), encoding="utf-8")
    steps = 2 if quick else 80
    run = {
        "name": "drafting",
        "output": str(scratch / "run"),
        "device": "cpu",
        "threads": 1,
        # Every context here is shorter than index_topk: the indexer, which this stage does not train, has no say.
        "model": {"preset": "tiny", "vocab_size": VOCABULARY, "num_hidden_layers": 8, "index_topk": 512},
        "tokenizer": {"vocab_size": VOCABULARY, "sources": ["records"], "max_bytes": 200_000},
        "data": {"held_out_batches": 1, "sources": {"records": {"kind": "text", "path": str(texts)}}},
        "stage": [
            {
                "kind": "pretrain",
                "schedule": {"kind": "constant", "lr_peak": 4e-3},
                "mtp_steps": 3,
                "sequence_length": 256,
                "tokens_per_step": 1024,
                "tokens": 1024 * steps,
                "sources": ["records"],
            }
        ],
    }
    summary = execute(run_from_mapping(run), Console(file=io.StringIO()))
    tokenizer = Tokenizer.load(summary.model)
    prompts = [tokenizer.encode(records(10_000 + seed, 40))[:PROMPT_TOKENS] for seed in seeds]
    model = load_model(summary.model).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Trained(model.join_projections(), prompts)


def reply(model: Transformer, prompt: list[int], sampling: SamplingParams, settings: EngineSettings) -> Drafted:
    """One reply alone, timed from its first token to its last."""
    core = EngineCore(model, settings, num_pages=64)
    inbox = submit(core, "only", prompt, sampling)
    while not inbox.tokens:
        core.step()
    started, before, steps = time.process_time(), len(inbox.tokens), 0
    while core.has_work:
        core.step()
        steps += 1
    pace = Pace(time.process_time() - started, steps, len(inbox.tokens) - before)
    return Drafted(pace, inbox.tokens)


def drafting_rows(trained: Trained, *, quick: bool) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Greedy with each number of drafts, and at temperature 1 by both acceptance rules with the best of them."""
    greedy = {
        count: _compare(trained, SamplingParams(temperature=0), count, "coupled", quick=quick) for count in DRAFTS
    }
    best = max(DRAFTS, key=lambda count: greedy[count]["ratio"])
    rows: list[dict[str, Any]] = [_row(f"greedy, {count} drafts", result) for count, result in greedy.items()]
    rules: tuple[Acceptance, ...] = ("coupled", "rejection")
    for rule in rules:
        result = _compare(trained, SamplingParams(temperature=1, seed=1), best, rule, quick=quick)
        rows.append(_row(f"temperature 1, {best} drafts, {rule}", result))
    return rows, {"mtp_acceptance_length": greedy[best]["length"], "mtp_speedup": greedy[best]["ratio"]}


def _compare(
    trained: Trained, sampling: SamplingParams, num_drafts: int, rule: Acceptance, *, quick: bool
) -> dict[str, float]:
    """Medians over the prompts: tokens of a step, speed with and without drafts, and ratio."""
    sampling = SamplingParams(
        temperature=sampling.temperature, seed=sampling.seed, max_new_tokens=24 if quick else NEW_TOKENS
    )
    plain, drafting = EngineSettings(page_size=PAGE_SIZE), _with_drafts(num_drafts, rule)
    reply(trained.model, trained.prompts[0], sampling, drafting)  # warm up
    pairs = []
    for prompt in trained.prompts:
        without = reply(trained.model, prompt, sampling, plain)
        with_drafts = reply(trained.model, prompt, sampling, drafting)
        assert rule == "rejection" or without.tokens == with_drafts.tokens, "drafts changed the reply"
        pairs.append((without, with_drafts))
    ratios = [drafts.pace.tokens_per_s / none.pace.tokens_per_s for none, drafts in pairs]
    return {
        "length": statistics.median(drafts.acceptance_length for _, drafts in pairs),
        "plain": statistics.median(none.pace.tokens_per_s for none, _ in pairs),
        "drafting": statistics.median(drafts.pace.tokens_per_s for _, drafts in pairs),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def _with_drafts(count: int, rule: Acceptance) -> EngineSettings:
    return EngineSettings(page_size=PAGE_SIZE, num_drafts=count, acceptance=rule)


def _row(case: str, result: dict[str, float]) -> dict[str, Any]:
    return {
        "case": f"{case}: {result['length']:.2f} tokens a step",
        "against": "no drafts",
        "unit": "tokens/s",
        "yunque": result["drafting"],
        "other": result["plain"],
        **{key: result[key] for key in ("ratio", "least", "most")},
    }

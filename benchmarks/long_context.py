"""200,000 tokens of context, and 131,072 tokens of one reply, within memory that is stated beforehand.

    python benchmarks/long_context.py             # about eleven minutes on one core
    python benchmarks/long_context.py --quick     # 2,048 and 1,024 tokens

The ``nano`` shape with one indexer that all layers share (GLM-5.2's IndexShare), random weights, float32, one thread.
Before anything runs, the size of the cache is printed, as ``yunque serve`` sizes it, and an allowance for one step's
work; resident memory may grow by no more, or the command fails. The first request reads the long prompt and makes a few
tokens; the second makes the long reply to a short prompt.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import options, report
from decoding import core_for, greedy, submit
from engine_models import model_of, prompts_of

from yunque.engine import EngineCore, EngineSettings
from yunque.engine.loading import size_cache
from yunque.engine.page_store import bytes_per_token
from yunque.model import ModelConfig, Transformer, preset
from yunque.ops.device import free_memory_bytes, peak_memory_bytes

MIB = 2**20
#: What one step, the tokens as Python numbers, and the allocator's slack may take: it does not grow with the model's
#: cache, only a little with the tokens.
WORK_BYTES = 256 * MIB
SHORT_PROMPT = 32
SHORT_REPLY = 32
PROGRESS_S = 20.0


@dataclass(frozen=True)
class Lengths:
    """Tokens of the long prompt and of the long reply."""

    context: int
    output: int

    @property
    def longest(self) -> int:
        return max(self.context + SHORT_REPLY, self.output + SHORT_PROMPT)


class Progress:
    """A line every ``PROGRESS_S`` seconds."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._started = self._told = time.monotonic()

    def tell(self, done: int) -> None:
        now = time.monotonic()
        if now - self._told < PROGRESS_S:
            return
        self._told = now
        took = f"{now - self._started:.0f} s"
        print(f"{self._what}: {done} of {self._total} tokens, {took}, {resident_bytes() / MIB:.0f} MiB", flush=True)


def config_for(longest: int) -> ModelConfig:
    return replace(
        preset("nano"),
        num_nextn_predict_layers=0,
        indexer_types=("full", "shared", "shared"),
        max_position_embeddings=longest,
    )


def resident_bytes() -> int:
    """What this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def read_long_prompt(core: EngineCore, prompt: Sequence[int]) -> dict[str, Any]:
    """Chunk after chunk, then a few tokens."""
    started = time.process_time()
    inbox = submit(core, "long prompt", prompt, greedy(SHORT_REPLY))
    progress = Progress("prompt", len(prompt))
    num_steps = 0
    while not inbox.tokens:
        core.step()
        num_steps += 1
        progress.tell(num_steps * core.settings.max_step_tokens)
    prefilled = time.process_time()
    while core.has_work:
        core.step()
    assert len(inbox.tokens) == SHORT_REPLY
    return {
        "request": "long prompt",
        "prompt": len(prompt),
        "reply": SHORT_REPLY,
        "prefill s": prefilled - started,
        "ms/token at the end": (time.process_time() - prefilled) / (SHORT_REPLY - 1) * 1e3,
    }


def write_long_reply(core: EngineCore, prompt: Sequence[int], output: int) -> dict[str, Any]:
    """Token after token."""
    inbox = submit(core, "long reply", prompt, greedy(output))
    progress = Progress("reply", output)
    marks: list[float] = []
    while core.has_work:
        if len(inbox.tokens) in (1, output // 10, output - output // 10):
            marks.append(time.process_time())
        core.step()
        progress.tell(len(inbox.tokens))
    ended = time.process_time()
    assert len(inbox.tokens) == output, f"{len(inbox.tokens)} tokens of {output}"
    begun, first_tenth, last_tenth = marks
    return {
        "request": "long reply",
        "prompt": len(prompt),
        "reply": output,
        "ms/token at the start": (first_tenth - begun) / (output // 10 - 1) * 1e3,
        "ms/token at the end": (ended - last_tenth) / (output // 10) * 1e3,
        "decode s": ended - begun,
    }


def warm_up(model: Transformer) -> None:
    """Kernels and threads take their memory before it is measured."""
    core = core_for(model, 512)
    submit(core, "warm up", prompts_of(model.config, 1, 400)[0], greedy(8))
    while core.has_work:
        core.step()


def main() -> None:
    parser = options(__doc__ or "", seeds=(0,))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    args = parser.parse_args()
    torch.set_num_threads(1)
    lengths = Lengths(2048, 1024) if args.quick else Lengths(200_000, 128 * 1024)
    model = model_of(config_for(lengths.longest))
    settings = EngineSettings(max_running=1, max_model_len=lengths.longest)
    cache_bytes = (lengths.longest // settings.page_size + 1) * settings.page_size
    cache_bytes *= bytes_per_token(model.config, torch.float32, with_mtp=False)
    num_pages, summary = size_cache(
        model, settings, cache_bytes=cache_bytes, free_bytes=free_memory_bytes(torch.device("cpu"))
    )
    planned = cache_bytes + WORK_BYTES
    print(summary)
    print(f"planned: {cache_bytes / MIB:.1f} MiB of cache and {WORK_BYTES / MIB:.0f} MiB to work with", flush=True)
    warm_up(model)
    before = resident_bytes()
    core = EngineCore(model, settings, num_pages=num_pages)
    rows = [read_long_prompt(core, prompts_of(model.config, 1, lengths.context, args.seeds[0])[0])]
    rows += [write_long_reply(core, prompts_of(model.config, 1, SHORT_PROMPT, args.seeds[0])[0], lengths.output)]
    grown = peak_memory_bytes(torch.device("cpu")) - before
    for row in rows:
        row["MiB planned"], row["MiB grown, both"] = planned / MIB, grown / MIB
    if grown > planned:
        raise SystemExit(f"resident memory grew by {grown / MIB:.1f} MiB; {planned / MIB:.1f} MiB were planned")
    figures = {
        "context_tokens": lengths.context,
        "output_tokens": lengths.output,
        "planned_bytes": planned,
        "grown_over_planned": grown / planned,
        "prefill_s": float(rows[0]["prefill s"]),
        "decode_s": float(rows[1]["decode s"]),
    }
    report("long_context", rows, figures, to=args.json)


if __name__ == "__main__":
    main()

"""Time to the first token, turn by turn of a growing conversation, with the prefix cache and without."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decoding import core_for, greedy, submit

from yunque.model import Transformer

TURNS = 10


@dataclass(frozen=True)
class Growth:
    """Tokens that each turn adds: what the user says, and the reply."""

    prompt: int = 192
    reply: int = 32


def first_token_seconds(model: Transformer, growth: Growth, seed: int, *, with_cache: bool) -> list[float]:
    """CPU seconds from the request to its first token, for each turn."""
    draw, times = random.Random(seed), []
    core = core_for(model, TURNS * (growth.prompt + growth.reply), num_requests=2)
    tokens: list[int] = []
    for turn in range(TURNS):
        tokens += [draw.randrange(model.config.vocab_size) for _ in range(growth.prompt)]
        if not with_cache:
            core.drop_cache()
        started = time.process_time()
        inbox = submit(core, f"turn {turn}", tokens, greedy(growth.reply))
        while not inbox.tokens:
            core.step()
        times.append(time.process_time() - started)
        while core.has_work:
            core.step()
        tokens += inbox.tokens
        assert not (with_cache and turn) or inbox.cached_tokens >= len(tokens) - 2 * growth.prompt - growth.reply
    return times


def conversation_rows(
    model: Transformer, seeds: Sequence[int], growth: Growth
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Turn 10 against turn 1, with the cache (the figure) and without; less is better."""
    first_token_seconds(model, growth, 0, with_cache=True)  # warm up
    rows = []
    for with_cache in (True, False):
        runs = [first_token_seconds(model, growth, seed, with_cache=with_cache) for seed in seeds]
        ratios = [run[-1] / run[0] for run in runs]
        rows.append(
            {
                "case": f"first token of turn {TURNS}, {'with' if with_cache else 'without'} the prefix cache",
                "against": "of turn 1",
                "unit": "ms",
                "yunque": statistics.median(run[-1] for run in runs) * 1e3,
                "other": statistics.median(run[0] for run in runs) * 1e3,
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return rows, {"ttft_turn10_over_turn1": float(rows[0]["ratio"])}

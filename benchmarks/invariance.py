"""What ``batch_invariant`` costs: the same model with and without it, one run.

    python benchmarks/invariance.py
    python benchmarks/invariance.py --quick

A figure is the median over pairs of (seconds with the setting / seconds without), CPU seconds of one thread: 1 is free.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import options, report

from yunque.model import LanguageModelLoss, LossConfig, PackedBatch, SequenceCache, Transformer, init_weights, preset

DECODE_STEPS = 8


def make(invariant: bool) -> Transformer:
    torch.set_num_threads(1)
    model = Transformer(preset("mini"), batch_invariant=invariant)
    return init_weights(model, torch.Generator().manual_seed(0))


def train(model: Transformer, tokens: torch.Tensor) -> None:
    """Forward and backward of one sequence."""
    model.zero_grad(set_to_none=True)
    LanguageModelLoss(LossConfig())(model, PackedBatch.from_documents([tokens.tolist()])).sum.backward()


@torch.no_grad()
def prefill(model: Transformer, tokens: torch.Tensor) -> SequenceCache:
    """One shot into a cache."""
    cache = SequenceCache(model.config, num_sequences=1, capacity=len(tokens) + DECODE_STEPS)
    model.logits(model(tokens, cache.step([len(tokens)])).hidden_TD[-1:])
    return cache


@torch.no_grad()
def decode(model: Transformer, cache: SequenceCache) -> None:
    """A few steps of one token, from a filled cache that is left as it was."""
    length, token = cache.lengths[0], torch.zeros(1, dtype=torch.int64)
    for _ in range(DECODE_STEPS):
        model.logits(model(token, cache.step([1])).hidden_TD)
    cache.truncate(0, length)


def seconds(action: Callable[[], Any]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


def main() -> None:
    parser = options(__doc__ or "", seeds=(0, 1, 2))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    args = parser.parse_args()
    length = 96 if args.quick else 1024
    plain, invariant = make(False), make(True)
    rows = []
    for name in ("train", "prefill", "decode"):
        pairs = []
        for seed in args.seeds:
            tokens = torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(seed))
            pair = []
            for model in (plain, invariant):
                if name == "decode":
                    cache = prefill(model, tokens)
                    pair.append(seconds(lambda model=model, cache=cache: decode(model, cache)))
                else:
                    action = train if name == "train" else prefill
                    pair.append(seconds(lambda model=model, action=action, tokens=tokens: action(model, tokens)))
            pairs.append(pair)
        rows.append(
            {
                "case": f"{name}, {length} tokens",
                "plain s": statistics.median(p[0] for p in pairs),
                "invariant s": statistics.median(p[1] for p in pairs),
                "figure": f"{name}_cost",
                "ratio": statistics.median(p[1] / p[0] for p in pairs),
            }
        )
    report("invariance", rows, {row["figure"]: float(row["ratio"]) for row in rows}, to=args.json)


if __name__ == "__main__":
    main()

"""Speed and memory against ``transformers``' GlmMoeDsaForCausalLM: same config, same weights, one run.

    python benchmarks/reference.py            # some minutes; needs the dev extra
    python benchmarks/reference.py --quick

Every repetition times the reference and Yunque one after the other; a speed figure is the median of the pairs'
ratios (reference time / our time, more is better). Times are CPU seconds of one thread. Memory is the peak resident
size of a process that does one prefill (ours / theirs, less is better).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import options, report

from yunque.core.seeds import Seeds
from yunque.model.batch import PackedBatch
from yunque.model.cache import PackedView, SequenceCache
from yunque.model.init import init_weights
from yunque.model.presets import preset
from yunque.model.transformer import Transformer
from yunque.ops.blockwise.cross_entropy import linear_cross_entropy

#: Decode steps timed together: one is too short to time.
DECODE_STEPS = 16


@dataclass(frozen=True)
class Pair:
    """One thing done by both: called with the tokens [B, S]."""

    theirs: Callable[[torch.Tensor], Any]
    ours: Callable[[torch.Tensor], Any]


def make_ours(seed: int) -> Transformer:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(Seeds(seed).stream("weights") % 2**63)
    return init_weights(Transformer(preset("mini")), generator).join_projections()


def make_theirs(ours: Transformer | None) -> Any:
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    data = {k: v for k, v in preset("mini").to_hf().items() if k not in ("architectures", "model_type")}
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**data)).eval()
    if ours is not None:
        missing = model.load_state_dict(ours.state_dict(), strict=True)
        assert not missing.missing_keys, missing
    return model


def training(ours: Transformer, theirs: Any) -> Pair:
    """Loss forward and backward, without an optimiser step."""

    def run_ours(tokens: torch.Tensor) -> None:
        ours.zero_grad(set_to_none=True)
        batch = PackedBatch.from_documents(tokens.tolist())
        hidden = ours(batch.tokens_T, PackedView(batch)).hidden_TD
        loss = linear_cross_entropy(hidden, ours.lm_head.weight, batch.targets_T, batch.loss_mask_T)
        (loss.sum / batch.loss_mask_T.sum()).backward()

    def run_theirs(tokens: torch.Tensor) -> None:
        theirs.zero_grad(set_to_none=True)
        theirs(tokens, labels=tokens, use_cache=False).loss.backward()

    return Pair(run_theirs, run_ours)


@torch.inference_mode()
def prefill_ours(model: Transformer, tokens: torch.Tensor) -> SequenceCache:
    cache = SequenceCache(model.config, num_sequences=1, capacity=tokens.shape[1] + DECODE_STEPS)
    model.logits(model(tokens[0], cache.step([tokens.shape[1]])).hidden_TD[-1:])
    return cache


@torch.inference_mode()
def prefill_theirs(model: Any, tokens: torch.Tensor) -> Any:
    return model(tokens, use_cache=True, logits_to_keep=1)


def decoding(ours: Transformer, theirs: Any, tokens: torch.Tensor) -> Pair:
    """Steps of one token after ``tokens`` [1, S]: each side decodes on from the cache it filled."""
    our_cache = prefill_ours(ours, tokens)
    their_cache = prefill_theirs(theirs, tokens).past_key_values
    length = tokens.shape[1]

    @torch.inference_mode()
    def run_ours(step: torch.Tensor) -> None:
        our_cache.truncate(0, length)
        for _ in range(DECODE_STEPS):
            ours.logits(ours(step[0], our_cache.step([1])).hidden_TD)

    @torch.inference_mode()
    def run_theirs(step: torch.Tensor) -> None:
        for _ in range(DECODE_STEPS):
            theirs(step, cache=their_cache, use_cache=True)
        their_cache.crop(-DECODE_STEPS)

    return Pair(run_theirs, run_ours)


def time_pair(pair: Pair, tokens: torch.Tensor) -> tuple[float, float]:
    """CPU seconds of the reference and of ours."""
    seconds = []
    for run in (pair.theirs, pair.ours):
        started = time.process_time()
        run(tokens)
        seconds.append(time.process_time() - started)
    return seconds[0], seconds[1]


def speed_rows(seeds: list[int], quick: bool) -> list[dict[str, Any]]:
    ours = make_ours(0)
    theirs = make_theirs(ours)
    prefill = Pair(lambda t: prefill_theirs(theirs, t), lambda t: prefill_ours(ours, t))
    short, middle, long = (64, 128, 256) if quick else (512, 4096, 8192)
    decode_pair = decoding(ours, theirs, torch.randint(0, 512, (1, middle)))
    # Decode goes first: its operations are small, and the heap that long prefills leave behind slows them.
    cases: list[tuple[str, Pair, tuple[int, int]]] = [
        ("decode_b1_4096", decode_pair, (1, 1)),
        ("train_512", training(ours, theirs), (4, short)),
        ("train_4096", training(ours, theirs), (1, middle)),
        ("prefill_4096", prefill, (1, middle)),
        ("prefill_8192", prefill, (1, long)),
    ]
    rows = []
    for name, pair, shape in cases:
        pair.ours(torch.randint(0, 512, shape))  # warm up: first calls build kernels
        pair.theirs(torch.randint(0, 512, shape))
        pairs = []
        for seed in seeds:
            tokens = torch.randint(0, 512, shape, generator=torch.Generator().manual_seed(seed))
            pairs.append(time_pair(pair, tokens))
        ratios = [theirs_s / ours_s for theirs_s, ours_s in pairs]
        rows.append(
            {
                "case": name,
                "batch x tokens": f"{shape[0]} x {shape[1]}",
                "transformers s": statistics.median(p[0] for p in pairs),
                "yunque s": statistics.median(p[1] for p in pairs),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return rows


def prefill_peak_bytes(side: str, length: int) -> int:
    """Peak resident size of a fresh process that prefills ``length`` tokens on one side."""
    command = [sys.executable, __file__, "--memory-of", side, "--length", str(length)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(json.loads(out.splitlines()[-1])["peak_bytes"])


def memory_child(side: str, length: int) -> None:
    from yunque.ops.device import peak_memory_bytes

    tokens = torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(0))
    if side == "yunque":
        prefill_ours(make_ours(0), tokens)
    else:
        torch.set_num_threads(1)
        prefill_theirs(make_theirs(None), tokens)
    print(json.dumps({"peak_bytes": peak_memory_bytes(torch.device("cpu"))}))


def main() -> None:
    parser = options(__doc__ or "", seeds=(0, 1, 2))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--memory-of", choices=("yunque", "transformers"), help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, default=16384, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        memory_child(args.memory_of, args.length)
        return
    rows = speed_rows(args.seeds, args.quick)
    length = 512 if args.quick else args.length
    peaks = {side: prefill_peak_bytes(side, length) for side in ("transformers", "yunque")}
    ratio = peaks["yunque"] / peaks["transformers"]
    rows.append(
        {
            "case": "prefill_16384_memory",
            "batch x tokens": f"1 x {length}",
            "transformers MiB": peaks["transformers"] // 2**20,
            "yunque MiB": peaks["yunque"] // 2**20,
            "ratio": ratio,
        }
    )
    figures = {row["case"]: float(row["ratio"]) for row in rows}
    report("reference", rows, figures, to=Path(args.json) if args.json else None)


if __name__ == "__main__":
    main()

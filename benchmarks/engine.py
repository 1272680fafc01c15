"""The engine's speed: against transformers and llama.cpp on the same weights, against memory, and its own means.

    python benchmarks/engine.py               # about twelve minutes; needs the dev extra
    python benchmarks/engine.py --quick

Two models of random weights, float32: ``tiny`` (the ``mini`` preset, 7.0 M parameters) and ``100m`` (110.6 M, 29 M of
them active); figures of the second end in ``_100m``, but for ``llamacpp_*`` and ``floor_b1``, which are the second
model's (the first's end in ``_tiny``). All sides run in this process with one thread, one after the other in turns, one
pair for each seed; times are CPU seconds of the process, so that other work on the machine disturbs them less. A ratio
is the median over the pairs. Decoding is greedy, prefill excluded:

- transformers: one call of ``generate`` on a filled cache, from its first new token to its last, against as many steps
  of ``EngineCore`` (scheduling, sampling and publishing included) at the same context.
- llama.cpp: its server with a slot for each request, requests whose prompts it holds; one token's request is
  subtracted. The server's own (wall time) tokens/s is in the row.
- ``floor_b1``: our time for a step / (bytes of weights and cache that it must read / bytes/s of summing 256 MiB).
- ``mtp_*``: a model trained here on a made-up tool log (regular text: drafts are easy), unseen prompts, greedy, the
  best of 1 to 3 drafts; ``mtp_acceptance_length`` is tokens of a verification step, ``mtp_speedup`` the speed over
  that of no drafts.
- ``ttft_turn10_over_turn1``: first token of turn 10 over turn 1, every turn adding as many tokens (less is better).
- ``*_cached_share_of_ideal``: see routing.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import options, report
from competitors import LlamaCppServer, Transformers
from conversation import Growth, conversation_rows
from decoding import Decoding, Pace, floor_seconds, read_bytes_per_s, serve_mixed
from drafting import drafting_rows, train
from engine_models import Subject, model_of, prompts_of, subjects
from routing import Load, routing_figures

Row = dict[str, Any]
Found = tuple[list[Row], dict[str, float]]


@dataclass(frozen=True)
class Case:
    """Decode ``batch`` requests for ``steps`` steps behind prompts of ``length`` tokens."""

    name: str
    batch: int
    length: int
    steps: int

    def prompts(self, subject: Subject) -> list[list[int]]:
        return prompts_of(subject.config, self.batch, self.length)

    def title(self, subject: Subject) -> str:
        return f"{subject.name}: decode, batch {self.batch} at {self.length}"


def cases(*, quick: bool) -> tuple[Case, Case, Case]:
    """Short, long, and many at once."""
    if quick:
        return Case("b1_short", 1, 16, 4), Case("b1_4k", 1, 64, 3), Case("b16_1k", 4, 32, 3)
    return Case("b1_short", 1, 128, 63), Case("b1_4k", 1, 4096, 24), Case("b16_1k", 16, 1024, 8)


def llamacpp_cases(*, quick: bool) -> tuple[Case, Case, Case]:
    if quick:
        return Case("b1", 1, 16, 4), Case("b16", 4, 16, 4), Case("b1_1k", 1, 64, 4)
    return Case("b1", 1, 128, 64), Case("b16", 16, 128, 32), Case("b1_1k", 1, 1024, 64)


def in_turns(
    seeds: Sequence[int], theirs: Callable[[], Pace], ours: Callable[[], Pace]
) -> tuple[list[Pace], list[Pace]]:
    """One pair for each seed after one to warm up; who goes first alternates."""
    theirs()
    ours()
    pairs = []
    for turn, _ in enumerate(seeds):
        if turn % 2:
            second, first = ours(), theirs()
        else:
            first, second = theirs(), ours()
        pairs.append((first, second))
    return [first for first, _ in pairs], [second for _, second in pairs]


def speed_row(case: str, against: str, theirs: Sequence[Pace], ours: Sequence[Pace]) -> Row:
    """Tokens per second of both, and the ratio (more is better for us)."""
    ratios = [b.tokens_per_s / a.tokens_per_s for a, b in zip(theirs, ours, strict=True)]
    return {
        "case": case,
        "against": against,
        "unit": "tokens/s",
        "yunque": statistics.median(pace.tokens_per_s for pace in ours),
        "other": statistics.median(pace.tokens_per_s for pace in theirs),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def transformers_rows(subject: Subject, seeds: Sequence[int], *, quick: bool) -> Found:
    rows, figures = [], {}
    reference = Transformers(subject)
    for case in cases(quick=quick):
        prompts = case.prompts(subject)
        cache = reference.prefill(prompts)
        ours = _our_decoding(subject, case, len(seeds) + 1)
        pairs = in_turns(seeds, lambda p=prompts, c=cache, n=case.steps: reference.decode(p, c, n), ours)
        rows.append(speed_row(case.title(subject), "transformers generate", *pairs))
        figures[f"transformers_{case.name}{subject.suffix}"] = float(rows[-1]["ratio"])
    return rows, figures


def _our_decoding(subject: Subject, case: Case, repetitions: int) -> Callable[[], Pace]:
    """Short prompts anew each time; after long ones one reply goes on, so that they are computed once."""
    prompts = case.prompts(subject)
    if case.name.endswith("k"):
        decoding = Decoding(subject.model, prompts, case.steps * repetitions)
        return lambda: decoding.run(case.steps)
    return lambda: Decoding(subject.model, prompts, case.steps).run(case.steps)


def llamacpp_rows(subject: Subject, seeds: Sequence[int], *, quick: bool) -> Found:
    rows, figures = [], {}
    for case in llamacpp_cases(quick=quick):
        prompts, reported = case.prompts(subject), []
        server = LlamaCppServer(subject, batch=case.batch, context=case.length + case.steps + 16)

        def theirs(server: LlamaCppServer = server, prompts: Any = prompts, steps: int = case.steps) -> Pace:
            pace, told = server.decode(prompts, steps)
            reported.append(told)  # noqa: B023 - used before the next case
            return pace

        pairs = in_turns(seeds, theirs, _our_decoding(subject, case, len(seeds) + 1))
        server.close()
        against = f"llama.cpp server ({statistics.median(reported):.4g} by its own clock)"
        rows.append(speed_row(case.title(subject), against, *pairs))
        figures[f"llamacpp_{case.name}{'' if subject.suffix else '_tiny'}"] = float(rows[-1]["ratio"])
    return rows, figures


def floor_rows(subject: Subject, seeds: Sequence[int], *, quick: bool) -> Found:
    """Our step over the least time that reading takes, the bandwidth measured beside each."""
    short, long, _ = cases(quick=quick)
    rows, figures = [], {}
    for case, name in ((short, "floor_b1"), (long, "floor_b1_4k")):
        ours, floors = _our_decoding(subject, case, len(seeds) + 1), []
        ours()
        paces = []
        for _ in seeds:
            floors.append(floor_seconds(subject, case.length, read_bytes_per_s()) * 1e3)
            paces.append(ours().ms_per_step)
        ratios = [pace / floor for pace, floor in zip(paces, floors, strict=True)]
        rows.append(
            {
                "case": case.title(subject),
                "against": "reading weights and cache",
                "unit": "ms/step",
                "yunque": statistics.median(paces),
                "other": statistics.median(floors),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
        figures[name + ("" if subject.suffix else "_tiny")] = float(rows[-1]["ratio"])
    return rows, figures


def mixed_rows(subject: Subject, *, quick: bool) -> list[Row]:
    """Requests of unequal lengths, prefill included; no figure."""
    longest = 64 if quick else 1024
    rows = []
    for batch in (1, 4) if quick else (1, 16, 64):
        pace = serve_mixed(subject.model, batch, longest=longest, seed=0)
        what = f"{subject.name}: {batch} at once, prompts {longest // 16} to {longest}, replies to {longest // 8}"
        rows.append({"case": what, "unit": "tokens/s", "yunque": pace.tokens_per_s})
    return rows


def invariance_rows(subject: Subject, seeds: Sequence[int], *, quick: bool) -> list[Row]:
    """What ``batch_invariant`` costs; no figure here (see invariance.py)."""
    short, _, many = cases(quick=quick)
    invariant = Subject(subject.name, subject.suffix, model_of(subject.config, batch_invariant=True), subject.scratch)
    rows = []
    for case in (short, Case("many", many.batch, short.length, many.steps)):
        pairs = in_turns(seeds, _our_decoding(subject, case, 1), _our_decoding(invariant, case, 1))
        rows.append(speed_row(f"{case.title(subject)}, batch_invariant", "without it", *pairs))
    return rows


def routing_rows(seeds: Sequence[int], *, quick: bool) -> Found:
    found, figures = routing_figures(list(seeds), Load(sessions=150) if quick else Load())
    ideal, *ways = found
    rows = [
        {
            "case": f"cached share of prompt tokens, {way['routing'].replace('_', ' ')}",
            "against": "the ideal",
            "unit": "share",
            "yunque": way["cached share"],
            "other": ideal["cached share"],
            "ratio": way["of the ideal"],
        }
        for way in ways
    ]
    return rows, figures


def main() -> None:
    parser = options(__doc__ or "", seeds=range(5))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    figures: dict[str, float] = {}

    def keep(found: Found) -> None:
        rows.extend(found[0])
        figures.update(found[1])

    with tempfile.TemporaryDirectory(prefix="yunque-engine-") as folder:
        small, large = subjects(Path(folder), quick=args.quick)
        for subject in (small, large):
            keep(transformers_rows(subject, args.seeds, quick=args.quick))
            keep(llamacpp_rows(subject, args.seeds, quick=args.quick))
            keep(floor_rows(subject, args.seeds, quick=args.quick))
            rows += mixed_rows(subject, quick=args.quick)
        rows += invariance_rows(small, args.seeds, quick=args.quick)
        keep(drafting_rows(train(Path(folder), args.seeds, quick=args.quick), quick=args.quick))
        keep(conversation_rows(small.model, args.seeds, Growth(16, 8) if args.quick else Growth()))
        keep(routing_rows(args.seeds, quick=args.quick))
    report("engine", rows, figures, to=args.json)


if __name__ == "__main__":
    main()

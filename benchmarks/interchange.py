"""One model in three engines: ours, ``transformers`` and llama.cpp compute the same numbers and write the same text.

    python benchmarks/interchange.py            # about two minutes; needs the dev extra
    python benchmarks/interchange.py --quick

A small model is trained as the recipes train: pre-training, indexer warm-up, sparse adaptation, with shared indexers,
expert groups and the prediction layer. It is saved as a Hugging Face folder and as GGUF in four dtypes.
Log-probabilities are compared over the whole vocabulary, at positions that see more keys than ``index_topk``, the first
of them after one prefill and the others after decode steps; "gap" is the largest difference of a row. Text is 64 greedy
tokens after each prompt: "match" is the share of tokens that are equal, where a text counts up to the first difference
at which our two best logits are within 1e-3 (a near-tie, counted) and to its end otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import options, report
from llamacpp import LlamaCpp
from rich.console import Console
from torch import Tensor

from yunque.model.batch import PackedBatch
from yunque.model.cache import PackedView
from yunque.model.forward import ForwardMode
from yunque.model.generate import Sampling, generate
from yunque.model.transformer import MTPState, Transformer
from yunque.text import Tokenizer
from yunque.train.run import execute
from yunque.train.settings import run_from_mapping
from yunque.weights import load_model, write_gguf

#: Half a megabyte of code that every installation has.
SOURCES = str(Path(asyncio.__file__).parent)
VOCABULARY = 1024
INDEX_TOPK = 32
PROMPT_TOKENS = 64
NEW_TOKENS = 64
NEAR_TIE = 1e-3
DTYPES = ("f32", "f16", "bf16", "q8_0")


@dataclass(frozen=True)
class Subject:
    """The trained model, its folder, and one document for each seed."""

    model: Transformer
    folder: Path
    documents: list[list[int]]
    plain_token: int


@dataclass
class Agreement:
    """Greedy texts of another engine beside ours, counted token by token."""

    equal: int = 0
    compared: int = 0
    near_ties: int = 0

    def add(self, ours: Sequence[int], theirs: Sequence[int], margins: Sequence[float]) -> None:
        """Count one text; ``margins`` are the distances of our two best logits."""
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if first is None:
            first = min(len(ours), len(theirs))
        is_near_tie = first < len(ours) and margins[first] < NEAR_TIE
        self.near_ties += is_near_tie
        self.equal += first
        self.compared += first if is_near_tie else max(len(ours), len(theirs))

    @property
    def share(self) -> float:
        return self.equal / self.compared if self.compared else 1.0


def training_run(folder: Path, *, quick: bool) -> dict[str, Any]:
    """A run file: dense, then the indexer alone, then sparse."""
    steps = 2 if quick else 40
    common = {"sequence_length": 256, "tokens_per_step": 1024, "tokens": 1024 * steps, "sources": ["python"]}
    return {
        "name": "interchange",
        "output": str(folder),
        "device": "cpu",
        "threads": 1,
        "model": {
            "preset": "tiny",
            "vocab_size": VOCABULARY,
            "index_n_heads": 16,  # with few heads many scores are exactly 0, and engines break ties differently
            "index_topk": INDEX_TOPK,
            "indexer_types": ["full", "shared", "full", "shared"],
            "n_group": 2,
            "topk_group": 1,
            "latent_norm_eps": 1e-6,  # what transformers computes with
        },
        "tokenizer": {"vocab_size": VOCABULARY, "sources": ["python"], "max_bytes": 500_000},
        "data": {"held_out_batches": 1, "sources": {"python": {"kind": "code", "path": SOURCES}}},
        "stage": [
            {"kind": "pretrain", "schedule": {"kind": "constant", "lr_peak": 4e-3}, "mtp_steps": 1, **common},
            {"kind": "dsa_warmup", "schedule": {"kind": "constant", "lr_peak": 1e-2}, **common},
            {"kind": "dsa_sparse", "schedule": {"kind": "constant", "lr_peak": 1e-3}, "mtp_steps": 1, **common},
        ],
    }


def make_subject(folder: Path, seeds: Sequence[int], *, quick: bool) -> Subject:
    """Train, and cut documents out of this file's own text, which no training has seen."""
    run = run_from_mapping(training_run(folder, quick=quick))
    summary = execute(run, Console(file=io.StringIO()))
    tokenizer = Tokenizer.load(summary.model)
    text = tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))
    length = PROMPT_TOKENS + NEW_TOKENS
    starts = [seed * 97 % (len(text) - length) for seed in seeds]
    documents = [text[start : start + length] for start in starts]
    return Subject(load_model(summary.model), Path(summary.model), documents, tokenizer.encode("0")[0])


@torch.inference_mode()
def our_log_probs(model: Transformer, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities [T, V] after every token."""
    batch = PackedBatch.from_documents([list(tokens)])
    return model.logits(model(batch.tokens_T, PackedView(batch)).hidden_TD).log_softmax(-1)


def our_texts(subject: Subject) -> list[list[int]]:
    sampling = Sampling(max_new_tokens=NEW_TOKENS, stop_ids=frozenset(subject.model.config.eos_token_id))
    return [list(generate(subject.model, document[:PROMPT_TOKENS], sampling)) for document in subject.documents]


def margins_of(subject: Subject, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Distance of our two best logits at every token of our texts."""
    rows = []
    for document, text in zip(subject.documents, texts, strict=True):
        log_probs = our_log_probs(subject.model, [*document[:PROMPT_TOKENS], *text[:-1]])[PROMPT_TOKENS - 1 :]
        best = log_probs.topk(2).values
        rows.append((best[:, 0] - best[:, 1]).tolist())
    return rows


@torch.inference_mode()
def drafting_of_ours(subject: Subject, texts: Sequence[Sequence[int]], attention: Literal["sparse", "dense"]) -> float:
    """Share of right drafts when our prediction layer drafts one token a step, attending as said.

    The prefill gives the first token; a right draft makes the step two tokens long.
    """
    model, drafted, right = subject.model, 0, 0
    for document, text in zip(subject.documents, texts, strict=True):
        batch = PackedBatch.from_documents([[*document[:PROMPT_TOKENS], *text]])
        tokens, view = batch.tokens_T, PackedView(batch)
        state = MTPState(model(tokens, view).hidden_TD, None, 0)
        state, _ = model.predict_next(state, tokens.roll(-1), view, ForwardMode(attention=attention))
        drafts = model.logits(state.hidden_TD).argmax(-1)[PROMPT_TOKENS - 1 :].tolist()
        known = 1
        while known < len(text) - 1:
            is_right = drafts[known - 1] == text[known]
            drafted, right, known = drafted + 1, right + is_right, known + 1 + is_right
    return right / max(1, drafted)


@torch.inference_mode()
def transformers_row(subject: Subject, texts: list[list[int]], margins: list[list[float]]) -> dict[str, Any]:
    """Loaded from the folder as its users load it; forward pass and ``generate``."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # it reports the prediction layer as unexpected: it has none
    logging.disable_progress_bar()
    theirs: Any = AutoModelForCausalLM.from_pretrained(subject.folder, dtype=torch.float32)
    agreement, gaps = Agreement(), []
    for document, text, margin in zip(subject.documents, texts, margins, strict=True):
        logits = theirs(torch.tensor([document])).logits[0]
        gaps.append((logits.log_softmax(-1) - our_log_probs(subject.model, document))[PROMPT_TOKENS - 1 :])
        prompt = torch.tensor([document[:PROMPT_TOKENS]])
        out = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        agreement.add(text, out[0, PROMPT_TOKENS:].tolist(), margin)
    return {"engine": "transformers", "dtype": "f32", **_summary(gaps, agreement)}


def llamacpp_row(subject: Subject, dtype: Any, texts: list[list[int]], margins: list[list[float]]) -> dict[str, Any]:
    """Written as GGUF in ``dtype`` and loaded by llama.cpp."""
    file = write_gguf(subject.folder, subject.folder.parent / f"{dtype}.gguf", dtype=dtype)
    engine = LlamaCpp(file, vocab_size=VOCABULARY, plain_token=subject.plain_token)
    agreement, gaps = Agreement(), []
    for document, text, margin in zip(subject.documents, texts, margins, strict=True):
        rows = engine.log_probs(document, PROMPT_TOKENS)
        gaps.append(rows - our_log_probs(subject.model, document)[PROMPT_TOKENS - 1 :])
        agreement.add(text, engine.greedy(document[:PROMPT_TOKENS], NEW_TOKENS).tokens, margin)
    return {"engine": "llama.cpp", "dtype": dtype, "MB": file.stat().st_size / 1e6, **_summary(gaps, agreement)}


def drafting_row(subject: Subject, texts: list[list[int]], margins: list[list[float]]) -> dict[str, Any]:
    """llama.cpp drafting one token at a time with the file's prediction layer, which it runs dense."""
    file = subject.folder.parent / "f32.gguf"
    engine = LlamaCpp(file, vocab_size=VOCABULARY, plain_token=subject.plain_token, drafts=1)
    agreement, drafted, accepted = Agreement(), 0, 0
    for document, text, margin in zip(subject.documents, texts, margins, strict=True):
        answer = engine.greedy(document[:PROMPT_TOKENS], NEW_TOKENS)
        agreement.add(text, answer.tokens, margin)
        drafted, accepted = drafted + answer.num_drafted, accepted + answer.num_accepted
    return {
        "engine": "llama.cpp, drafting",
        "dtype": "f32",
        "match": agreement.share,
        "near-ties": agreement.near_ties,
        "drafts accepted": accepted / max(1, drafted),
    }


def _summary(gaps: Sequence[Tensor], agreement: Agreement) -> dict[str, Any]:
    rows = torch.cat([gap.abs().amax(-1) for gap in gaps])
    return {
        "positions": len(rows),
        "largest gap": rows.max().item(),
        "median gap": rows.median().item(),
        "match": agreement.share,
        "near-ties": agreement.near_ties,
    }


def main() -> None:
    parser = options(__doc__ or "", seeds=range(8))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        subject = make_subject(Path(scratch) / "run", args.seeds, quick=args.quick)
        texts = our_texts(subject)
        margins = margins_of(subject, texts)
        theirs = transformers_row(subject, texts, margins)
        by_dtype = {dtype: llamacpp_row(subject, dtype, texts, margins) for dtype in DTYPES}
        drafting = drafting_row(subject, texts, margins)
        ours = [
            {
                "engine": f"yunque, drafting {attention}",
                "dtype": "f32",
                "drafts accepted": drafting_of_ours(subject, texts, attention),
            }
            for attention in ("sparse", "dense")
        ]
    figures = {
        "llamacpp_max_logprob_gap": by_dtype["f32"]["largest gap"],
        "llamacpp_greedy_match": by_dtype["f32"]["match"],
        "transformers_greedy_match": theirs["match"],
        "transformers_max_logprob_gap": theirs["largest gap"],
        **{f"llamacpp_{dtype}_logprob_gap": by_dtype[dtype]["largest gap"] for dtype in DTYPES if dtype != "f32"},
    }
    report("interchange", [theirs, *by_dtype.values(), drafting, *ours], figures, to=args.json)


if __name__ == "__main__":
    main()

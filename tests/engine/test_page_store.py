"""Paged rows give what the same rows in one piece give, wherever the pages lie."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from builders import build, draw_config, random_documents

from yunque.engine.page_store import PageStore, Span, bytes_per_token
from yunque.model.cache import SequenceCache
from yunque.model.transformer import Transformer

LENGTHS = [33, 7, 20]


def log_probs(model: Transformer, hidden_TD: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(model.logits(hidden_TD), dim=-1)


def cut(lengths: list[int], steps: list[int]) -> list[list[tuple[int, int]]]:
    """(start, count) of every sequence in every round, counts taken in turn from ``steps``."""
    done, rounds, turn = [0] * len(lengths), [], 0
    while done != lengths:
        counts = []
        for s, length in enumerate(lengths):
            counts.append((done[s], min(steps[turn % len(steps)], length - done[s])))
            turn += 1
        done = [start + count for start, count in counts]
        rounds.append(counts)
    return rounds


@pytest.mark.parametrize("layout", ["runs", "scattered"])
@pytest.mark.parametrize("steps", [[1], [4, 1, 9], [3], [64]])
@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_paged_steps_equal_steps_over_sequences_in_one_piece(seed, steps, layout):
    config = draw_config(seed)
    model, documents = build(config, seed).double(), random_documents(config, LENGTHS, seed)
    size, draw = 4, random.Random(seed)
    store = PageStore(config, num_pages=40, page_size=size, dtype=torch.float64)
    free = list(range(1, 40))
    if layout == "scattered":
        draw.shuffle(free)
    pages = []
    for length in LENGTHS:
        need = -(-length // size)
        pages.append(np.array(free[:need], np.int64))
        free = free[need:]
    cache = SequenceCache(config, num_sequences=len(LENGTHS), capacity=max(LENGTHS), dtype=torch.float64)
    for counts in cut(LENGTHS, steps):
        active = [s for s, (_, count) in enumerate(counts) if count]
        spans = [Span(pages[s], *counts[s], is_run=layout == "runs") for s in active]
        tokens = torch.tensor([t for s in active for t in documents[s][counts[s][0] : sum(counts[s])]])
        got = log_probs(model, model(tokens, store.view(spans)).hidden_TD)
        expected = log_probs(model, model(tokens, cache.step([count for _, count in counts])).hidden_TD)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@torch.inference_mode()
def test_batch_invariant_bits_do_not_depend_on_the_pages():
    config = draw_config(1)
    model, documents = build(config, 1, batch_invariant=True), random_documents(config, [30, 17], 1)
    out = []
    for order, alone in ((range(1, 21), True), (random.Random(0).sample(range(1, 21), 20), False)):
        store = PageStore(config, num_pages=21, page_size=4)
        pages = np.array(list(order), np.int64)
        spans = [Span(pages[:8], 0, 30, is_run=alone), Span(pages[8:13], 0, 17)]
        spans, tokens = (spans[:1], documents[0]) if alone else (spans, [*documents[0], *documents[1]])
        out.append(model(torch.tensor(tokens), store.view(spans)).hidden_TD[:30])
    assert torch.equal(*out)


def test_pools_take_the_bytes_that_are_announced():
    config = draw_config(3)
    for with_mtp in (False, True):
        store = PageStore(config, num_pages=7, page_size=16, dtype=torch.bfloat16, with_mtp=with_mtp)
        assert store.num_bytes == 7 * 16 * bytes_per_token(config, torch.bfloat16, with_mtp=with_mtp)
    assert all(
        config.has_indexer(layer) == ((layer, "index") in store.pools) for layer in range(config.num_layers_with_mtp)
    )

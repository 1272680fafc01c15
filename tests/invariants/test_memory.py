"""Memory of a whole pass grows linearly with the sequence: nothing of size queries x keys exists."""

from dataclasses import replace

import pytest
import torch
from builders import build, random_batch, random_documents
from drawn import LargestTensor, kept_for_backward

from yunque.model.cache import SequenceCache
from yunque.model.objectives import IndexerWarmupLoss, LanguageModelLoss, LossConfig
from yunque.model.presets import preset

#: One head's scores at the longer length are 2.3 M cells; nothing else here comes near.
LENGTHS = (768, 1536)
#: Every kept activation doubles with the length; the rest is weights and tiles.
LIMIT = 2.1
CONFIG = replace(preset("nano"), max_position_embeddings=2048, num_attention_heads=2, index_n_heads=2)


@pytest.mark.parametrize(
    "loss",
    [
        LanguageModelLoss(LossConfig(attention="dense", chunk_tokens=64)),
        LanguageModelLoss(LossConfig(index_kl_weight=0.5, chunk_tokens=64)),
        IndexerWarmupLoss(),
    ],
    ids=["dense", "sparse", "warm-up"],
)
def test_training_keeps_and_makes_nothing_quadratic(loss):
    model, largest, kept = build(CONFIG), [], []
    for length in LENGTHS:
        batch = random_batch(CONFIG, [length])
        kept.append(kept_for_backward(lambda batch=batch: loss(model, batch).sum))
        with LargestTensor() as meter:
            loss(model, batch).sum.backward()
        largest.append(meter.numel)
    assert largest[1] < LENGTHS[1] ** 2
    assert largest[1] <= LIMIT * largest[0]
    assert kept[1] <= LIMIT * kept[0]


@pytest.mark.parametrize("chunk", [None, 256])
def test_prefill_makes_nothing_quadratic(chunk):
    model, largest = build(CONFIG), []
    for length in LENGTHS:
        (document,) = random_documents(CONFIG, [length])
        cache = SequenceCache(CONFIG, num_sequences=1, capacity=length)
        with torch.no_grad(), LargestTensor() as meter:
            for part in torch.tensor(document).split(chunk or length):
                model(part, cache.step([len(part)]))
        largest.append(meter.numel)
    assert largest[1] < LENGTHS[1] ** 2
    assert largest[1] <= LIMIT * largest[0]

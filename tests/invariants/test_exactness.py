"""One model, many paths: dense and sparse, packed and separate, training, chunks and decode give the same numbers.

The rule: selections (keys, experts) may differ between paths only where the k-th and the next score are within 1e-5,
relatively, and the share of such (token, layer) pairs is reported; with equal or replayed selections
max |delta log p| <= 1e-5 in fp32. A ``batch_invariant`` model gives equal bits on all paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from builders import build, draw_config, gradients, kept_counts, random_batch, random_documents, run, run_in_steps
from torch import Tensor

from yunque.model.batch import PackedBatch
from yunque.model.cache import SequenceCache
from yunque.model.config import ModelConfig
from yunque.model.forward import ForwardMode, Replay
from yunque.model.objectives import LanguageModelLoss, LossConfig
from yunque.model.transformer import Transformer
from yunque.ops.blockwise import expanded_attention, latent_attention, selection
from yunque.ops.visibility import Selection

TOLERANCE = 1e-5
LENGTHS = [23, 9, 30]
#: Tokens that each of the three sequences takes in each step: prefill, then 1, 3, 2, with pauses.
STEPS = [[10, 4, 17], [1, 1, 1], [3, 3, 3], [2, 1, 2], [0, 0, 1], [7, 0, 0], [0, 0, 6]]


def log_probs(model: Transformer, documents: Sequence[Sequence[int]], **mode: Any) -> Tensor:
    """One packed pass, [T, V]."""
    with torch.no_grad():
        return model.logits(run(model, PackedBatch.from_documents(documents), **mode).hidden_TD).log_softmax(-1)


def one_at_a_time(lengths: Sequence[int]) -> list[list[int]]:
    return [[int(i < length) for length in lengths] for i in range(max(lengths))]


def tied(model: Transformer) -> Transformer:
    """The same model whose every index score is exactly 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("indexer.weights_proj.weight"):
                parameter.zero_()
    return model


# ---- dense and sparse


@pytest.mark.parametrize("seed", range(6))
def test_sparse_is_dense_to_the_bit_while_every_key_is_kept(seed):
    """1bit-MONSTER#2418: right at topk >= length. Scoring is skipped; with it, 1e-5."""
    config = draw_config(seed, index_topk=30)
    model, documents = build(config, seed), random_documents(config, LENGTHS, seed)
    dense = log_probs(model, documents, attention="dense")
    assert torch.equal(log_probs(model, documents), dense)
    scored = run(model, PackedBatch.from_documents(documents), always_score=True)
    counts = torch.cat([torch.arange(1, length + 1) for length in LENGTHS])
    assert all(torch.equal(kept_counts(scored, layer), counts) for layer in scored.trace.selections)
    assert (log_probs(model, documents, always_score=True) - dense).abs().max() <= TOLERANCE


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("topk", [2, 8, 29])
def test_sparse_keeps_fewer_keys_and_differs_from_dense_above_topk(seed, topk):
    """llama.cpp#20363: identical outputs because the sparse path was off."""
    config = draw_config(seed, index_topk=topk)
    model, documents = build(config, seed), random_documents(config, LENGTHS, seed)
    out = run(model, PackedBatch.from_documents(documents))
    visible = torch.cat([torch.arange(1, length + 1) for length in LENGTHS])
    for layer in out.trace.selections:
        assert torch.equal(kept_counts(out, layer), visible.clamp(max=topk))
    assert kept_counts(out, 0).max() < visible.max()
    difference = (log_probs(model, documents) - log_probs(model, documents, attention="dense")).abs().amax(1)
    assert difference[visible <= topk].max() <= TOLERANCE
    assert difference[visible > topk].max() > 1e-3


@pytest.mark.parametrize("length", [7, 8, 9])
def test_the_boundary_of_topk(length):
    """Lengths of topk - 1 and topk equal dense to the bit, topk + 1 does not."""
    config = draw_config(1, index_topk=8)
    model, documents = build(config, 1), random_documents(config, [length], 1)
    equal = torch.equal(log_probs(model, documents), log_probs(model, documents, attention="dense"))
    assert equal == (length <= 8)


# ---- packed and separate


@pytest.mark.parametrize("seed", range(4))
def test_packed_documents_equal_separate_ones(seed):
    """sglang#33197: ragged lengths."""
    config = draw_config(seed, index_topk=5)
    lengths = [1, 12, 33, 33, 2, 40, 31]
    model, documents = build(config, seed), random_documents(config, lengths, seed)
    separate = torch.cat([log_probs(model, [document]) for document in documents])
    assert (log_probs(model, documents) - separate).abs().max() <= TOLERANCE


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_document_feels_neither_its_neighbours_nor_a_token_later_ones(batch_invariant):
    config = draw_config(3, index_topk=5)
    model, documents = build(config, 3, batch_invariant=batch_invariant), random_documents(config, [12, 20, 9])
    before = log_probs(model, documents)[12:32]
    others = random_documents(config, [12, 20, 9], seed=7)
    beside_others = log_probs(model, [others[0], documents[1], others[2]])[12:32]
    with_another_end = log_probs(model, [documents[1][:15] + others[1][15:]])[:15]
    limit = 0.0 if batch_invariant else TOLERANCE
    assert (beside_others - before).abs().max() <= limit
    assert (with_another_end - before[:15]).abs().max() <= limit


# ---- one shot, chunks, one token at a time


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("steps", [STEPS, one_at_a_time(LENGTHS)], ids=["chunks of 1, 3, 2", "one at a time"])
@pytest.mark.parametrize("mode", [{}, {"always_score": True}, {"attention": "dense"}], ids=str)
def test_steps_over_a_cache_equal_one_packed_pass(seed, steps, mode):
    """transformers#44058, transformers#44103 (issue transformers#44052): the index cache was reset by a step of several
    tokens. vllm#47827, sglang-jax#1036."""
    config = draw_config(seed, index_topk=6, index_n_heads=16)
    model, documents = build(config, seed), random_documents(config, LENGTHS, seed)
    got = torch.cat(run_in_steps(model, documents, steps, **mode))
    assert (got - log_probs(model, documents, **mode)).abs().max() <= TOLERANCE


def selections_in_steps(
    model: Transformer, documents: Sequence[Sequence[int]], steps: Sequence[Sequence[int]], replay: Replay | None = None
) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
    """Selected positions and experts by layer and log-probabilities, in packed order; ``replay`` is in that order."""
    starts = [sum(map(len, documents[:s])) for s in range(len(documents))]
    cache = SequenceCache(model.config, num_sequences=len(documents), capacity=max(map(len, documents)))
    rows_seen: list[int] = []
    kept: dict[int, list[Tensor]] = {}
    experts: dict[int, list[Tensor]] = {}
    values = []
    for counts in steps:
        spans = [(s, cache.lengths[s], count) for s, count in enumerate(counts)]
        tokens = torch.tensor([t for s, begin, n in spans for t in documents[s][begin : begin + n]])
        rows = torch.tensor([starts[s] + i for s, begin, n in spans for i in range(begin, begin + n)])
        part = None
        if replay is not None:
            part = Replay(
                {layer: Selection(s.positions_TK[rows]) for layer, s in replay.selections.items()},
                {layer: choice[rows] for layer, choice in replay.experts.items()},
            )
        mode = ForwardMode(always_score=True, trace=True, replay=part)
        with torch.no_grad():
            out = model(tokens, cache.step(counts), mode)
            values.append(model.logits(out.hidden_TD).log_softmax(-1))
        rows_seen += rows.tolist()
        for layer, choice in out.trace.selections.items():
            kept.setdefault(layer, []).append(choice.positions_TK)
        for layer, choice in out.trace.experts.items():
            experts.setdefault(layer, []).append(choice)
    order = torch.tensor(rows_seen).argsort()
    return (
        {layer: torch.cat(parts)[order] for layer, parts in kept.items()},
        {layer: torch.cat(parts)[order] for layer, parts in experts.items()},
        torch.cat(values)[order],
    )


@pytest.mark.parametrize("steps", [STEPS, one_at_a_time(LENGTHS)], ids=["chunks of 1, 3, 2", "one at a time"])
def test_structural_ties_are_kept_alike_on_all_paths(steps):
    """sglang#31115: with 4 index heads many scores are exactly 0 and the k-th rank is often tied."""
    pairs = open_pairs = compared = 0
    document_start_T = torch.repeat_interleave(torch.tensor([0, *LENGTHS[:-1]]).cumsum(0), torch.tensor(LENGTHS))
    for seed in range(6):
        config = draw_config(seed, index_topk=6, index_n_heads=4)
        model, documents = build(config, seed), random_documents(config, LENGTHS, seed)
        out = run(model, PackedBatch.from_documents(documents), always_score=True)
        kept, experts, got = selections_in_steps(model, documents, steps)
        expected = log_probs(model, documents, always_score=True)
        differs_T = torch.zeros(sum(LENGTHS), dtype=torch.bool)
        for layer, choice in out.trace.selections.items():
            row_differs_T = (kept[layer] != choice.positions_TK).any(dim=1)
            pairs, open_pairs = pairs + len(row_differs_T), open_pairs + int(row_differs_T.sum())
            differs_T |= row_differs_T
        for layer, choice in out.trace.experts.items():
            row_differs_T = (experts[layer] != choice).any(dim=1)
            pairs, open_pairs = pairs + len(row_differs_T), open_pairs + int(row_differs_T.sum())
            differs_T |= row_differs_T
        # A token is touched by a different choice at or before its place in its own document.
        count_T = differs_T.cumsum(0)
        before_document_T = count_T[document_start_T] - differs_T[document_start_T].long()
        equal_T = count_T == before_document_T
        compared += int(equal_T.sum())
        assert (got - expected)[equal_T].abs().max() <= TOLERANCE
        # Replayed choices leave no freedom at all.
        replay = Replay(out.trace.selections, out.trace.experts)
        assert (selections_in_steps(model, documents, steps, replay)[2] - expected).abs().max() <= TOLERANCE
    print(f"choices that differ between paths: {open_pairs} of {pairs} (token, layer) pairs")
    assert open_pairs <= 0.001 * pairs
    assert compared > 0.9 * 6 * sum(LENGTHS)


def test_all_tied_scores_keep_the_first_keys_on_all_paths():
    """sglang#31115, sglang#30698: a plateau everywhere."""
    config = draw_config(1, index_topk=6, index_n_heads=4)
    model, documents = tied(build(config, 1)), random_documents(config, LENGTHS)
    out = run(model, PackedBatch.from_documents(documents))
    counts = torch.cat([torch.arange(1, length + 1) for length in LENGTHS]).clamp(max=6)
    first = torch.where(torch.arange(6) < counts[:, None], torch.arange(6), -1).int()
    expected = log_probs(model, documents)
    for steps in (STEPS, one_at_a_time(LENGTHS)):
        kept, _, got = selections_in_steps(model, documents, steps)
        for layer, choice in out.trace.selections.items():
            assert torch.equal(choice.positions_TK, first)
            assert torch.equal(kept[layer], first)
        assert (got - expected).abs().max() <= TOLERANCE


def test_small_tiles_change_nothing_that_matters(monkeypatch):
    """vllm#47827: corruption once a sequence passed the size of one scoring block."""
    config = draw_config(4, index_topk=5, index_n_heads=16)
    model, documents = build(config, 4), random_documents(config, [50, 50, 17], 4)
    expected = log_probs(model, documents)
    for module, name, value in (
        (selection, "TILE_CELLS", 100),
        (selection, "PRODUCT_CELLS", 64),
        (latent_attention, "GATHER_CELLS", 200),
        (latent_attention, "LOGIT_CELLS", 200),
        (expanded_attention, "MASKED_QUERIES", 7),
        (expanded_attention, "KEPT_MASK_KEYS", 3),
    ):
        monkeypatch.setattr(module, name, value)
    assert (log_probs(model, documents) - expected).abs().max() <= TOLERANCE
    got = torch.cat(run_in_steps(model, documents, [[20, 31, 5], [29, 18, 12], [1, 1, 0]]))
    assert (got - expected).abs().max() <= TOLERANCE


# ---- batch-invariant models: equal bits


def invariant(seed: int, **fixed: Any) -> tuple[ModelConfig, Transformer]:
    config = draw_config(seed, **fixed)
    return config, build(config, seed, batch_invariant=True)


@pytest.mark.parametrize("seed", range(3))
def test_invariant_models_equal_plain_ones_to_rounding(seed):
    config, model = invariant(seed, index_topk=6, index_n_heads=16)
    documents = random_documents(config, LENGTHS, seed)
    plain = build(config, seed)
    for mode in ({}, {"attention": "dense"}):
        assert (log_probs(model, documents, **mode) - log_probs(plain, documents, **mode)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_heads", [4, 16])
def test_invariant_models_give_equal_bits_in_chunks_decode_and_packed_passes(seed, num_heads):
    config, model = invariant(seed, index_topk=6, index_n_heads=num_heads)
    if seed == 0:
        tied(model)
    documents = random_documents(config, LENGTHS, seed)
    expected = log_probs(model, documents)
    for steps in (STEPS, one_at_a_time(LENGTHS)):
        assert torch.equal(torch.cat(run_in_steps(model, documents, steps)), expected)
    assert torch.equal(torch.cat([log_probs(model, [document]) for document in documents]), expected)
    shuffled = [2, 0, 1]
    again = log_probs(model, [documents[i] for i in shuffled]).split([LENGTHS[i] for i in shuffled])
    assert torch.equal(torch.cat([again[shuffled.index(i)] for i in range(3)]), expected)


@pytest.mark.parametrize("seed", range(3))
def test_invariant_models_are_dense_to_the_bit_while_every_key_is_kept(seed):
    config, model = invariant(seed, index_topk=80)
    documents = random_documents(config, [70, 11], seed)
    dense = log_probs(model, documents, attention="dense")
    assert torch.equal(log_probs(model, documents), dense)
    assert torch.equal(log_probs(model, documents, always_score=True), dense)


def test_invariant_models_train_on_the_bits_they_sample_with():
    """flashinfer#2584: the log-probabilities that a trainer sees differed from the sampler's."""
    config, model = invariant(2, index_topk=6)
    documents = random_documents(config, LENGTHS, 2)
    sampled = torch.cat(run_in_steps(model, documents, one_at_a_time(LENGTHS)))
    trained = model.logits(run(model, PackedBatch.from_documents(documents)).hidden_TD).log_softmax(-1)
    assert trained.requires_grad
    assert torch.equal(trained, sampled)


def test_invariant_gradients_equal_plain_ones_to_rounding():
    config, model = invariant(3, index_topk=6, index_n_heads=16)
    batch, plain = random_batch(config, LENGTHS, 3), build(config, 3)
    found = []
    for m in (model, plain):
        LanguageModelLoss(LossConfig(index_kl_weight=0.5))(m, batch).sum.backward()
        found.append(gradients(m))
    for name, gradient in found[1].items():
        limit = 2e-5 * max(1.0, gradient.abs().max().item())
        assert (found[0][name] - gradient).abs().max() <= limit, name


# ---- training


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("lengths", [[1], [2], [23, 9, 30]], ids=str)
def test_gradient_mode_does_not_change_a_bit(batch_invariant, lengths):
    """flashinfer#2584: no-grad and grad passes must give the same log-probabilities."""
    for seed in range(4):
        config = draw_config(seed, index_topk=6)
        model, documents = build(config, seed, batch_invariant=batch_invariant), random_documents(config, lengths)
        batch = PackedBatch.from_documents(documents)
        with_grad = model.logits(run(model, batch).hidden_TD)
        assert with_grad.requires_grad
        assert torch.equal(with_grad.log_softmax(-1), log_probs(model, documents))
        for mode in ({"attention": "dense"}, {"index_loss_T": torch.ones(sum(lengths))}, {"checkpoint": True}):
            grown = model.logits(run(model, batch, **mode).hidden_TD).log_softmax(-1)
            assert torch.equal(grown, log_probs(model, documents, **mode))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_checkpointed_gradients_are_equal_with_shared_indexers(batch_invariant):
    config = draw_config(
        5, num_hidden_layers=4, indexer_types=("full", "shared", "shared", "full"), index_topk=5, index_n_heads=4
    )
    model, batch = build(config, 5, batch_invariant=batch_invariant), random_batch(config, LENGTHS)
    found = []
    for checkpoint in (False, True):
        LanguageModelLoss(LossConfig(index_kl_weight=0.3, checkpoint=checkpoint))(model, batch).sum.backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_twenty_training_passes_give_the_same_bits():
    """flashinfer#2584: a top-k that differed from run to run wrecked training by reinforcement within steps."""
    config = draw_config(1, index_topk=5, index_n_heads=4)
    model, batch = build(config, 1), random_batch(config, LENGTHS)
    first = None
    for _ in range(20):
        LanguageModelLoss(LossConfig(index_kl_weight=0.3))(model, batch).sum.backward()
        found = gradients(model)
        first = first or found
        assert all(torch.equal(found[name], first[name]) for name in first)


def test_bf16_paths_stay_within_its_rounding():
    config = draw_config(6, index_topk=6, index_n_heads=16)
    model, documents = build(config, 6).bfloat16(), random_documents(config, LENGTHS, 6)
    expected = log_probs(model, documents)
    got = torch.cat(run_in_steps(model, documents, STEPS))
    # Eight bits of mantissa; a choice on the edge moves whole rows, so the median is what rounding leaves.
    assert (got - expected).abs().median() < 0.02
    assert torch.equal(log_probs(model, documents), expected)


@pytest.mark.parametrize("seed", range(2))
def test_bf16_invariant_models_give_equal_bits_on_all_paths(seed):
    config, model = invariant(seed, index_topk=6)
    model = model.bfloat16()
    documents = random_documents(config, LENGTHS, seed)
    expected = log_probs(model, documents)
    for steps in (STEPS, one_at_a_time(LENGTHS)):
        assert torch.equal(torch.cat(run_in_steps(model, documents, steps)), expected)

"""Multi-token prediction: one set of parameters unrolled, what is carried, what is selected, what is accepted."""

from dataclasses import dataclass, field

import pytest
import torch
from builders import build, draw_config, largest_difference, random_batch, random_documents
from reference_model import Pass, ReferenceModel, rms

from yunque.model.batch import PackedBatch
from yunque.model.cache import PackedView, SequenceCache
from yunque.model.forward import ForwardMode
from yunque.model.objectives import LanguageModelLoss, LossConfig
from yunque.model.transformer import MTPState, Transformer, shift_within_documents
from yunque.ops.visibility import Visibility


def unroll(model: Transformer, batch: PackedBatch, steps: int) -> list[MTPState]:
    """The states of ``steps`` prediction steps over a packed batch."""
    view = PackedView(batch)
    state, states = MTPState(model(batch.tokens_T, view).hidden_TD, None, 0), []
    for ahead in range(1, steps + 1):
        tokens = shift_within_documents(batch.tokens_T, batch.document_start_T, ahead, 0)
        state, _ = model.predict_next(state, tokens, view)
        states.append(state)
    return states


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_shared", [True, False])
def test_unrolled_drafts_carry_the_normed_state(seed, is_shared):
    """vllm#46075, lmdeploy#4737: the state before the norm was carried; acceptance fell to 10 % at position 2."""
    config = draw_config(seed, index_share_for_mtp_iteration=is_shared)
    model, batch = build(config, seed).double(), random_batch(config, [5, 14, 1, 26], seed)
    states = unroll(model, batch, 3)
    reference = ReferenceModel(config, model.state_dict())
    norm = reference.p[f"model.layers.{config.num_hidden_layers}.shared_head.norm.weight"]
    assert (norm - 1).abs().max() > 0.1
    side = Pass(batch, batch.loss_mask_T)
    expected = reference.mtp(reference.forward(side), side, 3)
    for state, right in zip(states, expected, strict=True):
        assert largest_difference(state.hidden_TD, right) < 1e-11


def test_carrying_the_state_before_the_norm_would_be_another_model():
    """vllm#46075: the first draft agrees, every later one does not."""
    config = draw_config(0)
    model, batch = build(config, 0).double(), random_batch(config, [26], 0)
    reference = ReferenceModel(config, model.state_dict())
    layer, eps = config.num_hidden_layers, config.rms_norm_eps
    norm = reference.p[f"model.layers.{layer}.shared_head.norm.weight"]
    hidden = reference.forward(Pass(batch, batch.loss_mask_T, dense=True))
    view, mode = PackedView(batch), ForwardMode(attention="dense")
    right = wrong = MTPState(model(batch.tokens_T, view, mode).hidden_TD, None, 0)
    assert largest_difference(right.hidden_TD, hidden) < 1e-11
    differences = []
    for ahead in (1, 2):
        tokens = shift_within_documents(batch.tokens_T, batch.document_start_T, ahead, 0)
        right, _ = model.predict_next(right, tokens, view, mode)
        wrong, out = model.predict_next(wrong, tokens, view, mode)
        differences.append(largest_difference(wrong.hidden_TD, right.hidden_TD))
        assert largest_difference(rms(out.hidden_TD, norm, eps), wrong.hidden_TD) < 1e-11
        wrong = MTPState(out.hidden_TD, wrong.selection, wrong.step)
    assert differences[0] < 1e-12
    assert differences[1] > 1e-2


def test_the_prediction_layer_selects_for_itself():
    """ATOM#1362: the target's selection was reused and acceptance collapsed."""
    config = draw_config(0, index_topk=4)
    model, batch = build(config, 0), random_batch(config, [40], 0)
    main = model(batch.tokens_T, PackedView(batch), ForwardMode(trace=True)).trace.selections
    (state,) = unroll(model, batch, 1)
    assert state.selection is not None
    for selection in main.values():
        assert not torch.equal(selection.positions_TK, state.selection.positions_TK)


def test_later_steps_reuse_the_first_selection_where_the_config_says_so():
    for is_shared in (True, False):
        config = draw_config(0, index_topk=4, index_share_for_mtp_iteration=is_shared)
        first, second, third = unroll(build(config, 0), random_batch(config, [40], 0), 3)
        assert (second.selection is first.selection) == (third.selection is first.selection) == is_shared
        if not is_shared:
            assert not torch.equal(first.selection.positions_TK, second.selection.positions_TK)


@dataclass
class RecordingView:
    """A packed view that remembers what was written."""

    inner: PackedView
    written: list[tuple[int, str, torch.Tensor]] = field(default_factory=list)

    @property
    def positions_T(self) -> torch.Tensor:
        return self.inner.positions_T

    @property
    def visibility(self) -> Visibility:
        return self.inner.visibility

    def write(self, layer: int, name: str, rows_TR: torch.Tensor) -> torch.Tensor:
        self.written.append((layer, name, rows_TR))
        return self.inner.write(layer, name, rows_TR)


@pytest.mark.parametrize("topk", [4, 50])
def test_index_keys_are_written_in_every_step_even_where_nothing_is_scored(topk):
    config = draw_config(0, index_topk=topk)
    model, batch = build(config, 0), random_batch(config, [20], 0)
    view = RecordingView(PackedView(batch))
    state = MTPState(model(batch.tokens_T, view).hidden_TD, None, 0)
    for ahead in (1, 2):
        tokens = shift_within_documents(batch.tokens_T, batch.document_start_T, ahead, 0)
        state, _ = model.predict_next(state, tokens, view)
    own = [rows for layer, name, rows in view.written if (layer, name) == (config.num_hidden_layers, "index")]
    assert len(own) == 2
    assert (own[0] != own[1]).any(dim=1).all()
    main = {layer for layer, name, _ in view.written if name == "index"} - {config.num_hidden_layers}
    assert main == {layer for layer in range(config.num_hidden_layers) if config.has_indexer(layer)}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_shared_parameters_sum_the_gradients_of_all_steps(steps):
    """xtuner#2072: one logical step was trained instead of seven."""
    config = draw_config(3)
    model, batch = build(config, 3).double(), random_batch(config, [5, 14, 26], 3)
    parameters = [p for name, p in model.named_parameters() if f"layers.{config.num_hidden_layers}.eh_proj" in name]

    def loss(weight: float) -> torch.Tensor:
        return LanguageModelLoss(LossConfig(mtp_weight=weight, mtp_steps=steps, balance_weight=0.0))(model, batch).sum

    got = torch.autograd.grad(loss(0.25 * steps), parameters)
    view = PackedView(batch)
    state, alone = MTPState(model(batch.tokens_T, view).hidden_TD, None, 0), []
    weights_T = (batch.loss_mask_T * (batch.targets_T >= 0)).double()
    for ahead in range(1, steps + 1):
        start = batch.document_start_T
        state, _ = model.predict_next(state, shift_within_documents(batch.tokens_T, start, ahead, 0), view)
        log_probs = model.logits(state.hidden_TD).log_softmax(-1)
        targets = shift_within_documents(batch.targets_T, start, ahead, -1)
        rows = (targets >= 0).nonzero()[:, 0]
        weight = shift_within_documents(weights_T, start, ahead, 0.0)[rows]
        nll = -(weight * log_probs[rows, targets[rows]]).sum()
        alone.append(torch.autograd.grad(0.25 * nll, parameters, retain_graph=True))
    for i, gradient in enumerate(got):
        assert largest_difference(gradient, sum(part[i] for part in alone)) < 1e-10
    assert all(part[0].abs().max() > 1e-3 for part in alone)


def test_targets_of_later_steps_stay_inside_the_document():
    batch = PackedBatch.from_documents([[1, 2, 3], [4], [5, 6, 7, 8]])
    start = batch.document_start_T

    def shifted(by: int) -> list[int]:
        return shift_within_documents(batch.targets_T, start, by, -1).tolist()

    assert batch.targets_T.tolist() == [2, 3, -1, -1, 6, 7, 8, -1]
    assert shifted(1) == [3, -1, -1, -1, 7, 8, -1, -1]
    assert shifted(2) == [-1, -1, -1, -1, 8, -1, -1, -1]
    assert shifted(50) == [-1] * 8


def test_prediction_over_a_cache_in_chunks_equals_one_shot():
    config = draw_config(2, index_topk=4)
    model, (document,) = build(config, 2).double(), random_documents(config, [21])
    (whole,) = unroll(model, PackedBatch.from_documents([document]), 1)
    cache = SequenceCache(config, num_sequences=1, capacity=24, dtype=torch.float64)
    parts, done = [], 0
    with torch.no_grad():
        for count in (9, 1, 3, 2, 5):
            view, span = cache.step([count]), slice(done, done + count)
            hidden = model(torch.tensor(document[span]), view).hidden_TD
            following = torch.tensor(document[done + 1 : done + count + 1])
            parts.append(model.predict_next(MTPState(hidden, None, 0), following, view)[0].hidden_TD)
            done += count
    assert largest_difference(torch.cat(parts), whole.hidden_TD[:20]) < 1e-11


def greedy(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """One token at a time."""
    cache = SequenceCache(model.config, num_sequences=1, capacity=len(prompt) + count)
    tokens, feed = list(prompt), list(prompt)
    for _ in range(count):
        hidden = model(torch.tensor(feed), cache.step([len(feed)])).hidden_TD
        feed = [int(model.logits(hidden[-1:]).argmax())]
        tokens += feed
    return tokens


def drafted(model: Transformer, tokens: list[int], count: int) -> list[int]:
    """The greedy next token, then ``count`` drafts of the prediction layer after it."""
    batch = PackedBatch.from_documents([tokens])
    view = PackedView(batch)
    hidden = model(batch.tokens_T, view).hidden_TD
    out = [int(model.logits(hidden[-1:]).argmax())]
    state = MTPState(hidden, None, 0)
    for ahead in range(1, count + 1):
        state, _ = model.predict_next(state, torch.tensor([*tokens, *out][ahead:]), view)
        out.append(int(model.logits(state.hidden_TD[-1:]).argmax()))
    return out


@pytest.mark.parametrize("drafter", ["prediction layer", "target", "noise"])
@torch.no_grad()
def test_speculation_gives_the_greedy_output_whoever_drafts(drafter):
    """vllm#55605, vllm#52833, vllm-ascend#13523: acceptance of 0-2 %. The target as its own drafter is always right."""
    config = draw_config(3, index_topk=4)
    model = build(config, 3)
    prompt, count, ahead = [1, 2, 3] * 4, 24, 3
    expected = greedy(model, prompt, count)
    cache = SequenceCache(config, num_sequences=1, capacity=len(prompt) + count + ahead + 1)
    model(torch.tensor(prompt), cache.step([len(prompt)]))
    tokens, proposals, accepted = list(prompt), 0, 0
    while len(tokens) < len(expected):
        step = drafted(model, tokens, ahead)
        if drafter == "target":
            step = (expected + greedy(model, expected, ahead + 1)[len(expected) :])[len(tokens) :][: ahead + 1]
        elif drafter == "noise":
            step[1:] = [(token + 1) % config.vocab_size for token in step[1:]]
        hidden = model(torch.tensor(step), cache.step([len(step)])).hidden_TD
        following = model.logits(hidden).argmax(-1).tolist()
        right = 1
        while right < len(step) and step[right] == following[right - 1]:
            right += 1
        proposals, accepted = proposals + len(step) - 1, accepted + right - 1
        tokens += step[:right]
        cache.truncate(0, len(tokens))
    assert tokens[: len(expected)] == expected
    if drafter == "target":
        assert accepted == proposals > 0

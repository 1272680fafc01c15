"""Speculation with a prediction layer that computes the target: every draft is accepted, at every distance.

vllm#55605, vllm#52833, vllm-ascend#13523: acceptance of 0-2 %, or decaying with the distance. With random weights no
draft need be right, so that tokens, rows or selections of the wrong step go unseen. Here the prediction layer is the
target's only decoder layer over again, and reads the embedding alone: at distance k it sees the same tokens as the
target, but for k at the start. Those are tokens that the indexer never keeps.
"""

from __future__ import annotations

import pytest
import torch
from builders import build, draw_config, largest_difference, random_documents

from yunque.model.batch import PackedBatch
from yunque.model.cache import PackedView, SequenceCache
from yunque.model.config import ModelConfig
from yunque.model.forward import ForwardMode
from yunque.model.transformer import MTPState, Transformer, shift_within_documents

#: Distance of the furthest draft; as many tokens stand before the prompt.
AHEAD = 4
#: The token that stands there: no query keeps it while other keys can be kept.
UNSEEN = 0
#: The target goes on counting around this circle.
CIRCLE = [1, 2, 3, 4, 5]
PROMPT = [UNSEEN] * AHEAD + CIRCLE * 4
TOPK = 6


def one_layer_config(seed: int) -> ModelConfig:
    """One layer with experts, its indexer choosing among more keys than it keeps in all rows of the prompt's end."""
    fixed = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "index_share_for_mtp_iteration": False}
    return draw_config(seed, index_topk=TOPK, index_head_dim=16, rms_norm_eps=1e-12, **fixed)


@torch.no_grad()
def target_as_its_own_drafter(config: ModelConfig, seed: int) -> Transformer:
    """A random target in float64 whose prediction layer is its decoder layer."""
    model = build(config, seed).double()
    layer, mtp = model.model.layers
    hide_from_indexer(model)
    embedding = model.model.embed_tokens.weight
    embedding.div_(embedding.square().mean(dim=1, keepdim=True).sqrt())  # enorm leaves it as it is
    model.lm_head.weight[CIRCLE] = 2 * embedding[[CIRCLE[-1], *CIRCLE[:-1]]]
    model.lm_head.weight[:, 0] = 0.0  # the entry that all embeddings share
    for name, parameter in layer.named_parameters():
        if "down_proj" in name or "o_proj" in name:
            parameter.mul_(0.3)  # so that the embedding decides what comes next
    report = mtp.load_state_dict(layer.state_dict(), strict=False)
    assert not report.unexpected_keys
    assert set(report.missing_keys) == {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    mtp.enorm.weight.fill_(1.0)
    mtp.eh_proj.weight.copy_(torch.eye(config.hidden_size, 2 * config.hidden_size))
    mtp.shared_head["norm"].weight.copy_(model.model.norm.weight)
    return model


@torch.no_grad()
def hide_from_indexer(model: Transformer) -> None:
    """Give ``UNSEEN`` a key opposite to every query, in a dimension that does not turn; all others one along it."""
    layer = model.model.layers[0]
    attention, indexer, still = layer.self_attn, layer.self_attn.indexer, model.config.qk_rope_head_dim
    model.model.embed_tokens.weight[:, 0] = 2.0
    model.model.embed_tokens.weight[UNSEEN, 0] = -2.0
    layer.input_layernorm.weight[0] = 1.0
    attention.q_a_proj.weight[0] = 0.0
    attention.q_a_proj.weight[0, 0] = 4.0  # the first entry of the query latent says which kind of token asks
    attention.q_a_layernorm.weight[0] = 1.0
    queries_JdQ = indexer.wq_b.weight.view(model.config.index_n_heads, model.config.index_head_dim, -1)
    queries_JdQ[:, still] = 0.0
    queries_JdQ[:, still, 0] = 20.0
    indexer.wk.weight[still] = 0.0
    indexer.wk.weight[still, 0] = 4.0
    indexer.k_norm.weight[still], indexer.k_norm.bias[still] = 1.0, 0.0
    indexer.weights_proj.weight[:, 0] = 4.0
    indexer.weights_proj.weight[:, 1:] *= 0.1


def greedy(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """One token at a time."""
    cache = SequenceCache(model.config, num_sequences=1, capacity=len(prompt) + count, dtype=torch.float64)
    tokens, feed = list(prompt), list(prompt)
    for _ in range(count):
        hidden = model(torch.tensor(feed), cache.step([len(feed)])).hidden_TD
        feed = [int(model.logits(hidden[-1:]).argmax())]
        tokens += feed
    return tokens


def drafts(model: Transformer, tokens: list[int]) -> list[int]:
    """The target's next token and ``AHEAD`` drafts after it."""
    batch = PackedBatch.from_documents([tokens])
    view = PackedView(batch)
    state = MTPState(model(batch.tokens_T, view).hidden_TD, None, 0)
    out = [int(model.logits(state.hidden_TD[-1:]).argmax())]
    for distance in range(1, AHEAD + 1):
        state, _ = model.predict_next(state, torch.tensor([*tokens, *out][distance:]), view)
        out.append(int(model.logits(state.hidden_TD[-1:]).argmax()))
    return out


@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_prediction_layer_that_is_the_target_says_what_the_target_says(seed):
    """At every distance and row its logits are the target's to 1e-7, from a choice among more keys than are kept."""
    config = one_layer_config(seed)
    model = target_as_its_own_drafter(config, seed)
    (document,) = random_documents(config, [60], seed)
    tokens_T = torch.tensor([UNSEEN] * AHEAD + [token for token in document if token != UNSEEN])
    batch = PackedBatch.from_documents([tokens_T.tolist()])
    view, first = PackedView(batch), AHEAD + TOPK
    out = model(tokens_T, view, ForwardMode(trace=True))
    kept = out.trace.selections[0].positions_TK[first:]
    assert kept.min() >= AHEAD, "tokens that only the target has are kept: the construction is wrong"
    target, state = model.logits(out.hidden_TD), MTPState(out.hidden_TD, None, 0)
    for distance in range(1, AHEAD + 1):
        following_T = shift_within_documents(tokens_T, batch.document_start_T, distance, UNSEEN)
        state, _ = model.predict_next(state, following_T, view)
        got = model.logits(state.hidden_TD)[first:-distance]
        assert largest_difference(got, target[first + distance :]) < 1e-7, f"distance {distance}"


@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_all_drafts_of_the_target_are_accepted_and_the_text_is_greedy(seed):
    """Verification over a cache, all drafts at once: as many steps as accepted drafts need, none rejected."""
    config, count = one_layer_config(seed), 6 * (AHEAD + 1)
    model = target_as_its_own_drafter(config, seed)
    expected = greedy(model, PROMPT, count)
    assert expected == PROMPT + CIRCLE * (count // len(CIRCLE))
    cache = SequenceCache(config, num_sequences=1, capacity=len(expected) + AHEAD + 1, dtype=torch.float64)
    model(torch.tensor(PROMPT), cache.step([len(PROMPT)]))
    tokens, accepted = list(PROMPT), []
    while len(tokens) < len(expected):
        step = drafts(model, tokens)
        following = model.logits(model(torch.tensor(step), cache.step([len(step)])).hidden_TD).argmax(-1).tolist()
        accepted.append(next((i for i in range(AHEAD) if step[i + 1] != following[i]), AHEAD))
        tokens += step[: accepted[-1] + 1]
        cache.truncate(0, len(tokens))
    assert accepted == [AHEAD] * 6
    assert tokens == expected

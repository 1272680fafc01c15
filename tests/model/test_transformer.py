"""The whole forward pass against a second model in float64: every layer, every selection, any architecture."""

import copy
from dataclasses import replace

import pytest
import torch
from builders import build, draw_config, kept_counts, largest_difference, random_batch, run
from reference_model import Pass, ReferenceModel

from yunque.model.cache import PackedView
from yunque.model.forward import Replay
from yunque.model.presets import preset
from yunque.model.transformer import MTPState
from yunque.ops.visibility import Selection

LENGTHS = [5, 14, 1, 26, 26, 2]


def as_mask(selection: Selection | None, first_T: torch.Tensor) -> torch.Tensor:
    """Bool [T, T] of the kept keys."""
    assert selection is not None
    mask = torch.zeros(len(first_T), len(first_T) + 1, dtype=torch.bool)
    rows = torch.where(selection.positions_TK < 0, len(first_T), selection.rows(first_T))
    return mask.scatter_(1, rows, True)[:, :-1]


@pytest.mark.parametrize("seed", range(16))
def test_layers_selections_and_logits_equal_the_reference_in_float64(seed):
    """mlx-lm#1453: sequences several times longer than index_topk. ik_llama.cpp#2099: wrong pair layout."""
    config = draw_config(seed)
    model = build(config, seed).double()
    batch = random_batch(config, LENGTHS, seed)
    out = run(model, batch)
    reference, right = ReferenceModel(config, model.state_dict()), Pass(batch, batch.loss_mask_T)
    hidden = reference.forward(right)
    for layer in range(config.num_hidden_layers):
        assert torch.equal(as_mask(out.trace.selections[layer], batch.document_start_T), right.kept[layer])
        assert largest_difference(out.trace.hidden[layer], right.hidden[layer]) < 1e-11
    expected = hidden @ reference.p["lm_head.weight"].T
    assert largest_difference(model.logits(out.hidden_TD), expected) < 1e-11


@pytest.mark.parametrize("seed", range(4))
def test_dense_pass_equals_the_reference_without_an_indexer(seed):
    config = draw_config(seed)
    model = build(config, seed).double()
    batch = random_batch(config, LENGTHS, seed)
    out = run(model, batch, attention="dense")
    hidden = ReferenceModel(config, model.state_dict()).forward(Pass(batch, batch.loss_mask_T, dense=True))
    assert largest_difference(out.hidden_TD, hidden) < 1e-11
    assert all(selection is None for selection in out.trace.selections.values())


@pytest.mark.parametrize("key", ["rope_interleave", "indexer_rope_interleave"])
def test_each_layout_key_changes_the_numbers_of_its_own_part(key):
    """transformers#46842: the key was ignored. ik_llama.cpp#2099: errors only where the indexer decides."""
    config = draw_config(3, qk_rope_head_dim=8, index_head_dim=16, index_n_heads=16, index_topk=4)
    batch = random_batch(config, [40], 0)
    one, other = (run(build(replace(config, **{key: value}), 3).double(), batch).hidden_TD for value in (True, False))
    if key == "indexer_rope_interleave":  # not felt while every key is kept
        assert (one[:4] - other[:4]).abs().max() < 1e-12
    assert (one - other).abs().max() > 1e-3


def test_layout_of_the_indexer_is_invisible_while_everything_is_kept():
    """ik_llama.cpp#2099: index_topk of at least the length must not feel the indexer at all."""
    config = draw_config(3, index_topk=40)
    batch = random_batch(config, [40], 0)
    one, other = (
        run(build(replace(config, indexer_rope_interleave=value), 3), batch).hidden_TD for value in (True, False)
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("types", [("full", "shared", "shared", "full"), ("full", "full", "shared", "shared")])
def test_shared_layers_use_the_very_selection_of_the_full_layer_below(types):
    """ik_llama.cpp#2063: shared layers made a selection of their own; perplexity 3.21 against 2.70."""
    config = draw_config(1, num_hidden_layers=4, indexer_types=types, first_k_dense_replace=1)
    out = run(build(config, 1), random_batch(config, [30], 0))
    selections, source = out.trace.selections, None
    for layer, kind in enumerate(types):
        source = layer if kind == "full" else source
        assert selections[layer] is selections[source]
    full = [layer for layer, kind in enumerate(types) if kind == "full"]
    assert not torch.equal(selections[full[0]].positions_TK, selections[full[1]].positions_TK)


def test_shared_layers_have_no_indexer_tensors():
    """llama.cpp#24770, mlx-lm#1418: loading failed because shared layers were expected to have an indexer."""
    config = draw_config(1, num_hidden_layers=3, indexer_types=("full", "shared", "full"))
    names = [name for name in build(config).state_dict() if ".indexer." in name]
    assert {name.split(".")[2] for name in names} == {"0", "2", "3"}


@pytest.mark.parametrize("topk", [2, 5, 29])
def test_sparse_pass_keeps_fewer_keys_than_there_are_and_differs_from_dense(topk):
    """llama.cpp#20363: five days of experiments with identical checksums, because the sparse path was off.
    1bit-MONSTER#2418: right where topk covers everything, wrong at topk 2."""
    config = draw_config(2, index_topk=topk)
    model, batch = build(config, 2), random_batch(config, [30], 0)
    out = run(model, batch)
    counts = kept_counts(out, 0)
    assert torch.equal(counts, torch.arange(1, 31).clamp(max=topk))
    assert counts.max() < 30
    dense = run(model, batch, attention="dense").hidden_TD
    assert (out.hidden_TD - dense)[topk:].abs().max() > 1e-4
    torch.testing.assert_close(out.hidden_TD[:topk], dense[:topk], rtol=0, atol=1e-5)


def test_replayed_choices_give_the_same_numbers_and_other_choices_do_not():
    config = draw_config(7, num_hidden_layers=3, first_k_dense_replace=1, indexer_types=("full", "shared", "full"))
    model, batch = build(config, 7), random_batch(config, [30, 9], 0)
    out = run(model, batch)
    replay = Replay(out.trace.selections, out.trace.experts)
    assert torch.equal(run(model, batch, replay=replay).hidden_TD, out.hidden_TD)
    moved = Selection(out.trace.selections[0].positions_TK[:, :-1])
    again = run(model, batch, replay=Replay({0: moved}))
    assert again.trace.selections[1] is moved
    assert (again.hidden_TD - out.hidden_TD).abs().max() > 1e-3
    swapped = (out.trace.experts[1] + 1) % config.n_routed_experts
    again = run(model, batch, replay=Replay(experts={1: swapped}))
    assert torch.equal(again.trace.experts[1], swapped)
    assert (again.hidden_TD - out.hidden_TD).abs().max() > 1e-3


def test_expert_load_counts_every_choice():
    config = draw_config(4, num_hidden_layers=3, first_k_dense_replace=1)
    out = run(build(config, 4), random_batch(config, [30, 9], 0))
    load = out.side.expert_load_LE
    assert load.shape == (2, config.n_routed_experts)
    assert (load.sum(1) == 39 * config.num_experts_per_tok).all()
    assert torch.equal(load[0], torch.bincount(out.trace.experts[1].flatten(), minlength=config.n_routed_experts))


def test_model_without_mtp_refuses_to_predict_ahead():
    config = draw_config(0, num_nextn_predict_layers=0)
    model, batch = build(config), random_batch(config, [5])
    with pytest.raises(ValueError, match="no MTP layer"):
        model.predict_next(MTPState(torch.zeros(5, config.hidden_size), None, 0), batch.tokens_T, PackedView(batch))


def test_nano_preset_runs_in_bf16_and_keeps_the_head_in_fp32():
    config = preset("nano")
    model, batch = build(config).bfloat16(), random_batch(config, [30])
    out = run(model, batch)
    assert out.hidden_TD.dtype == torch.bfloat16
    assert model.logits(out.hidden_TD).dtype == torch.float32


@pytest.mark.parametrize("seed", range(8))
def test_joined_projections_change_nothing_but_rounding(seed):
    config = draw_config(seed)
    model, batch = build(config, seed).double(), random_batch(draw_config(seed), LENGTHS, seed)
    names = list(model.state_dict())
    with torch.inference_mode():
        plain = run(model, batch)
        joined = run(model.join_projections(), batch)
    for layer in range(config.num_hidden_layers):
        first_T = batch.document_start_T
        kept = [as_mask(out.trace.selections[layer], first_T) for out in (plain, joined)]
        assert torch.equal(*kept)
        assert largest_difference(joined.trace.hidden[layer], plain.trace.hidden[layer]) < 1e-11
    assert list(model.state_dict()) == names


def test_joined_weights_follow_training_and_are_left_behind_by_a_copy():
    """Training moves the joined tensor in place; a copy or a cast has tensors of its own and does without."""
    model = build(draw_config(1), 1).double().join_projections()
    batch = random_batch(draw_config(1), LENGTHS, 1)
    copied = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    fresh = build(draw_config(1), 1).double()
    fresh.load_state_dict(model.state_dict())
    with torch.inference_mode():
        moved, expected = run(model, batch).hidden_TD, run(fresh, batch).hidden_TD
        assert largest_difference(moved, expected) < 1e-11
        assert largest_difference(run(copied, batch).hidden_TD, expected) > 1e-3
        assert largest_difference(run(model.float().double(), batch).hidden_TD, expected) < 1e-4

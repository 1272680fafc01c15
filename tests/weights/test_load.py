"""A load is strict: what is missing, left over or misshapen is named; every element is counted."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from sample_checkpoints import (
    NANO,
    SHARED,
    empty_state,
    random_state,
    same_bits,
    stored_tensors,
    write_checkpoint,
)

from yunque.core.errors import CheckpointError
from yunque.model.names import tensor_specs
from yunque.weights import load_tensors, open_checkpoint
from yunque.weights.load import check_covered
from yunque.weights.matching import match
from yunque.weights.reader import batches_of, open_reader

MTP = f"model.layers.{NANO.num_hidden_layers}."


def _load(folder, state, **options):
    return load_tensors(open_checkpoint(folder), state, **options)


def test_load_restores_every_bit_in_place(tmp_path):
    saved = random_state(NANO, dtype=torch.bfloat16)
    folder = write_checkpoint(tmp_path / "m", NANO, stored_tensors(saved))
    state = empty_state(NANO, dtype=torch.bfloat16)
    addresses = {name: tensor.data_ptr() for name, tensor in state.items()}
    report = _load(folder, state)
    assert same_bits(state, saved)
    assert {name: tensor.data_ptr() for name, tensor in state.items()} == addresses
    assert report.num_tensors == len(tensor_specs(NANO))
    assert report.num_bytes == sum(t.numel() * t.itemsize for t in saved.values())
    assert report.notes == ()


def test_shared_layers_need_no_indexer(tmp_path):
    """ggml-org/llama.cpp#24770, ml-explore/mlx-lm#1418: layers that share an indexer have none."""
    saved = random_state(SHARED)
    tensors = stored_tensors(saved)
    assert not any(name.startswith("model.layers.1.self_attn.indexer") for name in tensors)
    state = empty_state(SHARED)
    _load(write_checkpoint(tmp_path / "m", SHARED, tensors), state)
    assert same_bits(state, saved)


def test_left_over_indexers_of_shared_layers_are_named_and_can_be_ignored(tmp_path):
    """ggml-org/llama.cpp#24770: some files carry indexer tensors on every layer."""
    saved = random_state(SHARED)
    extra = {
        n: t for n, t in stored_tensors(random_state(NANO)).items() if n.startswith("model.layers.1.self_attn.indexer")
    }
    folder = write_checkpoint(tmp_path / "m", SHARED, stored_tensors(saved) | extra)
    with pytest.raises(CheckpointError) as caught:
        _load(folder, empty_state(SHARED))
    assert "unexpected: 5 (" in str(caught.value)
    assert "model.layers.1.self_attn.indexer.wk.weight" in str(caught.value)
    assert "ignore '*.indexer.*'" in str(caught.value)
    state = empty_state(SHARED)
    report = _load(folder, state, ignore=["*.indexer.*"])
    assert same_bits(state, saved)
    assert report.notes[0].startswith("ignored as asked: 5 (")


def test_tensors_that_would_stay_uninitialised_are_refused(tmp_path):
    """ROCm/ATOM#1260: tensors that no file provides stayed at their initial values."""
    folder = write_checkpoint(tmp_path / "m", SHARED, stored_tensors(random_state(SHARED)))
    with pytest.raises(CheckpointError) as caught:
        _load(folder, empty_state(NANO))  # a model that builds an indexer on the shared layer, too
    message = str(caught.value)
    assert "missing: 5 (" in message
    assert "model.layers.1.self_attn.indexer.weights_proj.weight" in message


def test_parameter_that_was_partly_written_is_refused(tmp_path):
    """ROCm/ATOM#1260: writing is counted, element by element and expert by expert, not assumed."""
    folder = write_checkpoint(tmp_path / "m", NANO, stored_tensors(random_state(NANO)))
    state = empty_state(NANO)
    matching = match(open_checkpoint(folder), state, (), exact=True)
    written: Counter[str] = Counter()
    with open_reader(matching) as reader:
        for batch in batches_of(matching):
            forgetful = [p for p in batch if ".1.mlp.experts.5.up_proj" not in p.fill.entry.name]
            written.update(reader.fill(forgetful))
    one = NANO.moe_intermediate_size * NANO.hidden_size
    total = 2 * one * NANO.n_routed_experts
    with pytest.raises(CheckpointError) as caught:
        check_covered(state, written, where=folder)
    stacked = "model.layers.1.mlp.experts.gate_up_proj"
    assert f"left uninitialised: 1 ({stacked} ({total - one} of {total} elements))" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.1.mlp.experts.7.down_proj.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
        MTP + "shared_head.norm.weight",
    ],
)
def test_missing_tensor_is_named_before_anything_is_read(tmp_path, name):
    tensors = stored_tensors(random_state(NANO))
    del tensors[name]
    folder = write_checkpoint(tmp_path / "m", NANO, tensors)
    state = empty_state(NANO)
    with pytest.raises(CheckpointError, match=rf"missing: 1 \({name}\)"):
        _load(folder, state, ignore=["*"])
    assert all(tensor.isnan().all() for tensor in state.values())


def test_long_lists_are_cut_and_counted(tmp_path):
    tensors = {n: t for n, t in stored_tensors(random_state(NANO)).items() if ".experts." not in n}
    count = 3 * NANO.n_routed_experts * 3
    folder = write_checkpoint(tmp_path / "m", NANO, tensors | {"x": torch.ones(1)})
    with pytest.raises(CheckpointError) as caught:
        _load(folder, empty_state(NANO))
    assert f"missing: {count} (model.layers.1.mlp.experts.0.gate_proj.weight, " in str(caught.value)
    assert f", and {count - 5} more)" in str(caught.value)
    assert "unexpected: 1 (x)" in str(caught.value)


def test_other_shape_is_refused_with_both(tmp_path):
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    tensors = stored_tensors(random_state(NANO)) | {name: torch.zeros(3, NANO.hidden_size)}
    folder = write_checkpoint(tmp_path / "m", NANO, tensors)
    wanted = [NANO.moe_intermediate_size, NANO.hidden_size]
    with pytest.raises(CheckpointError) as caught:
        _load(folder, empty_state(NANO))
    assert f"shape: 1 ({name} is [3, 32] in model.safetensors, {wanted} in the model)" in str(caught.value)


def test_checkpoint_without_mtp_layer_says_which_key_to_set(tmp_path):
    tensors = {n: t for n, t in stored_tensors(random_state(NANO)).items() if not n.startswith(MTP)}
    folder = write_checkpoint(tmp_path / "m", NANO, tensors)
    with pytest.raises(CheckpointError, match="set num_nextn_predict_layers = 0"):
        _load(folder, empty_state(NANO))
    without = empty_state(replace(NANO, num_nextn_predict_layers=0))
    _load(folder, without)
    assert all(torch.isfinite(tensor).all() for tensor in without.values())


def test_mtp_layer_that_the_model_lacks_is_not_dropped_silently(tmp_path):
    folder = write_checkpoint(tmp_path / "m", NANO, stored_tensors(random_state(NANO)))
    without = replace(NANO, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=rf"set num_nextn_predict_layers = 1 or ignore '{MTP}\*'"):
        _load(folder, empty_state(without))
    _load(folder, empty_state(without), ignore=[MTP + "*"])


def test_copies_of_head_and_embedding_under_the_mtp_layer_are_accepted_when_equal(tmp_path):
    """vllm-ascend: some exports put the shared head and embedding under the MTP layer as well."""
    saved = random_state(NANO)
    tensors = stored_tensors(saved)
    copies = {
        MTP + "shared_head.head.weight": tensors["lm_head.weight"].clone(),
        MTP + "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    state = empty_state(NANO)
    _load(write_checkpoint(tmp_path / "with", NANO, tensors | copies), state)
    assert same_bits(state, saved)
    copies[MTP + "shared_head.head.weight"][3, 7] += 1
    folder = write_checkpoint(tmp_path / "unequal", NANO, tensors | copies)
    with pytest.raises(CheckpointError, match=rf"{MTP}shared_head\.head\.weight' differs from 'lm_head\.weight'"):
        _load(folder, empty_state(NANO))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_conversion_rounds_as_torch_does_and_router_stays_float32(tmp_path, stored, wanted):
    saved = random_state(NANO, dtype=stored)
    folder = write_checkpoint(tmp_path / "m", NANO, stored_tensors(saved))
    state = empty_state(NANO, dtype=wanted)
    _load(folder, state)
    assert same_bits(state, {n: t if t.dtype == state[n].dtype else t.to(wanted) for n, t in saved.items()})
    if stored != wanted:
        with pytest.raises(CheckpointError, match=r"dtype: \d+ \(model\.embed_tokens\.weight is"):
            _load(folder, state, exact=True)


def test_correction_bias_keeps_its_float32_values_in_a_bfloat16_model(tmp_path):
    """sgl-project/sglang#31213, #37133, #34857: in bfloat16 a bias around 7 has a handful of values left."""
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = 7 + 0.001 * torch.arange(NANO.n_routed_experts)
    assert len(bias.bfloat16().unique()) == 1
    saved = random_state(NANO, dtype=torch.bfloat16) | {name: bias}
    state = empty_state(NANO, dtype=torch.bfloat16)
    _load(write_checkpoint(tmp_path / "m", NANO, stored_tensors(saved)), state)
    assert torch.equal(state[name], bias)


def test_bfloat16_bias_in_the_file_is_read_with_a_warning(tmp_path, caplog):
    """sgl-project/sglang#31213: a file may have lost what the bias needs; that is said, not hidden."""
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    saved = stored_tensors(random_state(NANO)) | {name: torch.full((NANO.n_routed_experts,), 7.0).bfloat16()}
    state = empty_state(NANO)
    with caplog.at_level(logging.WARNING):
        report = _load(write_checkpoint(tmp_path / "m", NANO, saved), state)
    assert state[name].tolist() == [7.0] * NANO.n_routed_experts
    assert len(report.notes) == 1
    assert f"router biases stored below float32, which their spread needs; read as is: 1 ({name})" in report.notes[0]
    assert report.notes[0] in caplog.text


def test_model_whose_router_was_cast_down_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "m", NANO, stored_tensors(random_state(NANO)))
    state = {name: tensor.bfloat16() for name, tensor in empty_state(NANO).items()}
    with pytest.raises(CheckpointError, match=r"must hold in float32: 6 \(model\.layers\.1\.mlp\.gate\.weight, which"):
        _load(folder, state)


def test_tensor_wider_than_the_rest_is_rounded_with_a_note(tmp_path):
    saved = stored_tensors(random_state(NANO, dtype=torch.bfloat16))
    saved["model.norm.weight"] = torch.full((NANO.hidden_size,), 1 + 2**-20)
    folder = write_checkpoint(tmp_path / "m", NANO, saved)
    report = _load(folder, empty_state(NANO, dtype=torch.bfloat16))
    assert report.notes == ("stored wider than the rest, rounded to the model's dtype: 1 (model.norm.weight)",)


def test_integer_weights_are_refused(tmp_path):
    saved = stored_tensors(random_state(NANO)) | {"model.norm.weight": torch.ones(NANO.hidden_size, dtype=torch.int32)}
    folder = write_checkpoint(tmp_path / "m", NANO, saved)
    with pytest.raises(CheckpointError, match=r"no weight's: 1 \(model\.norm\.weight is I32\)"):
        _load(folder, empty_state(NANO))


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_tensors_read_in_small_pieces_have_the_same_bits(tmp_path, wanted):
    saved = random_state(NANO, dtype=torch.bfloat16)
    folder = write_checkpoint(tmp_path / "m", NANO, stored_tensors(saved))
    whole, pieced = empty_state(NANO, dtype=wanted), empty_state(NANO, dtype=wanted)
    _load(folder, whole, threads=1)
    matching = match(open_checkpoint(folder), pieced, (), exact=False)
    with open_reader(matching) as reader:
        batches = list(batches_of(matching, batch_bytes=1000))
        for batch in batches:
            reader.fill(batch)
    assert max(piece.num_bytes for batch in batches for piece in batch) <= 1000
    assert same_bits(pieced, whole)


def test_target_that_is_not_contiguous_is_filled(tmp_path):
    saved = random_state(NANO)
    folder = write_checkpoint(tmp_path / "m", NANO, stored_tensors(saved))
    state = empty_state(NANO)
    state["lm_head.weight"] = torch.full((NANO.hidden_size, NANO.vocab_size), math.nan).T
    _load(folder, state)
    assert torch.equal(state["lm_head.weight"], saved["lm_head.weight"])

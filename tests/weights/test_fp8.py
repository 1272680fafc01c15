"""FP8 checkpoints: the released list of names, block scales multiplied, wrong scale names refused."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from sample_checkpoints import (
    NANO,
    empty_state,
    quantise,
    quantised,
    quantization_config,
    random_state,
    stored_tensors,
    write_checkpoint,
)

from yunque.core.errors import CheckpointError
from yunque.model.names import tensor_specs
from yunque.model.presets import preset
from yunque.weights import load_model, load_tensors, open_checkpoint
from yunque.weights.fp8 import E4M3, Fp8Format, dequantise, fp8_tensor_specs

# 576 = 512 + 64 rows in kv_a_proj_with_mqa: four and a half blocks.
RAGGED = replace(NANO, hidden_size=200, kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=64)


def test_released_models_have_the_published_tensor_and_parameter_counts():
    glm5, glm52 = preset("glm-5"), preset("glm-5.2")
    assert len(tensor_specs(glm5)) == 59_870
    assert len(tensor_specs(glm52)) == 59_585
    assert len(fp8_tensor_specs(glm52)) == 118_629
    parameters = {name: math.prod(spec.shape) for name, spec in tensor_specs(glm5).items()}
    mtp = sum(count for name, count in parameters.items() if name.startswith("model.layers.78."))
    assert round(sum(parameters.values()) / 1e9, 1) == 753.9
    assert round((sum(parameters.values()) - mtp) / 1e9, 1) == 743.9


def test_fp8_list_quantises_projections_and_experts_only():
    specs = fp8_tensor_specs(preset("glm-5.2"))
    layer = "model.layers.78."
    plain = sorted(
        name.removeprefix(layer)
        for name, spec in specs.items()
        if name.startswith(layer) and spec.dtype != E4M3 and not name.endswith("_scale_inv")
    )
    assert plain == [
        "eh_proj.weight",
        "enorm.weight",
        "hnorm.weight",
        "input_layernorm.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.gate.weight",
        "post_attention_layernorm.weight",
        "self_attn.indexer.k_norm.bias",
        "self_attn.indexer.k_norm.weight",
        "self_attn.indexer.weights_proj.weight",
        "self_attn.kv_a_layernorm.weight",
        "self_attn.q_a_layernorm.weight",
        "shared_head.norm.weight",
    ]
    scale = specs["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"]
    assert (scale.shape, scale.dtype) == ((5, 48), torch.float32)


@pytest.mark.parametrize("shape", [(576, 256), (128, 128), (1, 1), (130, 129), (24, 300)])
def test_dequantised_value_is_stored_value_times_its_blocks_scale(shape):
    fmt = Fp8Format()
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator).to(E4M3)
    scale = torch.rand(fmt.scale_shape(shape), generator=generator)
    rows, columns = torch.arange(shape[0]), torch.arange(shape[1])
    by_hand = values.float() * scale[rows[:, None] // 128, columns[None, :] // 128]
    assert torch.equal(dequantise(values, scale, fmt), by_hand)


@pytest.mark.parametrize("block", [(128, 128), (64, 32)])
def test_fp8_load_multiplies_scales_also_in_a_ragged_matrix(tmp_path, block):
    """NVIDIA-NeMo/Megatron-Bridge#5851: scales were not multiplied; 576 rows are no whole blocks."""
    fmt = Fp8Format(block=block)
    tensors = stored_tensors(random_state(RAGGED))
    folder = write_checkpoint(
        tmp_path / "m", RAGGED, quantised(tensors, fmt), quantization_config=quantization_config(fmt)
    )
    state = empty_state(RAGGED)
    load_tensors(open_checkpoint(folder), state)
    for name, loaded in stored_tensors(state).items():
        if fmt.quantises(name):
            values, scale = quantise(tensors[name], fmt)
            assert torch.equal(loaded, dequantise(values, scale, fmt)), name
            # e4m3 keeps four significant bits (half a step is 1/16) and its smallest step is 2^-9.
            tolerance = tensors[name].abs() / 16 + scale.max() * 2**-9
            assert torch.all((loaded - tensors[name]).abs() <= tolerance), name
        else:
            assert torch.equal(loaded, tensors[name]), name


def test_fp8_model_loads_as_bfloat16_with_router_in_float32(tmp_path):
    tensors = quantised(stored_tensors(random_state(NANO, dtype=torch.bfloat16)), Fp8Format())
    folder = write_checkpoint(tmp_path / "m", NANO, tensors, quantization_config=quantization_config(Fp8Format()))
    dtypes = Counter(tensor.dtype for tensor in load_model(folder).state_dict().values())
    sparse_layers = NANO.num_layers_with_mtp - NANO.first_k_dense_replace
    assert dtypes[torch.float32] == 2 * sparse_layers
    assert set(dtypes) == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(
    "entry",
    [
        "indexers_proj",
        "self_attn.indexers_proj",
        "model.layers.1.self_attn.indexers_proj",
        "indexer.weights_proj",
    ],
)
def test_odd_exclusion_name_keeps_the_indexers_head_weights(tmp_path, entry):
    """ROCm/ATOM#451, sgl-project/sglang-jax#1111: indexers_proj means weights_proj, which stays as it is."""
    head_weights = "model.layers.1.self_attn.indexer.weights_proj.weight"
    fmt = Fp8Format(excluded=(entry,))
    assert not fmt.quantises(head_weights)
    tensors = stored_tensors(random_state(NANO, dtype=torch.bfloat16))
    folder = write_checkpoint(
        tmp_path / "m", NANO, quantised(tensors, fmt), quantization_config=quantization_config(fmt)
    )
    checkpoint = open_checkpoint(folder)
    assert Fp8Format.from_hf(checkpoint.raw_config) == fmt
    assert checkpoint.entries[head_weights].dtype == torch.bfloat16
    assert torch.equal(load_model(folder).state_dict()[head_weights], tensors[head_weights])


def test_exclusion_names_a_module_and_what_is_under_it():
    fmt = Fp8Format(excluded=("model.layers.1.mlp.experts.3", "shared_experts", "self_attn.indexer.wk", "mlp.gate"))
    assert not fmt.quantises("model.layers.1.mlp.experts.3.up_proj.weight")
    assert not fmt.quantises("model.layers.2.mlp.shared_experts.up_proj.weight")
    assert not fmt.quantises("model.layers.0.self_attn.indexer.wk.weight")
    assert fmt.quantises("model.layers.1.mlp.experts.30.up_proj.weight")
    assert fmt.quantises("model.layers.0.mlp.gate_proj.weight")
    assert fmt.quantises("model.layers.0.self_attn.indexer.wq_b.weight")


#: The list names it in vain; the role says that it is never FP8; the list leaves it out.
DISPUTED = [
    ("model.layers.1.self_attn.o_proj.weight", ("self_attn.o_proj",)),
    ("model.layers.1.self_attn.indexer.weights_proj.weight", ("self_attn.indexers_proj",)),
    ("model.layers.1.mlp.experts.3.up_proj.weight", ()),
]


@pytest.mark.parametrize("is_fp8", [True, False], ids=["stored in FP8", "stored in bfloat16"])
@pytest.mark.parametrize(("name", "excluded"), DISPUTED)
def test_what_is_stored_decides_where_file_and_exclusion_list_disagree(tmp_path, caplog, name, excluded, is_fp8):
    """ROCm/ATOM#451, sgl-project/sglang-jax#1111: a reader that believed the list took one format for the other."""
    fmt = Fp8Format(excluded=excluded)
    tensors = stored_tensors(random_state(NANO, dtype=torch.bfloat16))
    stored = quantised(tensors, fmt)
    stored[name], scale = quantise(tensors[name], fmt) if is_fp8 else (tensors[name], None)
    stored.pop(name + "_scale_inv", None)
    if scale is not None:
        stored[name + "_scale_inv"] = scale
    folder = write_checkpoint(tmp_path / "m", NANO, stored, quantization_config=quantization_config(fmt))
    state = empty_state(NANO)
    with caplog.at_level(logging.WARNING):
        report = load_tensors(open_checkpoint(folder), state)
    loaded, wanted = stored_tensors(state)[name], tensors[name].float()
    assert torch.equal(loaded, wanted if scale is None else dequantise(stored[name], scale, fmt))
    assert torch.equal(loaded, wanted) == (not is_fp8)
    is_told = is_fp8 and not fmt.quantises(name)
    note = f"stored in FP8, from which their role or modules_to_not_convert keeps them: 1 ({name})"
    assert report.notes == ((note,) if is_told else ())
    assert (note in caplog.text) == is_told


@pytest.mark.parametrize(("name", "excluded"), DISPUTED)
def test_weight_and_scale_that_disagree_are_refused_whatever_the_list_says(tmp_path, name, excluded):
    """ROCm/ATOM#451: FP8 bits without their scale, or a scale beside bfloat16, are no weights to be guessed at."""
    fmt = Fp8Format(excluded=excluded)
    tensors = stored_tensors(random_state(NANO, dtype=torch.bfloat16))
    values, scale = quantise(tensors[name], fmt)
    name_of_scale = name + "_scale_inv"
    others = {n: t for n, t in quantised(tensors, fmt).items() if n not in (name, name_of_scale)}
    for number, (disputed, message) in enumerate(
        [
            ({name: values}, f"FP8 without a scale: 1 ({name}: expected {name_of_scale!r})"),
            ({name: tensors[name], name_of_scale: scale}, f"unexpected: 1 ({name_of_scale})"),
        ]
    ):
        folder = write_checkpoint(
            tmp_path / str(number), NANO, others | disputed, quantization_config=quantization_config(fmt)
        )
        state = empty_state(NANO)
        with pytest.raises(CheckpointError) as caught:
            load_tensors(open_checkpoint(folder), state)
        assert message in str(caught.value)
        assert all(tensor.isnan().all() for tensor in state.values()), "something was read before the refusal"


@pytest.mark.parametrize("suffix", [".weight_scale", ".scale", ".scale_inv"])
def test_scale_under_another_name_is_refused_with_that_name(tmp_path, suffix):
    """vllm-project/vllm#54556: quantisers call the scale _scale or _scale_inv, and mean different things."""
    name = "model.layers.1.self_attn.indexer.wq_b.weight"
    tensors = quantised(stored_tensors(random_state(NANO)), Fp8Format())
    renamed = name.removesuffix(".weight") + suffix
    tensors[renamed] = tensors.pop(name + "_scale_inv")
    folder = write_checkpoint(tmp_path / "m", NANO, tensors)
    with pytest.raises(CheckpointError) as caught:
        load_tensors(open_checkpoint(folder), empty_state(NANO))
    assert f"{name}: expected {name + '_scale_inv'!r}; the file has {renamed!r}" in str(caught.value)


def test_missing_misshapen_and_left_over_scales_are_refused(tmp_path):
    name = "model.layers.1.self_attn.o_proj.weight"
    good = quantised(stored_tensors(random_state(NANO)), Fp8Format())
    scale = name + "_scale_inv"
    norm, width = "model.norm.weight", NANO.hidden_size
    vector = rf"FP8 that is no matrix: 1 \({norm} is \[{width}\]\)"
    for number, (changes, message) in enumerate(
        [
            ({scale: None}, f"FP8 without a scale: 1 \\({name}: expected '{scale}'\\)"),
            ({scale: torch.ones(2, 1)}, rf"scale shape: 1 \({scale} is \[2, 1\], expected \[1, 1\]\)"),
            ({scale: torch.ones(1, 1).bfloat16()}, rf"scale dtype: 1 \({scale} is BF16, expected F32\)"),
            ({name: torch.ones(NANO.hidden_size, 24)}, rf"unexpected: 1 \({scale}\)"),
            ({norm: torch.ones(width).to(E4M3), norm + "_scale_inv": torch.ones(1)}, vector),
        ]
    ):
        tensors = {n: t for n, t in (good | changes).items() if t is not None}
        folder = write_checkpoint(tmp_path / str(number), NANO, tensors)
        with pytest.raises(CheckpointError, match=message):
            load_tensors(open_checkpoint(folder), empty_state(NANO))


def test_other_quantisation_methods_are_refused():
    with pytest.raises(CheckpointError, match="quant_method is 'gptq'; valid: 'fp8'"):
        Fp8Format.from_hf({"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(CheckpointError, match=r"weight_block_size is \[128\]"):
        Fp8Format.from_hf({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}})
    assert Fp8Format.from_hf({}) is None

"""Whatever kind of folder holds a model, it loads; and each kind converts to the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sample_checkpoints import (
    NANO,
    SHARED,
    quantised,
    quantization_config,
    random_state,
    same_bits,
    stored_tensors,
    write_checkpoint,
)

from yunque.core.errors import CheckpointError, ConfigError
from yunque.model.names import module_specs
from yunque.model.transformer import Transformer
from yunque.weights import (
    SnapshotParts,
    SnapshotStore,
    convert,
    find_checkpoint,
    load_model,
    open_any,
    save_model,
)
from yunque.weights.fp8 import Fp8Format

TEXT = {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}"}


@pytest.mark.parametrize("config", [NANO, SHARED, replace(NANO, num_nextn_predict_layers=0)])
def test_module_has_exactly_the_described_tensors(config):
    """ROCm/ATOM#1260: what the module holds beyond the checkpoint's names would never be loaded."""
    state = Transformer(config).state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {n: s.shape for n, s in module_specs(config).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_model_holds_the_saved_bits_as_parameters(tmp_path, dtype):
    state = random_state(SHARED, dtype=dtype)
    model = load_model(save_model(tmp_path / "m", SHARED, state, shard_bytes=40_000))
    assert same_bits(model.state_dict(), state)
    assert all(p.requires_grad and p.is_leaf and p.device.type == "cpu" for p in model.parameters())
    assert model.config.to_hf() == SHARED.to_hf()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_loads_to_the_gpu_with_the_same_bits(tmp_path, dtype):
    folder = save_model(tmp_path / "m", NANO, random_state(NANO))
    on_gpu = load_model(folder, dtype=dtype, device="cuda").state_dict()
    assert {tensor.device.type for tensor in on_gpu.values()} == {"cuda"}
    here = load_model(folder, dtype=dtype).state_dict()
    assert same_bits({name: tensor.cpu() for name, tensor in on_gpu.items()}, dict(here))
    saved = save_model(tmp_path / "again", NANO, on_gpu)
    assert same_bits(load_model(saved).state_dict(), dict(here))


def test_dtype_and_config_can_be_chosen(tmp_path):
    folder = save_model(tmp_path / "m", NANO, random_state(NANO))
    without = replace(NANO, num_nextn_predict_layers=0)
    model = load_model(folder, dtype=torch.bfloat16, config=without, ignore=["model.layers.3.*"])
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert {t.dtype for n, t in model.state_dict().items() if ".gate." in n} == {torch.float32}
    assert len(model.model.layers) == NANO.num_hidden_layers


def test_snapshot_and_store_load_like_a_checkpoint(tmp_path):
    store = SnapshotStore(tmp_path / "run", keep_last=3)
    states = [random_state(NANO, seed=seed) for seed in range(2)]
    for step, state in enumerate(states):
        store.save(step, SnapshotParts(NANO, state, {"m": torch.ones(3)}, files=TEXT))
    assert same_bits(load_model(tmp_path / "run" / "step-00000000").state_dict(), states[0])
    assert same_bits(load_model(tmp_path / "run").state_dict(), states[1])
    assert find_checkpoint(tmp_path / "run") == tmp_path / "run" / "step-00000001"


def test_damaged_weights_of_a_snapshot_do_not_load_and_lost_training_state_does_not_matter(tmp_path):
    path = SnapshotStore(tmp_path / "run").save(1, SnapshotParts(NANO, random_state(NANO)))
    (path / "optimizer.safetensors").unlink()
    load_model(path)
    weights = bytearray((path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (path / "model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: checksum differs"):
        load_model(path)
    with pytest.raises(CheckpointError, match="none of them is whole"):
        load_model(tmp_path / "run")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_snapshot_converts_to_checkpoint_and_back(tmp_path, dtype):
    state = random_state(SHARED)
    snapshot = SnapshotStore(tmp_path / "run").save(7, SnapshotParts(SHARED, state, files=TEXT))
    folder = convert(snapshot, tmp_path / "hf", dtype=dtype, shard_bytes=50_000)
    wanted = {n: t.to(dtype) if dtype and not module_specs(SHARED)[n].keeps_fp32 else t for n, t in state.items()}
    assert same_bits(load_model(folder).state_dict(), wanted)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert not list(folder.glob("optimizer*"))
    back = convert(folder, tmp_path / "again", kind="snapshot")
    assert back == tmp_path / "again" / "step-00000000"
    assert same_bits(load_model(back).state_dict(), wanted)
    for place in (folder, back):
        assert {name: (place / name).read_bytes() for name in TEXT} == TEXT


def test_fp8_converts_to_what_it_loads_as(tmp_path):
    tensors = quantised(stored_tensors(random_state(NANO, dtype=torch.bfloat16)), Fp8Format())
    source = write_checkpoint(tmp_path / "fp8", NANO, tensors, quantization_config=quantization_config(Fp8Format()))
    target = convert(source, tmp_path / "bf16")
    assert same_bits(load_model(target).state_dict(), load_model(source).state_dict())
    assert "quantization_config" not in open_any(target).raw_config


def test_conversion_is_as_strict_as_loading(tmp_path):
    tensors = stored_tensors(random_state(NANO))
    copy = "model.layers.3.shared_head.head.weight"
    for name, change, message in [
        ("missing", {"lm_head.weight": None}, r"missing: 1 \(lm_head"),
        ("extra", {"x": torch.ones(1)}, r"unexpected: 1 \(x"),
        ("copy", {copy: torch.zeros_like(tensors["lm_head.weight"])}, "differs from 'lm_head.weight'"),
    ]:
        changed = {n: t for n, t in (tensors | change).items() if t is not None}
        source = write_checkpoint(tmp_path / name, NANO, changed)
        with pytest.raises(CheckpointError, match=message):
            convert(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="unknown kind of folder 'gguf'"):
        convert(tmp_path / "extra", tmp_path / "out", kind="gguf", ignore=["x"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(CheckpointError, match="exists; choose another name"):
        convert(tmp_path / "extra", tmp_path / "copy", ignore=["x"])

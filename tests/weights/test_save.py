"""What is saved loads to the same bits, in shards of the size asked for, and appears whole or not at all."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from sample_checkpoints import NANO, SHARED, empty_state, random_state, same_bits, stored_tensors

from yunque.core.errors import CheckpointError
from yunque.model.config import ModelConfig
from yunque.model.names import tensor_specs
from yunque.weights import (
    SnapshotParts,
    SnapshotStore,
    load_snapshot,
    load_tensors,
    open_checkpoint,
    read_config,
    save_model,
)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    layers = draw(st.integers(1, 3))
    kinds = st.sampled_from(["full", "shared"])
    types = ("full", *draw(st.lists(kinds, min_size=layers - 1, max_size=layers - 1)))
    return replace(
        NANO,
        num_hidden_layers=layers,
        first_k_dense_replace=draw(st.integers(0, layers)),
        num_nextn_predict_layers=draw(st.integers(0, 1)),
        indexer_types=types,
        n_routed_experts=draw(st.sampled_from([2, 6])),
        n_group=1,
        num_experts_per_tok=1,
        hidden_size=draw(st.sampled_from([3, 16])),
        moe_intermediate_size=draw(st.sampled_from([1, 5])),
        vocab_size=11,
    )


def _random_bits(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 256, (t.numel() * t.itemsize,), dtype=torch.uint8, generator=generator)
        .view(t.dtype)
        .reshape(t.shape)
        for name, t in state.items()
    }


@settings(max_examples=40)
@given(
    configs(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 20_000),
    st.integers(0, 2**32),
)
def test_round_trip_keeps_every_bit_of_any_model(tmp_path_factory, config, dtype, shard_bytes, seed):
    """Any bits (NaN payloads too), any dtype, router and bias in float32, any number of shards."""
    state = _random_bits(random_state(config, dtype=dtype), seed)
    folder = tmp_path_factory.mktemp("save") / "model"
    save_model(folder, config, state, shard_bytes=shard_bytes)
    loaded = empty_state(config, dtype=dtype)
    load_tensors(open_checkpoint(folder), loaded, exact=True)
    assert same_bits(loaded, state)
    assert read_config(folder).to_hf() == config.to_hf()


def test_shards_hold_at_most_the_bytes_asked_for_and_the_index_finds_all(tmp_path):
    state = random_state(NANO, dtype=torch.bfloat16)
    stored = stored_tensors(state)
    limit = 30_000
    folder = save_model(tmp_path / "m", NANO, state, shard_bytes=limit)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    total = sum(t.numel() * t.itemsize for t in stored.values())
    assert index["metadata"]["total_size"] == total
    assert len(files) >= math.ceil(total / limit)
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    found = {}
    for file in files:
        with safe_open(folder / file, "pt") as shard:
            tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
            assert shard.metadata() == {"format": "pt"}
        assert sum(t.numel() * t.itemsize for t in tensors.values()) <= limit
        assert all(index["weight_map"][name] == file for name in tensors)
        found |= tensors
    assert found.keys() == tensor_specs(NANO).keys()
    assert same_bits(found, stored)


def test_one_shard_has_no_index_and_files_are_added(tmp_path):
    config = replace(NANO, eos_token_id=(5, 7), pad_token_id=5)
    folder = save_model(
        tmp_path / "m",
        config,
        random_state(config),
        files={"tokenizer.json": b"{}", "chat_template.jinja": b"x"},
    )
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "eos_token_id": [5, 7],
        "pad_token_id": 5,
    }
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


def test_dtype_converts_all_but_the_router(tmp_path):
    state = random_state(SHARED)
    folder = save_model(tmp_path / "m", SHARED, state, dtype=torch.bfloat16)
    dtypes = {name: entry.dtype for name, entry in open_checkpoint(folder).entries.items()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        name for name, spec in tensor_specs(SHARED).items() if spec.keeps_fp32
    }
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = empty_state(SHARED, dtype=torch.bfloat16)
    load_tensors(open_checkpoint(folder), loaded, exact=True)
    assert same_bits(loaded, {n: t.to(loaded[n].dtype) for n, t in state.items()})


def test_state_that_is_not_the_configs_is_refused_and_nothing_appears(tmp_path):
    state = random_state(NANO)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    wrong = {
        "missing: 1 (model.norm.weight)": {"model.norm.weight": None},
        "unexpected: 1 (x)": {"x": torch.ones(1)},
        "of another shape: 1 (model.norm.weight)": {"model.norm.weight": torch.ones(1)},
        f"below float32: 1 ({bias})": {bias: state[bias].bfloat16()},
    }
    for message, change in wrong.items():
        changed = {name: tensor for name, tensor in (state | change).items() if tensor is not None}
        with pytest.raises(CheckpointError) as caught:
            save_model(tmp_path / "m", NANO, changed)
        assert message in str(caught.value)
        assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_kept_unless_overwritten(tmp_path):
    first, second = random_state(NANO, seed=1), random_state(NANO, seed=2)
    folder = save_model(tmp_path / "m", NANO, first, shard_bytes=30_000)
    with pytest.raises(CheckpointError, match="exists; choose another name or overwrite"):
        save_model(folder, NANO, second)
    save_model(folder, NANO, second, overwrite=True)
    loaded = empty_state(NANO)
    load_tensors(open_checkpoint(folder), loaded)
    assert same_bits(loaded, second)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_overwrite_never_replaces_what_is_no_checkpoint(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    for target in (home, home / "letter.txt"):
        with pytest.raises(CheckpointError, match="is no checkpoint"):
            save_model(target, NANO, random_state(NANO), overwrite=True)
    assert (home / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_s_snapshot_is_never_the_place_of_a_saved_model(tmp_path, overwrite):
    """It has a config.json like any checkpoint, and the optimiser's state that a run goes on from beside it."""
    state = random_state(NANO, seed=1)
    snapshot = SnapshotStore(tmp_path / "run").save(4, SnapshotParts(NANO, state, {"m": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"step-00000004 is a run's snapshot \(it has a manifest\.json\)"):
        save_model(snapshot, NANO, random_state(NANO, seed=2), overwrite=overwrite)
    kept = load_snapshot(snapshot, model=(loaded := empty_state(NANO)))
    assert same_bits(loaded, state)
    assert torch.equal(kept.optimizer["m"], torch.ones(3))


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "", ".hidden", "config.json"])
def test_added_file_stays_in_the_folder(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"no plain file name|written twice"):
        save_model(tmp_path / "m", NANO, random_state(NANO), files={name: b""})
    assert list(tmp_path.iterdir()) == []


def test_parameters_are_saved_without_their_gradient_graph(tmp_path):
    state = {name: torch.nn.Parameter(tensor) for name, tensor in random_state(NANO).items()}
    folder = save_model(Path(tmp_path / "m"), NANO, state)
    assert open_checkpoint(folder).num_bytes == sum(t.numel() * t.itemsize for t in state.values())

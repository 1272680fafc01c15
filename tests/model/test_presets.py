"""The released architectures, counted by name and built without storage."""

from math import prod

import pytest
import torch

from yunque.core.errors import ConfigError
from yunque.model.names import module_specs, tensor_specs
from yunque.model.presets import PRESETS, preset
from yunque.model.transformer import Transformer


@pytest.mark.parametrize(
    ("name", "num_tensors", "billions", "with_mtp"),
    [("glm-5", 59_870, 743.9, 753.9), ("glm-5.1", 59_870, 743.9, 753.9), ("glm-5.2", 59_585, 743.4, 753.3)],
)
def test_released_checkpoints_have_the_published_counts(name, num_tensors, billions, with_mtp):
    config = preset(name)
    specs = tensor_specs(config)
    sizes = {tensor: prod(spec.shape) for tensor, spec in specs.items()}
    mtp = {tensor for tensor in specs if tensor.startswith("model.layers.78.")}
    assert len(specs) == num_tensors
    assert len(mtp) == 791
    assert "model.layers.78.shared_head.head.weight" not in specs
    assert round(sum(sizes.values()) / 1e9, 1) == with_mtp
    assert round(sum(size for tensor, size in sizes.items() if tensor not in mtp) / 1e9, 1) == billions


def test_fp8_release_of_5_2_has_118629_tensors():
    config = preset("glm-5.2")
    kept = ("embed_tokens", "lm_head", "norm.", "mlp.gate.", "eh_proj", "weights_proj", "enorm", "hnorm")
    quantised = [name for name in tensor_specs(config) if not any(part in name for part in kept)]
    assert len(tensor_specs(config)) + len(quantised) == 118_629


def test_5_2_has_21_indexers_in_the_main_model():
    config = preset("glm-5.2")
    assert [i for i in range(78) if config.has_indexer(i)] == [0, 1, *range(2, 78, 4)]
    names = {name.split(".")[2] for name in tensor_specs(config) if ".indexer." in name}
    assert len(names) == 22


@pytest.mark.parametrize("name", ["nano", "tiny", "mini", "glm-5", "glm-5.2"])
def test_module_on_the_meta_device_has_exactly_the_named_tensors(name):
    config = preset(name)
    with torch.device("meta"):
        model = Transformer(config)
    state = model.state_dict()
    specs = module_specs(config)
    assert {key: tuple(tensor.shape) for key, tensor in state.items()} == {k: s.shape for k, s in specs.items()}
    assert all(tensor.is_meta for tensor in state.values())
    for key, tensor in model.bfloat16().state_dict().items():
        assert tensor.dtype == (torch.float32 if specs[key].keeps_fp32 else torch.bfloat16), key


def test_small_presets_have_the_size_they_promise():
    small = ("nano", "tiny", "mini")
    counts = {name: sum(prod(s.shape) for s in tensor_specs(preset(name)).values()) for name in small}
    assert 1e5 < counts["nano"] < 1.2e5
    assert 1e6 < counts["tiny"] < 5e6
    assert round(counts["mini"] / 1e6, 1) == 7.0


def test_unknown_preset_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="glm-5"):
        preset("glm5")
    assert all(PRESETS[name]() == preset(name) for name in PRESETS)

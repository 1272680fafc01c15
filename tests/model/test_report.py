"""What a config costs, against published counts and counts by hand."""

from math import prod

import pytest
from builders import draw_config

from yunque.model.names import tensor_specs
from yunque.model.presets import preset
from yunque.model.report import model_report


def test_released_models_have_the_published_counts():
    report = model_report(preset("glm-5"))
    assert report.num_tensors == 59_870
    assert round(report.main.total / 1e9, 1) == 743.9
    assert round(report.with_mtp.total / 1e9, 1) == 753.9
    assert round(report.parts["MTP layer"].total / 1e9, 2) == 9.95
    assert round(report.main.active / 1e9, 1) == 41.8
    matrices = report.main.active - report.parts["embedding"].total - report.parts["head"].total
    assert round(matrices / 1e9, 1) == 39.9
    assert model_report(preset("glm-5.2")).num_tensors == 59_585


def test_cache_of_the_released_models():
    """A layer keeps 576 latent and 128 index values; GLM-5.2 keeps index keys on 21 of 78 layers."""
    five, shared = model_report(preset("glm-5")), model_report(preset("glm-5.2"))
    assert five.cache_bytes_per_token("bfloat16") == 78 * 1408
    assert shared.cache_bytes_per_token("bfloat16") == 78 * 576 * 2 + 21 * 128 * 2
    assert [report.cache_bytes_per_token("bfloat16") // 1024 for report in (five, shared)] == [107, 93]


@pytest.mark.parametrize("seed", range(8))
def test_parts_add_up_on_drawn_architectures(seed):
    config = draw_config(seed)
    report = model_report(config)
    sizes = {name: prod(spec.shape) for name, spec in tensor_specs(config).items()}
    assert sum(part.total for part in report.parts.values()) == report.with_mtp.total == sum(sizes.values())
    mtp = sum(size for name, size in sizes.items() if name.startswith(f"model.layers.{config.num_hidden_layers}."))
    assert report.with_mtp.total - report.main.total == mtp
    experts = config.num_hidden_layers - config.first_k_dense_replace
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    assert report.parts["routed experts"].total == experts * config.n_routed_experts * expert
    assert report.parts["routed experts"].active == experts * config.num_experts_per_tok * expert
    for name, part in report.parts.items():
        if name not in ("routed experts", "MTP layer"):
            assert part.active == part.total


def test_bytes_keep_the_router_in_fp32():
    config = draw_config(1)
    report, specs = model_report(config), tensor_specs(config)
    kept = sum(prod(spec.shape) for spec in specs.values() if spec.keeps_fp32)
    assert kept > 0
    assert report.weight_bytes["float32"] == 4 * report.with_mtp.total
    assert report.weight_bytes["bfloat16"] == 2 * report.with_mtp.total + 2 * kept


def test_work_per_token_grows_with_the_context_by_the_scores_alone():
    config = preset("glm-5")
    at = {context: model_report(config, context=context).flops_per_token for context in (2048, 4096, 8192)}
    scores = 2 * 78 * 32 * 129
    assert at[4096] - at[2048] == scores * 2048
    assert at[8192] - at[4096] == scores * 4096
    assert at[2048] > 2 * 39.9e9

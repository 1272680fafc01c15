"""The engine's benchmark runs and prints every figure; whether a figure is good is not tested here."""

from __future__ import annotations

import pytest
from quick_runs import quick_figures

pytestmark = pytest.mark.xdist_group("transformers")


def test_quick_run_compares_with_both_engines_memory_and_the_engine_without_its_means(tmp_path):
    cases = ("b1_4k", "b16_1k", "b1_short")
    # llama.cpp's times are differences of two runs: over a few tokens they may come out as nothing.
    llamacpp = {f"llamacpp_{case}{model}" for case in ("b1", "b16", "b1_1k") for model in ("", "_tiny")}
    figures = quick_figures("engine", tmp_path, zeros=llamacpp)
    assert set(figures) == {
        *(f"transformers_{case}{model}" for case in cases for model in ("", "_100m")),
        *llamacpp,
        *(f"floor_{case}{model}" for case in ("b1", "b1_4k") for model in ("", "_tiny")),
        "mtp_acceptance_length",
        "mtp_speedup",
        "ttft_turn10_over_turn1",
        "router_cached_share_of_ideal",
        "round_robin_cached_share_of_ideal",
    }
    assert figures["mtp_acceptance_length"] >= 1
    assert figures["router_cached_share_of_ideal"] >= 0.95
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".gguf", ".safetensors")]

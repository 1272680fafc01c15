"""The interchange benchmark runs and prints every figure, and the engines agree on a model of six steps."""

from __future__ import annotations

import pytest
from quick_runs import quick_figures

pytestmark = pytest.mark.xdist_group("transformers")


def test_quick_run_prints_every_figure_and_nearly_all_text_is_equal(tmp_path):
    figures = quick_figures("interchange", tmp_path)
    assert set(figures) == {
        "llamacpp_max_logprob_gap",
        "llamacpp_greedy_match",
        "transformers_greedy_match",
        "transformers_max_logprob_gap",
        "llamacpp_f16_logprob_gap",
        "llamacpp_bf16_logprob_gap",
        "llamacpp_q8_0_logprob_gap",
    }
    assert min(figures["llamacpp_greedy_match"], figures["transformers_greedy_match"]) > 0.9
    assert figures["llamacpp_max_logprob_gap"] < figures["llamacpp_f16_logprob_gap"]
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".gguf", ".safetensors")]

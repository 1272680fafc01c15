"""The benchmark of ``batch_invariant`` runs and prints every figure."""

from __future__ import annotations

from quick_runs import quick_figures


def test_quick_run_prints_what_the_setting_costs_in_training_prefill_and_decode(tmp_path):
    assert set(quick_figures("invariance", tmp_path)) == {"train_cost", "prefill_cost", "decode_cost"}

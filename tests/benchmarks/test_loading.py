"""The loading benchmark runs, and a checkpoint takes little more memory than its own size while it loads."""

from __future__ import annotations

from quick_runs import quick_figures


def test_quick_run_prints_both_figures_and_loads_without_a_second_copy(tmp_path):
    figures = quick_figures("loading", tmp_path)
    assert set(figures) == {"load_time_ratio", "load_memory_ratio"}
    assert 0.5 < figures["load_memory_ratio"] <= 1.2
    assert [path.name for path in tmp_path.iterdir()] == ["line.json"]

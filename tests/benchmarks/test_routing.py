"""The routing benchmark runs, and sessions find nearly all of the cache that they could find."""

from __future__ import annotations

from quick_runs import quick_figures


def test_quick_run_shows_the_router_near_the_ideal_and_round_robin_far_from_it(tmp_path):
    figures = quick_figures("routing", tmp_path)
    assert set(figures) == {"router_cached_share_of_ideal", "round_robin_cached_share_of_ideal"}
    assert figures["router_cached_share_of_ideal"] >= 0.95
    assert figures["round_robin_cached_share_of_ideal"] < 0.85

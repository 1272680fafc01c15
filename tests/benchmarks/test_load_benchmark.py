"""The load benchmark runs, every hostile request gets an answer that it may get, and nothing is left behind."""

from __future__ import annotations

import time

from quick_runs import quick_figures

ZEROS = frozenset({"errors_5xx", "leaked_pages", "wrong_answers", "unexpected_answers", "drain_unfinished"})


def test_quick_run_leaks_nothing_fails_nothing_and_answers_nobody_wrongly(tmp_path):
    begin_s = time.monotonic()
    figures = quick_figures("load", tmp_path, zeros=ZEROS)
    assert time.monotonic() - begin_s < 120, "about 25 s on an idle machine"
    assert set(figures) == ZEROS | {
        "clients",
        "seconds",
        "rss_growth_ratio",
        "compared_answers",
        "health_p99_s",
        "drain_seconds",
        "shed_429_share_16x",
        "p95_ttft_16x_over_1x",
    }
    assert {name: figures[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert figures["drain_seconds"] < 1 + 2 + 5, "the stated time, the margin for closing, the end of the process"
    assert figures["shed_429_share_16x"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["line.json"]

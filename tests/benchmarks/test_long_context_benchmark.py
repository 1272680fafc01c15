"""The long-context command runs, and memory grows by no more than it states before it starts."""

from __future__ import annotations

from quick_runs import quick_figures


def test_quick_run_reads_and_writes_all_its_tokens_within_the_stated_memory(tmp_path):
    figures = quick_figures("long_context", tmp_path)
    assert set(figures) == {
        "context_tokens",
        "output_tokens",
        "planned_bytes",
        "grown_over_planned",
        "prefill_s",
        "decode_s",
    }
    assert (figures["context_tokens"], figures["output_tokens"]) == (2048, 1024)
    assert figures["grown_over_planned"] <= 1

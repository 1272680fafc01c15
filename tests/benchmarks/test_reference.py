"""The comparison with transformers runs and prints every figure; whether a figure is good is not tested here."""

from __future__ import annotations

import pytest
from quick_runs import quick_figures

pytestmark = pytest.mark.xdist_group("transformers")


def test_quick_run_prints_the_speed_of_five_cases_and_the_memory_of_one(tmp_path):
    assert set(quick_figures("reference", tmp_path)) == {
        "decode_b1_4096",
        "train_512",
        "train_4096",
        "prefill_4096",
        "prefill_8192",
        "prefill_16384_memory",
    }

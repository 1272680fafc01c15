"""transformers reads what we write and we read what it writes, every tensor and every bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from sample_checkpoints import SHARED, random_state, same_bits

from yunque.weights import load_model, save_model

pytestmark = pytest.mark.xdist_group("transformers")

WITHOUT_MTP = replace(SHARED, num_nextn_predict_layers=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_goes_through_transformers_and_back_unchanged(tmp_path, dtype):
    from transformers import AutoModelForCausalLM

    state = random_state(WITHOUT_MTP, dtype=dtype)
    ours = save_model(tmp_path / "ours", WITHOUT_MTP, state, shard_bytes=60_000)
    loaded: Any = AutoModelForCausalLM.from_pretrained(ours, dtype="auto", output_loading_info=True)
    theirs, report = loaded
    assert not any(report.values()), report
    assert theirs.dtype == dtype
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    back = load_model(tmp_path / "theirs")
    assert same_bits(back.state_dict(), state)
    assert back.config.to_hf() == WITHOUT_MTP.to_hf()

"""The code that docs/weights.md shows runs, in its order."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from sample_checkpoints import NANO, random_state

from yunque.model.transformer import Transformer
from yunque.weights import save_model

PAGE = Path(__file__).parents[2] / "docs" / "weights.md"


def test_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model("path/to/folder", NANO, random_state(NANO), files={"tokenizer.json": b"{}"})
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert len(blocks) == 3
    names = {"optimizer": torch.optim.AdamW(Transformer(NANO).parameters()), "run_toml": ""}
    for block in blocks:
        exec(block, names)
    assert names["model"].lm_head.weight.dtype == torch.bfloat16
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"
    assert names["state"].progress == {"tokens": 4096}

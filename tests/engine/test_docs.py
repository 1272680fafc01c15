"""The code that docs/engine.md shows runs, in its order."""

from __future__ import annotations

import re
from pathlib import Path

from builders import build

from yunque.model.presets import preset
from yunque.text import train_bpe
from yunque.weights import save_model

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def test_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = build(preset("nano"), 0)
    train_bpe(["import os\n"], model.config.vocab_size + 64).save(tmp_path / "tokenizer")
    text = (tmp_path / "tokenizer" / "tokenizer.json").read_bytes()
    save_model("runs/quickstart/model", model.config, model.state_dict(), files={"tokenizer.json": text})
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert len(names["reply"].logprobs) == 16  # pyright: ignore[reportAttributeAccessIssue]
    assert capsys.readouterr().out.endswith("(0,) length\n")

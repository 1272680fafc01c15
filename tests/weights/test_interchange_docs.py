"""The code that docs/interchange.md shows runs, in its order, on one small model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from yunque.model import Transformer, init_weights, preset
from yunque.text import chat_template, train_bpe
from yunque.weights import save_model

pytestmark = pytest.mark.xdist_group("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "interchange.md"


def test_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = train_bpe(["import os\nimport sys\n"] * 8, 300)
    tokenizer.save("text")
    files = {path.name: path.read_bytes() for path in Path("text").iterdir()}
    files["chat_template.jinja"] = chat_template("glm-5").encode()
    config = replace(preset("nano"), vocab_size=304, eos_token_id=tokenizer.special.eos_ids)
    model = init_weights(Transformer(config), torch.Generator().manual_seed(0))
    save_model("model", config, model.state_dict(), files=files)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert len(blocks) == 3
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["tokens"].shape[1] > names["prompt"]["input_ids"].shape[1]
    assert names["answer"]["usage"]["completion_tokens"] > 0

"""A small checkpoint with a tokenizer, as every command reads it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from yunque.model import Transformer, init_weights, preset
from yunque.text import chat_template, train_bpe
from yunque.weights import save_model

CORPUS = ["import os\ndef main(argv=None):\n    return 0\n", "What is 3 plus 4? The answer is 7.\n"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano model in fp32, with a tokenizer of 320 tokens and the GLM-5.1 chat template."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_bpe(CORPUS * 4, 320)
    tokenizer.save(folder / "text")
    files = {path.name: path.read_bytes() for path in (folder / "text").iterdir()}
    files["chat_template.jinja"] = chat_template("glm-5.1").encode()
    config = replace(preset("nano"), vocab_size=320, eos_token_id=tokenizer.special.eos_ids)
    model = init_weights(Transformer(config), torch.Generator().manual_seed(0))
    return save_model(folder / "model", config, model.state_dict(), files=files)

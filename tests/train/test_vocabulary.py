"""The text side of a run: trained once, refused when made of something else, fitted to the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from training_runs import nano_run

from yunque.core.errors import ConfigError
from yunque.train.settings import run_from_mapping
from yunque.train.vocabulary import prepare_text


def test_a_tokenizer_is_trained_once_and_loaded_after(tmp_path: Path) -> None:
    run = run_from_mapping(nano_run())
    first = prepare_text(run.tokenizer, run.data, tmp_path)
    written = (tmp_path / "tokenizer.json").stat().st_mtime_ns
    again = prepare_text(run.tokenizer, run.data, tmp_path)
    assert (tmp_path / "tokenizer.json").stat().st_mtime_ns >= written
    assert first.tokenizer.vocab_size == again.tokenizer.vocab_size == 512
    text = "def write_atomic(path, content):"
    assert first.tokenizer.encode(text) == again.tokenizer.encode(text)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} == set(first.files)


def test_a_folder_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    run = run_from_mapping(nano_run())
    prepare_text(run.tokenizer, run.data, tmp_path)
    with pytest.raises(ConfigError, match="trained with other settings or data"):
        prepare_text(replace(run.tokenizer, vocab_size=600), run.data, tmp_path)


def test_a_saved_tokenizer_is_used_by_path(tmp_path: Path) -> None:
    run = run_from_mapping(nano_run())
    trained = prepare_text(run.tokenizer, run.data, tmp_path / "a")
    settings = replace(run.tokenizer, path=str(tmp_path / "a"), vocab_size=0)
    loaded = prepare_text(settings, run.data, tmp_path / "b")
    assert loaded.tokenizer.encode("import os") == trained.tokenizer.encode("import os")


def test_the_model_gets_the_ids_it_does_not_name_and_must_have_room(tmp_path: Path) -> None:
    run = run_from_mapping(nano_run())
    text = prepare_text(run.tokenizer, run.data, tmp_path)
    fitted = text.fitted(run.model)
    assert fitted.eos_token_id == text.tokenizer.special.eos_ids
    assert fitted.pad_token_id == text.tokenizer.special.pad_id
    own = replace(run.model, eos_token_id=(3,), pad_token_id=0)
    assert text.fitted(own) == own
    with pytest.raises(ConfigError, match=r"tokenizer has 512 tokens, model.vocab_size is only 500"):
        text.fitted(replace(run.model, vocab_size=500))

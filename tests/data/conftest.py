"""A small tokenizer, and folders to read from."""

from collections.abc import Callable
from pathlib import Path

import pytest

from yunque.data.folders import FoundFile
from yunque.text.tokenizer import Tokenizer, train_bpe


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """About 400 tokens: bytes, GLM tokens, and a few merges."""
    return train_bpe(["What is the weather in Rome in 3 days? The sum is 12. I need get_weather."] * 20, 400)


@pytest.fixture
def make_file(tmp_path: Path) -> Callable[[str, bytes], FoundFile]:
    """Write a file below the test's own folder."""

    def make(name: str, content: bytes) -> FoundFile:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return FoundFile(path, name)

    return make

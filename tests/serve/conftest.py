import pytest

from yunque.text import Renderer, Tokenizer, train_bpe

CORPUS = [
    "The assistant thinks, then answers. def f(x): return x + 1\n",
    "get_weather(city='Paris', days=2) -> 21 degrees, sunny; naïve café 東京 😀\n",
    '{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}\n',
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A small byte-level vocabulary with the GLM tokens at its end."""
    return train_bpe(CORPUS * 4, 400)


@pytest.fixture(scope="session")
def renderer(tokenizer: Tokenizer) -> Renderer:
    """GLM-5's chat format over the small vocabulary."""
    return Renderer(tokenizer, "glm-5")

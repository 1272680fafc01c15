"""The text side of a run: a tokenizer, loaded or trained on the run's own text, and the chat format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from yunque.core.config import to_mapping
from yunque.core.errors import ConfigError
from yunque.core.files import read_json, write_json
from yunque.core.logging import get_logger
from yunque.data.builtin import BuiltinSource, read_builtin
from yunque.data.documents import Document, split_of
from yunque.data.folders import find_files
from yunque.data.readers import CodeSource, JsonlSource, ParquetSource, TextSource, read_documents
from yunque.data.report import ReadLog
from yunque.data.sources import AnySource
from yunque.model.config import ModelConfig
from yunque.text.chat_template import CHAT_TEMPLATE_FILE, chat_template
from yunque.text.render import Renderer
from yunque.text.tokenizer import TOKENIZER_FILE, Tokenizer, train_bpe
from yunque.train.settings import DataSettings, TokenizerSettings
from yunque.weights.checkpoint import text_files

_MADE_FROM = "made_from.json"
_log = get_logger(__name__)


@dataclass(frozen=True)
class TextSide:
    """A tokenizer, the renderer of conversations, and the files of both that belong into a checkpoint."""

    tokenizer: Tokenizer
    renderer: Renderer
    files: dict[str, bytes]

    def fitted(self, model: ModelConfig) -> ModelConfig:
        """``model`` with the tokenizer's end and padding ids where it names none.

        Raises ``ConfigError`` for a model whose vocabulary is smaller.
        """
        if model.vocab_size < self.tokenizer.vocab_size:
            raise ConfigError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens, model.vocab_size is only {model.vocab_size}"
            )
        special = self.tokenizer.special
        return replace(
            model,
            eos_token_id=model.eos_token_id or special.eos_ids,
            pad_token_id=special.pad_id if model.pad_token_id is None else model.pad_token_id,
        )


def prepare_text(settings: TokenizerSettings, data: DataSettings, folder: Path) -> TextSide:
    """Load the tokenizer that ``settings`` names, or train it into ``folder`` once.

    Raises ``ConfigError`` when ``folder`` holds a tokenizer that was trained with other settings.
    """
    tokenizer = Tokenizer.load(settings.path) if settings.path else _trained(settings, data, folder)
    tokenizer.save(folder)
    files = text_files(folder)
    files[CHAT_TEMPLATE_FILE] = chat_template(settings.chat_format).encode()
    return TextSide(tokenizer, Renderer(tokenizer, settings.chat_format), files)


def _trained(settings: TokenizerSettings, data: DataSettings, folder: Path) -> Tokenizer:
    made_from = {
        "tokenizer": {key: value for key, value in to_mapping(settings).items() if key != "chat_format"},
        "sources": {name: to_mapping(data.sources[name]) for name in settings.sources},
        "held_out_share": data.held_out_share,
    }
    if (folder / TOKENIZER_FILE).exists() and (folder / _MADE_FROM).exists():
        if read_json(folder / _MADE_FROM) != made_from:
            raise ConfigError(
                f"{folder} holds a tokenizer that was trained with other settings or data; choose another "
                f"output, or delete the run's folder {folder.parent}"
            )
        return Tokenizer.load(folder)
    _log.info("training a tokenizer of %d tokens on %s", settings.vocab_size, ", ".join(settings.sources))
    share = settings.max_bytes // len(settings.sources)
    texts = (
        text
        for name in settings.sources
        for text in _limited(_documents(data.sources[name], data.held_out_share), share)
    )
    tokenizer = train_bpe(texts, settings.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    write_json(folder / _MADE_FROM, made_from)
    return tokenizer


def _documents(source: AnySource, held_out_share: float) -> Iterator[Document]:
    """The documents of a text source that are not held out."""
    log = ReadLog(source.on_bad)
    match source:
        case BuiltinSource():
            documents = read_builtin(source, log)
        case JsonlSource() | ParquetSource() | TextSource() | CodeSource():
            documents = read_documents(source, find_files(source.path, source.extensions, log), log)
        case _:
            raise ConfigError("a tokenizer is trained on text; conversations are no source for it")
    share = held_out_share if source.split == "auto" else float(source.split == "held_out")
    return (document for document in documents if split_of(document.key, share) == "train")


def _limited(documents: Iterator[Document], max_bytes: int) -> Iterator[str]:
    used = 0
    for document in documents:
        yield document.text
        used += len(document.text.encode("utf-8", "surrogatepass"))
        if used >= max_bytes:
            return

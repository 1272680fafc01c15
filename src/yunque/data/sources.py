"""A configured source as a token store: found, read, divided into splits, tokenised and cached."""

import hashlib
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from yunque.core.config import to_mapping
from yunque.core.errors import ConfigError, DataError
from yunque.core.files import sha256_file
from yunque.core.logging import get_logger
from yunque.data.builtin import BuiltinSource, read_builtin
from yunque.data.chat_samples import chat_samples
from yunque.data.conversations import Conversation, ConversationSource, parse_conversation, read_conversations
from yunque.data.documents import Document, Split, TokenDocument, split_of
from yunque.data.folders import FoundFile, find_files
from yunque.data.readers import CodeSource, JsonlSource, ParquetSource, TextSource, read_documents
from yunque.data.report import ReadLog
from yunque.data.source import ChatSource, FileSource
from yunque.data.store import TokenStore, cached_store
from yunque.data.tool_chats import ToolChatSource, tool_chats
from yunque.text.render import Renderer
from yunque.text.tokenizer import TOKENIZER_FILE, Tokenizer

AnySource = BuiltinSource | JsonlSource | ParquetSource | TextSource | CodeSource | ConversationSource | ToolChatSource

END_OF_DOCUMENT = "<|endoftext|>"

_BATCH_CHARS = 1_000_000
_log = get_logger(__name__)


@dataclass(frozen=True)
class SourceOpener:
    """Opens sources for one tokenizer, keeping what it tokenised in the folder ``cache``.

    ``renderer`` writes conversations; sources of text need none.
    """

    tokenizer: Tokenizer
    cache: Path
    held_out_share: float
    renderer: Renderer | None = None

    def open(self, name: str, source: AnySource, split: Split) -> TokenStore:
        """The split's documents of ``source``, tokenised now or before. It may hold none.

        What reading found is logged and stays in the store's ``report``. Raises DataError where the source is
        not there at all, or at its first problem where it says ``on_bad = "stop"``.
        """
        log = ReadLog(source.on_bad)
        files = find_files(source.path, source.extensions, log) if isinstance(source, FileSource) else []
        identity = {
            "source": to_mapping(source),
            "split": split,
            "held_out_share": self.held_out_share,
            "tokenizer": self._tokenizer_digest,
            "made_of": _listing_digest(files) if files else sys.version,
        }
        if isinstance(source, ChatSource):
            identity["chat_format"] = str(self._renderer_for(name).chat_format)
        store = cached_store(
            self.cache,
            f"{name}-{split}",
            identity,
            self._token_documents(name, source, files, split, log),
            log,
            vocab_size=self.tokenizer.vocab_size,
            whole=isinstance(source, ChatSource),
        )
        kind = "conversations" if store.whole else "documents"
        # A store that was made before has said this already; problems in the data are said every time.
        is_news = log.report().documents > 0 or bool(store.report.counts)
        _log.log(
            logging.INFO if is_news else logging.DEBUG,
            *("%s, %s: %s %s, %s tokens; read %s", name, split, f"{store.num_documents:,}", kind),
            *(f"{store.num_tokens:,}", store.report),
        )
        return store

    @cached_property
    def _tokenizer_digest(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save(folder)
            return sha256_file(Path(folder) / TOKENIZER_FILE)

    def _renderer_for(self, name: str) -> Renderer:
        if self.renderer is None:
            raise ConfigError(f"source {name!r} holds conversations: a chat format is needed to write them")
        return self.renderer

    def _token_documents(
        self, name: str, source: AnySource, files: list[FoundFile], split: Split, log: ReadLog
    ) -> Iterator[TokenDocument]:
        if source.split not in ("auto", split):
            return
        share = self.held_out_share if source.split == "auto" else float(split == "held_out")
        if isinstance(source, ConversationSource | ToolChatSource):
            renderer = self._renderer_for(name)
            for conversation in _conversations(name, source, files, split, log):
                if isinstance(source, ToolChatSource) or split_of(conversation.key, share) == split:
                    yield from _samples(conversation, renderer, source, log)
        else:
            is_builtin = isinstance(source, BuiltinSource)
            documents = read_builtin(source, log) if is_builtin else read_documents(source, files, log)
            yield from tokenise((d for d in documents if split_of(d.key, share) == split), self.tokenizer)


def tokenise(documents: Iterator[Document], tokenizer: Tokenizer) -> Iterator[TokenDocument]:
    """Each document's tokens with ``<|endoftext|>`` after them, in order, some at a time on all cores."""
    end = tokenizer.id_of(END_OF_DOCUMENT)
    waiting: list[Document] = []
    num_chars = 0
    for document in documents:
        waiting.append(document)
        num_chars += len(document.text)
        if num_chars >= _BATCH_CHARS:
            yield from _encoded(waiting, tokenizer, end)
            waiting, num_chars = [], 0
    yield from _encoded(waiting, tokenizer, end)


def _encoded(documents: list[Document], tokenizer: Tokenizer, end: int) -> Iterator[TokenDocument]:
    encoded = tokenizer.encode_batch([document.text for document in documents])
    for document, ids in zip(documents, encoded, strict=True):
        yield TokenDocument(np.asarray([*ids, end], dtype=np.int64), None, document.source)


def _conversations(
    name: str, source: ConversationSource | ToolChatSource, files: list[FoundFile], split: Split, log: ReadLog
) -> Iterator[Conversation]:
    if isinstance(source, ConversationSource):
        yield from read_conversations(files, log, encoding=source.encoding, max_chars=source.max_chars)
        return
    for index, row in enumerate(tool_chats(source, split)):
        log.document(len(json.dumps(row).encode()))
        yield parse_conversation(row, f"{name}:{index}")


def _samples(
    conversation: Conversation, renderer: Renderer, source: ChatSource, log: ReadLog
) -> Iterator[TokenDocument]:
    """The conversation's samples, or the problem that it cannot be learned from."""
    try:
        samples = chat_samples(conversation, renderer, source)
    except DataError as error:
        place, _, line = conversation.source.rpartition(":")
        log.problem(place, int(line), "cannot be learned from", str(error))
        return
    yield from samples


def _listing_digest(files: list[FoundFile]) -> str:
    """A hash of the files' names, sizes and times of change."""
    digest = hashlib.sha256()
    for file in files:
        status = file.path.stat()
        digest.update(json.dumps([file.name, status.st_size, status.st_mtime_ns]).encode())
    return digest.hexdigest()

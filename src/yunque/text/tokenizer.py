"""Byte-level BPE: train one, load a released one, and turn text into ids and ids into exact bytes."""

import codecs
import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as _Engine

from yunque.core.errors import ConfigError, DataError
from yunque.core.files import read_json, write_atomic, write_json
from yunque.text.special import CONTROL_TOKENS, TAG_TOKENS, SpecialTokens

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is cut before merging: GPT-4's expression, except that every digit stands alone, so that a small
model sees a number's places."""

_REPLACEMENT = "\ufffd".encode()
_LONG_TEXT_CHARS = 10_000


class Tokenizer:
    """A byte-level BPE vocabulary with its added tokens, around Hugging Face ``tokenizers``.

    ``encode`` treats its argument as ordinary text: ``"<|user|>"`` in it becomes characters, never the
    control token, whatever flags the file gives that token. Only ``encode_with_special`` recognises added
    tokens.
    """

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        content = json.loads(engine.to_str())
        self._added: dict[int, dict[str, Any]] = {token["id"]: token for token in content["added_tokens"]}
        self._plain = _Engine.from_str(json.dumps({**content, "added_tokens": []}))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Tokenizer":
        """Read ``tokenizer.json`` (the file, or its folder); DataError if it is not byte-level BPE."""
        path = Path(path)
        file = path / TOKENIZER_FILE if path.is_dir() else path
        if not file.is_file():
            raise DataError(f"{file}: no such file; expected a Hugging Face {TOKENIZER_FILE}")
        content = read_json(file)
        problem = _problem(content)
        if problem is not None:
            raise DataError(f"{file}: {problem}; expected the {TOKENIZER_FILE} of a byte-level BPE")
        try:
            engine = _Engine.from_str(json.dumps({**content, "truncation": None, "padding": None}))
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{file}: the tokenizers library cannot read it: {error}") from error
        return Tokenizer(engine)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``tokenizer.json`` and the ``tokenizer_config.json`` with which ``transformers`` loads it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / TOKENIZER_FILE, self._engine.to_str(pretty=True))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        }
        if self.find("<|endoftext|>") is not None:
            config |= {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
        write_json(folder / TOKENIZER_CONFIG_FILE, config)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return max(self._engine.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token: ``n`` tokens hold at most ``n`` times as many."""
        added = (len(token["content"].encode()) for token in self._added.values())
        return max(*added, *map(len, self._engine.get_vocab(with_added_tokens=False)))

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """The ids of the added tokens (role markers, tags, and others), which no ordinary text is encoded to."""
        return frozenset(self._added)

    @cached_property
    def special(self) -> SpecialTokens:
        """The ids of the chat formats' tokens; TemplateError names those this vocabulary lacks."""
        return SpecialTokens.find(self.find)

    def find(self, token: str) -> int | None:
        """The id of a token by its exact spelling in the vocabulary, or None."""
        return self._engine.token_to_id(token)

    def id_of(self, token: str) -> int:
        """The id of a token by its exact spelling in the vocabulary; DataError if there is none."""
        token_id = self.find(token)
        if token_id is None:
            raise DataError(f"token {token!r} is not in the vocabulary of {self.vocab_size} tokens")
        return token_id

    def encode(self, text: str) -> list[int]:
        """The ids of ordinary text. Nothing is added, and no added token is recognised in it."""
        return _encode(self._plain, text)

    def encode_with_special(self, text: str) -> list[int]:
        """The ids of trusted text in which every added token's spelling means that token."""
        return _encode(self._engine, text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``[encode(text) for text in texts]``, on all cores."""
        for text in texts:
            _refuse_surrogates(text)
        return [encoding.ids for encoding in self._plain.encode_batch(list(texts), add_special_tokens=False)]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; DataError for an id outside the vocabulary."""
        if token_id in self._added:
            return self._added[token_id]["content"].encode()
        token = self._engine.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            raise DataError(f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens")
        return bytes(_BYTE_OF[character] for character in token)

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """The exact bytes of ids. An id outside the vocabulary (a padded model samples some) is U+FFFD."""
        return b"".join(self._shown_bytes(token_id, skip_special) for token_id in ids)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of ids: ``decode(encode(text)) == text``. Bytes that are not UTF-8 become U+FFFD.

        ``skip_special`` leaves out the tokens that the vocabulary flags as special (role markers, not
        thinking tags).
        """
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", errors="replace")

    def _shown_bytes(self, token_id: int, skip_special: bool) -> bytes:
        if skip_special and token_id in self._added and self._added[token_id]["special"]:
            return b""
        try:
            return self.token_bytes(token_id)
        except DataError:
            return _REPLACEMENT


class IncrementalDecoder:
    """Text of a stream of ids: a character is held back until its last byte has come.

    The concatenation of everything returned, ``finish`` included, is ``Tokenizer.decode`` of the same ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, *ids: int) -> str:
        """The text that these ids complete."""
        return self._utf8.decode(self._tokenizer.decode_bytes(ids))

    def finish(self) -> str:
        """What was held back, as U+FFFD; the decoder can then be used again."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE vocabulary of at most ``vocab_size`` tokens, the GLM tokens last.

    The same texts in the same order give the same vocabulary. Little text gives fewer tokens than asked for:
    read ``vocab_size`` from the result. ConfigError if the 256 bytes and the GLM tokens do not fit.
    """
    reserved = (*CONTROL_TOKENS, *TAG_TOKENS)
    smallest = 256 + len(reserved)
    if vocab_size < smallest:
        raise ConfigError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(reserved)} GLM tokens need {smallest}"
        )
    engine = _Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(reserved),
        min_frequency=2,
        initial_alphabet=sorted(_BYTE_OF),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    engine.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    engine.add_tokens([AddedToken(token, normalized=False, special=False) for token in TAG_TOKENS])
    return Tokenizer(engine)


def _encode(engine: _Engine, text: str) -> list[int]:
    """The batch form lets other threads run meanwhile, the single one is quicker to start."""
    _refuse_surrogates(text)
    if len(text) >= _LONG_TEXT_CHARS:
        return engine.encode_batch([text], add_special_tokens=False)[0].ids
    return engine.encode(text, add_special_tokens=False).ids


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"text has the lone surrogate {text[error.start]!r} at character {error.start}: not Unicode text"
        ) from error


def _problem(content: Any) -> str | None:
    """Why a tokenizer file's content is not a byte-level BPE, or None."""
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        return "it has no model"
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        return f"its model (type {model.get('type')!r}) has no vocab and merges"
    if not isinstance(content.get("added_tokens", []), list):
        return "its added_tokens are not a list"
    if not _is_byte_level(content.get("decoder")):
        return "its decoder is not ByteLevel"
    foreign = set().union(*vocab) - set(_BYTE_OF)
    if foreign:
        return f"its vocabulary holds {min(foreign)!r}, which stands for no byte"
    return None


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == "ByteLevel" or any(map(_is_byte_level, decoder.get("decoders", ())))


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (the GPT-2 table).

    Bytes that print in Latin-1 stand for themselves, the other 68, in order, for the characters from U+0100
    on.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printing]
    shifted = {chr(0x100 + position): byte for position, byte in enumerate(hidden)}
    return {chr(byte): byte for byte in sorted(printing)} | shifted


_BYTE_OF = _byte_alphabet()

import json
import re
from itertools import chain, groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunque.core.errors import TemplateError
from yunque.text import CONTROL_TOKENS, TAG_TOKENS, Tokenizer
from yunque.text.lexer import Symbol, Tag, TagLexer

PIECES = [*TAG_TOKENS, "<", "</", "<th", "ink>", "<arg_", "<<think", ">", "a", "é😀", "\n", "<|user|>"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def merged(symbols: list[Symbol]) -> list[Symbol]:
    """Symbols with adjacent texts joined."""
    groups = groupby(symbols, key=lambda symbol: isinstance(symbol, str))
    return list(chain.from_iterable(["".join(map(str, run))] if is_text else run for is_text, run in groups))


def lexed(lexer: TagLexer, ids: list[int]) -> list[Symbol]:
    return [*chain.from_iterable(map(lexer.push, ids)), *lexer.finish()]


def reference(text: str) -> list[Symbol]:
    """The tags and texts of a whole string, by one regular expression."""
    parts = re.split("(" + "|".join(map(re.escape, TAG_TOKENS)) + ")", text)
    return [Tag(part) if part in TAG_TOKENS else part for part in parts if part]


@given(TEXT, st.data())
def test_tags_in_text_are_found_however_tokens_cut_them(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    ids = [token for part in parts for token in tokenizer.encode(part)]
    symbols = lexed(TagLexer(tokenizer, text_tags=True), ids)
    assert merged(symbols) == reference(text)


@given(TEXT)
def test_bytes_one_by_one_give_the_same_symbols(tokenizer: Tokenizer, text: str) -> None:
    single = {tokenizer.token_bytes(i): i for i in range(256)}
    ids = [single[bytes([byte])] for byte in text.encode()]
    assert merged(lexed(TagLexer(tokenizer, text_tags=True), ids)) == reference(text)


@given(TEXT)
def test_what_was_shown_never_turns_out_to_be_part_of_a_tag(tokenizer: Tokenizer, text: str) -> None:
    lexer, seen, whole = TagLexer(tokenizer, text_tags=True), list[Symbol](), reference(text)
    for token in tokenizer.encode(text):
        seen = merged([*seen, *lexer.push(token)])
        if seen:
            *done, last = seen
            assert done == whole[: len(done)]
            following = whole[len(done)]
            assert following == last or (isinstance(following, str) and following.startswith(str(last)))


@given(TEXT)
def test_without_text_tags_only_ids_are_tags(tokenizer: Tokenizer, text: str) -> None:
    lexer = TagLexer(tokenizer, text_tags=False)
    assert merged(lexed(lexer, tokenizer.encode(text))) == ([text] if text else [])


@given(st.lists(st.sampled_from([*CONTROL_TOKENS, *TAG_TOKENS, "é", "<th"]), max_size=6), st.booleans())
def test_ids_are_tags_in_either_mode(tokenizer: Tokenizer, pieces: list[str], text_tags: bool) -> None:
    every = {*CONTROL_TOKENS, *TAG_TOKENS}
    ids = [t for p in pieces for t in ([tokenizer.id_of(p)] if p in every else tokenizer.encode(p))]
    expected = merged([Tag(piece) if piece in every else piece for piece in pieces])
    assert merged(lexed(TagLexer(tokenizer, text_tags=text_tags), ids)) == expected


def test_a_tag_ends_a_character_that_was_cut(tokenizer: Tokenizer) -> None:
    cut = next(i for i in range(256) if tokenizer.token_bytes(i) == b"\xf0")
    symbols = lexed(TagLexer(tokenizer, text_tags=False), [cut, tokenizer.id_of("</think>"), cut])
    assert symbols == ["\ufffd", Tag("</think>"), "\ufffd"]


def test_a_vocabulary_without_tags_needs_text_tags(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "added_tokens": []}), "utf-8")
    bare = Tokenizer.load(tmp_path)
    with pytest.raises(TemplateError, match=r"lacks <think>, .*text_tags=True"):
        TagLexer(bare, text_tags=False)
    lexer = TagLexer(bare, text_tags=True)
    assert merged(lexed(lexer, bare.encode("a<think>b"))) == ["a", Tag("<think>"), "b"]

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine
from tokenizers import models

from yunque.core.errors import ConfigError, DataError, TemplateError
from yunque.text import CONTROL_TOKENS, TAG_TOKENS, IncrementalDecoder, Tokenizer, train_bpe

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
LOOKALIKES = st.lists(TEXT | st.sampled_from((*CONTROL_TOKENS, *TAG_TOKENS)), max_size=8).map("".join)


@given(LOOKALIKES)
def test_decoding_is_exact(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode_with_special(text)) == text
    assert tokenizer.encode_batch([text, "a"]) == [tokenizer.encode(text), tokenizer.encode("a")]


@given(LOOKALIKES)
def test_plain_text_never_becomes_a_control_token(tokenizer: Tokenizer, text: str) -> None:
    assert set(tokenizer.encode(text)).isdisjoint(tokenizer.special.ids.values())


@given(st.lists(st.sampled_from((*CONTROL_TOKENS, *TAG_TOKENS)), max_size=6))
def test_trusted_text_becomes_control_tokens(tokenizer: Tokenizer, tokens: list[str]) -> None:
    assert tokenizer.encode_with_special("".join(tokens)) == [tokenizer.id_of(token) for token in tokens]


@given(st.binary(max_size=12))
def test_any_bytes_can_be_spelled_and_read_back(tokenizer: Tokenizer, content: bytes) -> None:
    single = {tokenizer.token_bytes(i): i for i in range(256)}
    assert len(single) == 256
    ids = [single[bytes([byte])] for byte in content]
    assert tokenizer.decode_bytes(ids) == content
    assert tokenizer.decode(ids) == content.decode("utf-8", errors="replace")


@given(st.lists(st.integers(0, 420), max_size=20), st.data())
def test_streamed_text_equals_whole_text(tokenizer: Tokenizer, ids: list[int], data: st.DataObject) -> None:
    decoder, text, at = IncrementalDecoder(tokenizer), "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, len(ids) - at))
        text += decoder.push(*ids[at : at + size])
        at += size
    assert text + decoder.finish() == tokenizer.decode(ids)


def test_a_character_is_held_back_until_its_last_byte(tokenizer: Tokenizer) -> None:
    single = {tokenizer.token_bytes(i): i for i in range(256)}
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(single[bytes([byte])]) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert decoder.push(single[b"\xe2"]) == ""
    assert decoder.finish() == "\ufffd"


def test_vocabulary_puts_the_glm_tokens_last(tokenizer: Tokenizer) -> None:
    reserved = [*CONTROL_TOKENS, *TAG_TOKENS]
    first = tokenizer.vocab_size - len(reserved)
    assert [tokenizer.id_of(token) for token in reserved] == list(range(first, tokenizer.vocab_size))
    assert tokenizer.special.eos_ids == tuple(
        tokenizer.id_of(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")
    )
    assert tokenizer.special.pad_id == tokenizer.id_of("<|endoftext|>")


def test_digits_are_single_tokens() -> None:
    tokenizer = train_bpe(["12345 " * 200], 400)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("12345")] == list("12345")


def test_training_twice_gives_the_same_vocabulary(tmp_path: Path) -> None:
    """Once more in another process, where hash tables are seeded otherwise."""
    texts = [f"value_{i % 17} = other[{i % 5}] + {i}\n" for i in range(300)]
    train_bpe(texts, 500).save(tmp_path / "a")
    program = (
        "from yunque.text import train_bpe\n"
        "texts = [f'value_{i % 17} = other[{i % 5}] + {i}\\n' for i in range(300)]\n"
        f"train_bpe(iter(texts), 500).save({str(tmp_path / 'b')!r})\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vocab_size 200 is too small.* 274"):
        train_bpe(["a"], 200)
    assert train_bpe([], 1000).vocab_size == 274


def test_saving_and_loading_changes_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    text = "Paris <think> 東京 12\r\n\tdef"
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.encode_with_special(text) == tokenizer.encode_with_special(text)
        assert loaded.special == tokenizer.special
        assert loaded.vocab_size == tokenizer.vocab_size


def test_transformers_reads_what_was_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Paris <think> 東京 12<|user|>\r\n\tdef"
    assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode_with_special(text)
    assert theirs.eos_token_id == theirs.pad_token_id == tokenizer.special.pad_id
    ids = tokenizer.encode_with_special("<|user|>a<think>b</think>")
    assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids, skip_special=True)
    assert tokenizer.decode(ids, skip_special=True) == "a<think>b</think>"


def test_a_vocabulary_without_glm_tokens_works_until_they_are_needed(tmp_path: Path) -> None:
    bare = train_bpe(["plain text"], 300)
    bare.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<think>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.decode(loaded.encode("plain <think>")) == "plain <think>"
    with pytest.raises(TemplateError, match="lacks <think>;"):
        _ = loaded.special


def test_ids_outside_the_vocabulary(tokenizer: Tokenizer) -> None:
    for token_id in (-1, tokenizer.vocab_size):
        assert tokenizer.decode([token_id]) == "\ufffd"
        with pytest.raises(DataError, match=f"token id {token_id} .* {tokenizer.vocab_size} tokens"):
            tokenizer.token_bytes(token_id)
    with pytest.raises(DataError, match="'<nope>'"):
        tokenizer.id_of("<nope>")


def test_text_that_is_not_unicode_is_refused(tokenizer: Tokenizer) -> None:
    for encode in (
        tokenizer.encode,
        tokenizer.encode_with_special,
        lambda text: tokenizer.encode_batch([text]),
    ):
        with pytest.raises(DataError, match="character 1"):
            encode("a\ud800")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[]", "it has no model"),
        ('{"model": {"type": "Unigram", "vocab": []}}', "Unigram"),
        ('{"model": {"vocab": {}, "merges": []}, "decoder": {"type": "Metaspace"}}', "ByteLevel"),
        ('{"model": {"vocab": {"▁a": 0}, "merges": []}, "decoder": {"type": "ByteLevel"}}', "'▁'"),
    ],
)
def test_a_file_that_is_no_byte_level_bpe_is_refused(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        Tokenizer.load(tmp_path)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)


def test_a_word_piece_vocabulary_is_refused(tmp_path: Path) -> None:
    Engine(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="WordPiece"):
        Tokenizer.load(tmp_path)

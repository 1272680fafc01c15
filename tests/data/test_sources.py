import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from yunque.core.errors import ConfigError, DataError
from yunque.data.conversations import ConversationSource
from yunque.data.folders import FoundFile
from yunque.data.readers import CodeSource, JsonlSource, ParquetSource, TextSource
from yunque.data.sources import AnySource, SourceOpener
from yunque.data.store import TokenStore
from yunque.data.tool_chats import ToolChatSource
from yunque.text.render import Renderer
from yunque.text.tokenizer import Tokenizer

MakeFile = Callable[[str, bytes], FoundFile]


@pytest.fixture
def opener(tokenizer: Tokenizer, tmp_path: Path) -> SourceOpener:
    return SourceOpener(tokenizer, tmp_path / "cache", 0.2, Renderer(tokenizer, "glm-5"))


def _texts(store: TokenStore, tokenizer: Tokenizer) -> list[str]:
    documents = [store.read(i, 0, store.length(i)).tokens.tolist() for i in range(store.num_documents)]
    return [tokenizer.decode(document) for document in documents]


def test_documents_end_in_endoftext_and_the_splits_share_none(
    opener: SourceOpener, tokenizer: Tokenizer, make_file: MakeFile
) -> None:
    rows = [f"text {i} <|user|>" for i in range(200)]
    file = make_file("in/a.jsonl", "\n".join(json.dumps({"text": row}) for row in rows).encode())
    source = JsonlSource(path=str(file.path))
    train, held_out = (_texts(opener.open("a", source, split), tokenizer) for split in ("train", "held_out"))
    assert sorted(train + held_out) == sorted(f"{row}<|endoftext|>" for row in rows)
    assert 20 < len(held_out) < 60
    store = opener.open("a", source, "train")
    user = tokenizer.id_of("<|user|>")
    assert user not in store.tokens.tolist()


def test_a_source_may_belong_to_one_side(opener: SourceOpener, make_file: MakeFile) -> None:
    path = str(make_file("in/a.txt", b"hello").path)
    for side, other in (("train", "held_out"), ("held_out", "train")):
        source = TextSource(path=path, split=side)  # type: ignore[arg-type]
        assert opener.open(side, source, side).num_documents == 1  # type: ignore[arg-type]
        assert opener.open(side, source, other).num_documents == 0  # type: ignore[arg-type]


def test_changed_files_and_settings_are_tokenised_again(opener: SourceOpener, make_file: MakeFile) -> None:
    path = make_file("in/a.txt", b"hello").path
    source = TextSource(path=str(path), split="train")
    first = opener.open("a", source, "train")
    assert opener.open("a", source, "train").folder == first.folder
    path.write_bytes(b"hello again")
    second = opener.open("a", source, "train")
    assert second.num_tokens > first.num_tokens
    assert opener.open("a", TextSource(path=str(path), split="train", max_chars=3), "train").num_documents == 4


def test_every_kind_of_file_is_read(opener: SourceOpener, make_file: MakeFile) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = make_file("in/a.txt", b"text").path.parent
    make_file("in/b.py", b"x = 1\n")
    make_file("in/c.jsonl", b'{"text": "row"}\n')
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    make_file("chats/d.jsonl", json.dumps(chat).encode())
    parquet.write_table(pyarrow.table({"text": ["cell"]}), folder / "e.parquet")
    sources: list[AnySource] = [
        TextSource(path=str(folder)),
        CodeSource(path=str(folder)),
        JsonlSource(path=str(folder)),
        ParquetSource(path=str(folder)),
        ConversationSource(path=str(folder.parent / "chats")),
    ]
    for source in sources:
        both = [opener.open(source.kind, source, split).num_documents for split in ("train", "held_out")]
        assert sum(both) == 1


def test_a_conversation_that_cannot_be_learned_from_is_a_problem(opener: SourceOpener, make_file: MakeFile) -> None:
    wrong = {"role": "assistant", "content": "x", "train": False}
    chats = [
        {"messages": [{"role": "user", "content": "hi"}, wrong]},
        {"messages": [{"role": "user", "content": "\ud83d"}, {"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    ]
    path = make_file("in/a.jsonl", "\n".join(map(json.dumps, chats)).encode()).path
    store = opener.open("a", ConversationSource(path=str(path), split="train"), "train")
    assert store.num_documents == 1
    assert store.whole
    assert [(p.file, p.line, p.reason) for p in store.report.problems] == [
        ("a.jsonl", 1, "cannot be learned from"),
        ("a.jsonl", 2, "cannot be learned from"),
    ]


def test_stop_ends_at_the_first_problem_and_caches_nothing(opener: SourceOpener, make_file: MakeFile) -> None:
    path = make_file("in/a.jsonl", b'{"text": "x"}\nbad\n').path
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        opener.open("a", JsonlSource(path=str(path), on_bad="stop"), "train")
    assert opener.open("a", JsonlSource(path=str(path)), "train").report.counts == {"not JSON": 1}
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        opener.open("a", JsonlSource(path=str(path), on_bad="stop"), "train")


def test_problems_in_the_data_are_logged_also_from_the_cache(
    opener: SourceOpener, make_file: MakeFile, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_file("in/a.jsonl", b'{"text": "x"}\nbad\n').path
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, "yunque"):
            opener.open("a", JsonlSource(path=str(path), split="train"), "train")
        shown = [record.getMessage() for record in caplog.records]
        assert (
            "a, train: 1 documents, 2 tokens; read 1 documents, 0.00 MB from 1 files, 1 problems (not JSON: 1)" in shown
        )


def test_clean_data_is_announced_once(
    opener: SourceOpener, make_file: MakeFile, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_file("in/a.jsonl", b'{"text": "x"}\n').path
    with caplog.at_level(logging.INFO, "yunque"):
        for _ in range(2):
            opener.open("a", JsonlSource(path=str(path), split="train"), "train")
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["a, train"]


def test_generated_conversations_are_learned_in_both_splits(opener: SourceOpener) -> None:
    source = ToolChatSource(num_train=30, num_held_out=10, max_questions=1)
    stores = [opener.open("tools", source, split) for split in ("train", "held_out")]
    assert [store.num_documents for store in stores] == [30, 10]
    assert all(store.mask is not None and 0.01 < store.mask.mean() < 0.5 for store in stores)


def test_conversations_need_a_chat_format(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="source 'tools' holds conversations: a chat format is needed"):
        SourceOpener(tokenizer, tmp_path, 0.1).open("tools", ToolChatSource(), "train")

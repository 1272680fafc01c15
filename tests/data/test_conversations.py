import json
from collections.abc import Callable
from typing import Any

import pytest

from yunque.core.errors import DataError
from yunque.data.conversations import parse_conversation, read_conversations
from yunque.data.folders import FoundFile
from yunque.data.report import ReadLog

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}


def test_train_false_and_weight_zero_are_not_learned() -> None:
    row = {"messages": [USER, ASSISTANT | {"train": False}, USER, ASSISTANT | {"weight": 0}, USER, ASSISTANT]}
    assert parse_conversation(row, "a:1").learned == (True, False, True, False, True, True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "'messages' must be a list that is not empty; there is no field at all"),
        ({"text": "x"}, "there is text"),
        ({"messages": []}, "not empty"),
        ({"messages": "hi"}, "must be a list"),
        ({"messages": [USER]}, "no message is the assistant's"),
        (
            {"messages": [USER, {"role": "asistant", "content": "x"}]},
            r"messages\[1\].*did you mean 'assistant'",
        ),
        ({"messages": [USER, "hello"]}, r"messages\[1\]"),
        ({"messages": [USER, ASSISTANT], "tools": {}}, "'tools' must be a list, not dict"),
        ({"messages": [USER, ASSISTANT], "tools": [{"type": "function"}]}, r"tools\[0\]"),
        ({"messages": [USER, ASSISTANT | {"train": 0}]}, r"messages\[1\]\.train: 0; valid: true, false"),
        ({"messages": [USER, ASSISTANT | {"weight": 0.5}]}, r"messages\[1\]\.weight: 0\.5; valid: 0, 1"),
    ],
)
def test_what_is_not_a_conversation_says_where(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_conversation(row, "a:1")


def test_bad_rows_are_problems_with_file_and_line(make_file: Callable[[str, bytes], FoundFile]) -> None:
    rows = [{"messages": [USER, ASSISTANT]}, {"messages": [USER]}, {"messages": [USER, ASSISTANT], "id": 7}]
    file = make_file("a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    log = ReadLog()
    read = list(read_conversations([file], log, encoding="utf-8", max_chars=1000))
    assert [conversation.source for conversation in read] == ["a.jsonl:1", "a.jsonl:3"]
    assert read[0].key == read[1].key
    assert [(p.line, p.reason) for p in log.report().problems] == [(2, "not a conversation")]

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from yunque.data.conversations import parse_conversation, read_conversations, write_rows
from yunque.data.folders import FoundFile
from yunque.data.report import ReadLog
from yunque.data.tool_chats import ToolChatSource, tool_chats

Row = dict[str, Any]


def _calls(rows: list[Row]) -> list[tuple[str, str]]:
    messages = [message for row in rows for message in row["messages"]]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return [(call["name"], call["arguments"]) for call in calls]


@pytest.fixture(scope="module")
def train() -> list[Row]:
    return list(tool_chats(ToolChatSource(num_train=3000), "train"))


def test_the_same_settings_give_the_same_conversations(train: list[Row]) -> None:
    assert list(tool_chats(ToolChatSource(num_train=3000), "train")) == train
    assert list(tool_chats(ToolChatSource(num_train=3000, seed=1), "train")) != train
    assert list(tool_chats(ToolChatSource(num_train=50), "train")) == train[:50]


def test_no_held_out_call_or_small_talk_is_in_training(train: list[Row]) -> None:
    held_out = list(tool_chats(ToolChatSource(num_held_out=1000), "held_out"))
    assert not set(_calls(train)) & set(_calls(held_out))
    asked = [
        {m["content"] for row in rows for m in row["messages"] if m["role"] == "user"} for rows in (train, held_out)
    ]
    assert not asked[0] & asked[1]


def test_every_word_of_a_held_out_call_is_seen_in_training(train: list[Row]) -> None:
    held_out = list(tool_chats(ToolChatSource(num_held_out=300), "held_out"))
    seen = {word for name, text in _calls(train) for word in _words(text)}
    unseen = {word for name, text in _calls(held_out) for word in _words(text)} - seen
    assert {word for word in unseen if not word.isdigit()} == set()
    assert all(len(word) <= 3 for word in unseen)


def _words(arguments: str) -> list[str]:
    return [word for value in json.loads(arguments).values() for word in str(value).replace("-", " ").split()]


def test_arguments_are_copied_from_the_question_and_results_into_the_answer(train: list[Row]) -> None:
    for row in train:
        for index, message in enumerate(row["messages"]):
            for call in message.get("tool_calls", ()):
                question = row["messages"][index - 1]["content"]
                arguments = json.loads(call["function"]["arguments"])
                assert all(str(value) in question for value in arguments.values())
                result, answer = row["messages"][index + 1], row["messages"][index + 2]
                assert result["tool_call_id"] == call["id"]
                name = call["function"]["name"]
                assert result["content"] in answer["content"] or name in ("set_timer", "send_note")
                if name == "add":
                    assert int(result["content"]) == arguments["a"] + arguments["b"]
                shown = {tool["function"]["name"]: tool["function"]["parameters"] for tool in row["tools"]}
                assert set(shown[name]["required"]) == set(arguments)


def test_shares_are_what_the_settings_say(train: list[Row]) -> None:
    num_turns = Counter(sum(m["role"] == "user" for m in row["messages"]) for row in train)
    assert set(num_turns) == {1, 2}
    assert abs(num_turns[2] / len(train) - 0.5) < 0.03
    turns = sum(num_turns.elements())
    assert abs(1 - len(_calls(train)) / turns - 0.15) < 0.03
    thinking = sum("reasoning_content" in m for row in train for m in row["messages"] if m["content"])
    assert abs(thinking / turns - 0.3) < 0.03
    assert len({name for name, _ in _calls(train)}) == 6
    assert {len(row["tools"]) for row in train} == {2}


def test_they_are_the_same_after_a_json_lines_file(tmp_path: Path, train: list[Row]) -> None:
    assert write_rows(tmp_path / "chats.jsonl", train) == 3000
    log = ReadLog()
    file = FoundFile(tmp_path / "chats.jsonl", "chats.jsonl")
    read = list(read_conversations([file], log, encoding="utf-8", max_chars=10_000))
    assert log.report().num_problems == 0
    assert read == [parse_conversation(row, f"chats.jsonl:{i}") for i, row in enumerate(train, start=1)]


@pytest.mark.parametrize(("name", "value"), [("tools_shown", 1), ("tools_shown", 7), ("no_tool_share", 1.5)])
def test_impossible_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        ToolChatSource(**{name: value})  # type: ignore[arg-type]

"""Conversations with tools, read from JSON lines of OpenAI ``messages`` and written back."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from yunque.core.errors import DataError
from yunque.core.files import write_atomic
from yunque.core.records import Message, ToolSpec
from yunque.data.folders import FoundFile
from yunque.data.readers import read_rows
from yunque.data.report import ReadLog
from yunque.data.source import ChatSource, TextFileSource


@dataclass(frozen=True, kw_only=True)
class ConversationSource(ChatSource, TextFileSource):
    """JSON lines of conversations: ``{"messages": [...], "tools": [...]}``, as OpenAI's API takes them."""

    kind: Literal["conversations"] = "conversations"
    extensions: tuple[str, ...] = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Conversation:
    """Messages, the tools on offer, and for each message whether it is learned (if it is the assistant's).

    ``key`` decides train or held-out: conversations with the same messages share a split.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    learned: tuple[bool, ...]
    source: str
    key: str


def read_conversations(
    files: Iterable[FoundFile], log: ReadLog, *, encoding: str, max_chars: int
) -> Iterator[Conversation]:
    """The conversations of JSON-lines files. What is not one is a problem with file and line."""
    for file in files:
        for number, row in read_rows(file, log, encoding=encoding, max_chars=max_chars):
            try:
                conversation = parse_conversation(row, f"{file.name}:{number}")
            except DataError as error:
                log.problem(file.name, number, "not a conversation", str(error))
                continue
            log.document(len(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")))
            yield conversation


def parse_conversation(row: Mapping[str, Any], source: str) -> Conversation:
    """One row as a conversation. Raises DataError, naming the message, for what is not one.

    An assistant message with ``"train": false``, or ``"weight": 0`` as in OpenAI's fine-tuning files, stays
    in context and is not learned. Fields beside ``messages`` and ``tools`` are not read.
    """
    raw_messages, raw_tools = row.get("messages"), row.get("tools")
    if not isinstance(raw_messages, list) or not raw_messages:
        there = ", ".join(sorted(row)[:8]) or "no field at all"
        raise DataError(f"'messages' must be a list that is not empty; there is {there}")
    if raw_tools is not None and not isinstance(raw_tools, list):
        raise DataError(f"'tools' must be a list, not {type(raw_tools).__name__}")
    messages = tuple(Message.from_openai(m, where=f"messages[{i}]") for i, m in enumerate(raw_messages))
    if all(message.role != "assistant" for message in messages):
        raise DataError("no message is the assistant's: there is nothing to learn")
    return Conversation(
        messages=messages,
        tools=tuple(ToolSpec.from_openai(t, where=f"tools[{i}]") for i, t in enumerate(raw_tools or ())),
        learned=tuple(_is_learned(m, f"messages[{i}]") for i, m in enumerate(raw_messages)),
        source=source,
        key=json.dumps(raw_messages, sort_keys=True),
    )


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON lines, atomically; the number of rows."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_atomic(path, "".join(lines))
    return len(lines)


def _is_learned(message: Mapping[str, Any], where: str) -> bool:
    train, weight = message.get("train", True), message.get("weight", 1)
    if not isinstance(train, bool):
        raise DataError(f"{where}.train: {train!r}; valid: true, false")
    if isinstance(weight, bool) or weight not in (0, 1):
        raise DataError(f"{where}.weight: {weight!r}; valid: 0, 1")
    return train and weight == 1

"""Anthropic's Messages API: a reply's blocks as stream events, and the same reply whole."""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any, Literal

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

PING: dict[str, Any] = {"type": "ping"}


def usage(*, prompt_tokens: int, cached_tokens: int, output_tokens: int, thinking_tokens: int) -> dict[str, Any]:
    """Counts in Anthropic's way: ``input_tokens`` are those that were not read from the cache."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
    }


def signature(thought: str) -> str:
    """What stands for Anthropic's signature of a thought: its SHA-256. Clients send it back; nobody checks it."""
    return hashlib.sha256(thought.encode(errors="surrogatepass")).hexdigest()


class ReplyBuilder:
    """Blocks of one reply in the order in which they were written. Each method gives the stream events it causes;
    ``whole`` is the reply that a client puts together from them.

    A tool call is sent once it is complete: Anthropic's own client reads an unfinished ``input`` as if it were whole,
    so a call that turns out to be unusable must not have been shown. Calls of ``eager_tools`` are sent as they grow
    (the tool's ``eager_input_streaming``); one of these that fails stays unfinished and is not part of ``whole``.
    """

    def __init__(self, message_id: str, model: str, *, eager_tools: Collection[str] = ()) -> None:
        self._message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._eager_tools = frozenset(eager_tools)
        self._content: list[dict[str, Any]] = []
        self._next_index = 0
        self._open: dict[str, Any] | None = None
        self._written: list[str] = []
        self._held: dict[str, Any] | None = None
        self._held_arguments: list[str] = []

    def start(self, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Begin the message."""
        message = {**self._message, "content": [], "usage": {**usage, "output_tokens": 0}}
        message["usage"].pop("output_tokens_details", None)
        return [{"type": "message_start", "message": message}]

    def thinking(self, text: str) -> list[dict[str, Any]]:
        """The thought goes on."""
        return self._write({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", text)

    def text(self, text: str) -> list[dict[str, Any]]:
        """The answer goes on."""
        return self._write({"type": "text", "text": ""}, "text_delta", text)

    def begin_call(self, call_id: str, name: str) -> list[dict[str, Any]]:
        """A call of a tool begins."""
        block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        if name in self._eager_tools:
            return self._begin(block)
        self._held, self._held_arguments = block, []
        return []

    def arguments(self, text: str) -> list[dict[str, Any]]:
        """The JSON of the call's arguments goes on."""
        if self._held is not None:
            self._held_arguments.append(text)
            return []
        return [self._delta("input_json_delta", text)]

    def end_call(self) -> list[dict[str, Any]]:
        """The call is complete: its pieces are one JSON object."""
        events: list[dict[str, Any]] = []
        if self._held is not None:
            block, self._held = self._held, None
            events = [*self._begin(block), self._delta("input_json_delta", "".join(self._held_arguments))]
        assert self._open is not None
        self._open["input"] = json.loads("".join(self._written))
        return [*events, *self._close()]

    def void_call(self) -> list[dict[str, Any]]:
        """The call cannot be used."""
        if self._held is not None:
            self._held = None
            return []
        closed = self._close()
        self._content.pop()
        return closed

    def end(self, stop_reason: StopReason, stop_sequence: str | None, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """End the message. Counts of the stream's last event are totals: they replace those of its start."""
        closed = self._close()
        stop = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        self._message |= {"content": self._content, **stop, "usage": dict(usage)}
        return [*closed, {"type": "message_delta", "delta": stop, "usage": dict(usage)}, {"type": "message_stop"}]

    @property
    def whole(self) -> dict[str, Any]:
        """The reply of a request without ``stream``; complete after ``end``."""
        return self._message

    def _write(self, block: dict[str, Any], kind: str, text: str) -> list[dict[str, Any]]:
        begun = self._begin(block) if self._open is None or self._open["type"] != block["type"] else []
        return [*begun, self._delta(kind, text)]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        closed = self._close()
        self._open = block
        self._content.append(block)
        start = {"type": "content_block_start", "index": self._next_index, "content_block": dict(block)}
        return [*closed, start]

    def _delta(self, kind: str, text: str) -> dict[str, Any]:
        field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[kind]
        self._written.append(text)
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": self._next_index, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        block, index, written = self._open, self._next_index, "".join(self._written)
        self._open, self._written = None, []
        self._next_index += 1
        events: list[dict[str, Any]] = []
        if block["type"] == "thinking":
            block |= {"thinking": written, "signature": signature(written)}
            delta = {"type": "signature_delta", "signature": block["signature"]}
            events.append({"type": "content_block_delta", "index": index, "delta": delta})
        elif block["type"] == "text":
            block["text"] = written
        return [*events, {"type": "content_block_stop", "index": index}]

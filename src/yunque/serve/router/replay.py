"""Streamed text replies that outlive their engine: another engine plays the sampled ids again, unsampled.

Text alone cannot be continued: characters split over tokens, half tags, reasoning and tool calls live in the engine
that renders them. So the next engine gets the same request with ``resume_token_ids``, the ids sampled so far, as the
beginning of its reply; it streams them like any others and goes on. The client has seen a part of that: what it has is
cut off here, by length for every kind of text and by count for ids and log-probabilities. The played ids must be the
ones that were asked for; an engine that does not know the field is found out before a wrong word is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yunque.serve.router.continuation import CannotContinue

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


class TextReply:
    """One streamed reply of ``/v1/chat/completions`` or ``/v1/completions``, followed over its engines."""

    wants_stream = True

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._gives_ids = bool(body.get("return_token_ids"))
        self._ids: list[int] = []
        self._replayed: list[int] | None = None
        """Ids that this engine has played again; None for the first engine."""
        self._sent: dict[tuple[str, int], int] = {}
        self._seen: dict[tuple[str, int], int] = {}
        self._first: dict[str, Any] | None = None
        self._finish: str | None = None
        self.is_partial = False
        """Handed back by an engine that says that another may go on (Yunque's)."""

    @property
    def tokens(self) -> int:
        """Sampled tokens so far."""
        return len(self._ids)

    @property
    def is_finished(self) -> bool:
        return self._finish is not None

    @property
    def is_handed_back(self) -> bool:
        """Finished without an end: the engine gave up the reply."""
        return self._finish == "abort" or self.is_partial

    def reopen(self, told: dict[str, Any]) -> dict[str, Any]:
        """The reply was handed back and goes on elsewhere: ``told`` without its finish."""
        self._finish, self.is_partial = None, False
        open_ended = {"finish_reason": None, "stop_reason": None}
        choices = [choice | {key: open_ended[key] for key in open_ended.keys() & choice} for choice in told["choices"]]
        return {**told, "choices": choices}

    def next_body(self, *, streams: bool, resumes: bool = False) -> dict[str, Any]:  # noqa: ARG002
        """What to ask the next engine. Raises ``CannotContinue`` when text was said whose ids are not known."""
        body = {**self._body, "return_token_ids": True}
        if self._first is None:
            return body
        if not self._ids and any(self._sent[key] for key in self._sent if key[0] != "role"):
            raise CannotContinue("the lost engine gave no token ids")
        self._replayed, self._seen = [], {}
        return body | ({"resume_token_ids": list(self._ids)} if self._ids else {})

    def closing(self) -> None:
        """Only an engine can tell the end of a text."""
        return None

    def feed(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """Take an engine's chunk; returns what is new in it for the client (the same object where that is all)."""
        if self._first is None:
            self._first = event
        choices = event.get("choices")
        if not choices:
            if self._replayed is None:
                return event
            return self._named(dict(event)) if self._is_caught_up else None
        choice = choices[0]
        ids = choice.get("token_ids") or []
        known = self._take_ids(ids)
        told = self._cut(choice, known, len(ids))
        if choice.get("finish_reason") is not None:
            if not self._is_caught_up:
                raise CannotContinue("the next engine ended the reply before the point that was reached")
            self._finish = choice["finish_reason"]
            self.is_partial = self._finish == "length" and choice.get("stop_reason") == "partial"
        if self._replayed is None and (self._gives_ids or not _tells_ids(event, choice)):
            return event
        return self._named({**event, "choices": [told]}) if self._has_news(told, event) else None

    @property
    def _is_caught_up(self) -> bool:
        return self._replayed is None or len(self._replayed) >= len(self._ids)

    def _take_ids(self, ids: list[int]) -> int:
        """Record ``ids``; returns how many of them the client has already."""
        if self._replayed is None:
            self._ids += ids
            return 0
        done = len(self._replayed)
        known = self._ids[done : done + len(ids)]
        if ids[: len(known)] != known:
            raise CannotContinue("the next engine does not continue from sampled ids")
        self._replayed += ids
        self._ids += ids[len(known) :]
        return len(known)

    def _cut(self, choice: Mapping[str, Any], known: int, count: int) -> dict[str, Any]:
        """``choice`` without what the client has: ``known`` of its ``count`` ids, and as much text as was said."""
        told = dict(choice)
        if "token_ids" in told:
            told["token_ids"] = (told["token_ids"] or [])[known:]
        if "weight_versions" in told:
            told["weight_versions"] = (told["weight_versions"] or [])[known:]
        if told.get("logprobs"):
            told["logprobs"] = _entries_after(told["logprobs"], known, count)
        if isinstance(told.get("text"), str):
            told["text"] = self._news("text", 0, told["text"])
        if isinstance(told.get("delta"), dict):
            told["delta"] = self._cut_delta(told["delta"])
        return told

    def _cut_delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        told = dict(delta)
        if isinstance(delta.get("role"), str) and not self._news("role", 0, delta["role"]):
            del told["role"]
        for name in _TEXTS:
            if isinstance(delta.get(name), str):
                told[name] = self._news(name, 0, delta[name])
                if self._replayed is not None and not told[name]:
                    del told[name]
        if delta.get("tool_calls"):
            calls = [call for call in map(self._cut_call, delta["tool_calls"]) if call is not None]
            told["tool_calls"] = calls
            if not calls:
                del told["tool_calls"]
        return told

    def _cut_call(self, call: Mapping[str, Any]) -> dict[str, Any] | None:
        index, function = call.get("index", 0), call.get("function") or {}
        name = self._news("name", index, function.get("name") or "")
        arguments = self._news("arguments", index, function.get("arguments") or "")
        if self._replayed is None or (function.get("name") and name):
            return dict(call)
        return {"index": index, "function": {"arguments": arguments}} if arguments else None

    def _news(self, kind: str, index: int, text: str) -> str:
        """The part of ``text`` that lies beyond what the client has of this kind."""
        key = (kind, index)
        begin = self._seen.get(key, 0)
        end = self._seen[key] = begin + len(text)
        sent = self._sent.get(key, 0)
        self._sent[key] = max(sent, end)
        return text[max(0, sent - begin) :] if sent > begin else text

    def _named(self, event: dict[str, Any]) -> dict[str, Any]:
        """One id and time for the whole stream, and no token ids for who did not ask."""
        first = self._first or {}
        event |= {name: first[name] for name in ("id", "created", "model") if name in first}
        if self._replayed is not None or not self._gives_ids:
            event.pop("prompt_token_ids", None)  # of the first engine's first chunk
        if not self._gives_ids:
            for choice in event.get("choices") or ():
                for name in ("token_ids", "weight_versions", "prompt_token_ids"):
                    choice.pop(name, None)
        return event

    def _has_news(self, choice: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
        if choice.get("finish_reason") is not None or choice.get("delta") or choice.get("text"):
            return True
        gives = self._gives_ids and choice.get("token_ids")
        return bool(gives or _has_entries(choice.get("logprobs")) or (self._is_caught_up and event.get("usage")))


def _entries_after(logprobs: Mapping[str, Any], known: int, count: int) -> dict[str, Any]:
    """Log-probabilities without those of ``known`` ids; an engine may leave played ids out by itself."""
    return {
        name: value[known:] if isinstance(value, list) and len(value) == count else value
        for name, value in logprobs.items()
    }


def _tells_ids(event: Mapping[str, Any], choice: Mapping[str, Any]) -> bool:
    return any(name in record for record in (event, choice) for name in ("token_ids", "prompt_token_ids"))


def _has_entries(logprobs: Mapping[str, Any] | None) -> bool:
    return any(isinstance(value, list) and value for value in (logprobs or {}).values())


def text_reply(path: str, body: Mapping[str, Any]) -> TextReply | None:
    """The reply to follow for a streamed text request; None for others and for several replies at once."""
    if path not in (CHAT, COMPLETIONS) or not body.get("stream"):
        return None
    prompt = body.get("prompt")
    is_batch = isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int)) and len(prompt) != 1
    is_one = body.get("n") in (None, 1) and body.get("best_of") in (None, 1) and not is_batch
    return TextReply(body) if is_one and not body.get("echo") else None

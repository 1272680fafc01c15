"""Replies of the token endpoints that outlive their engine: what is asked of the next one, and both parts as one.

A reply is followed event by event. When its engine is lost, `TokenReply.next_body` asks another engine for the rest:
the prompt with the sampled ids behind it, and as many fewer new tokens. What that engine says is merged into what the
client would have seen of one engine: ids, log-probabilities and every other list with one entry per token are joined,
counts are those of the whole reply. An engine that resumes replies (Yunque's) gets the ids as ``resume_token_ids``
instead: it knows what is prompt and what is reply, so penalties, constraints and stop strings go on too.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

#: Settings that look back at the whole reply: a second engine that takes it for prompt would draw otherwise.
_LOOK_BACK = ("presence_penalty", "frequency_penalty")
_CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag", "structured_outputs", "guided_decoding")


class CannotContinue(Exception):
    """The reply cannot go on elsewhere as if nothing had happened."""


@dataclass
class Columns:
    """Sampled ids, the lists that go with them entry by entry, and the text where there is one."""

    ids: list[int] = field(default_factory=list)
    named: dict[str, list[Any]] = field(default_factory=dict)
    text: str = ""

    def joined(self, other: Columns) -> Columns:
        """Both in a row. Raises ``CannotContinue`` when a list is missing in one of them."""
        if self.ids and other.ids and set(self.named) != set(other.named):
            odd = ", ".join(sorted(set(self.named) ^ set(other.named)))
            raise CannotContinue(f"one engine gives {odd} per token and another does not")
        names = self.named if self.ids else other.named
        named = {name: self.named.get(name, []) + other.named.get(name, []) for name in names}
        return Columns(self.ids + other.ids, named, self.text + other.text)

    def after(self, beginning: Columns) -> Columns:
        """What follows ``beginning``, which these columns begin with."""
        count = len(beginning.ids)
        named = {name: values[count:] for name, values in self.named.items()}
        return Columns(self.ids[count:], named, self.text[len(beginning.text) :])


class TokenReply(abc.ABC):
    """One reply of a token endpoint, followed over the engines that make it. ``body`` is the client's request."""

    prompt_field: str
    limit_field: str
    minimum_field: str
    stream_fields: Mapping[str, Any]
    """How a stream is asked for that repeats nothing and tells the usage."""
    default_limit: int | None
    """New tokens where the request does not say; None: as many as fit."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.wants_stream = bool(body.get("stream"))
        self.is_partial = False
        """Handed back by an engine that asks others to go on; these say ``abort``, and their clients may want that."""
        self.is_incremental: bool | None = None
        """Whether events carry only what is new; None until it can be told."""
        self.parts: list[dict[str, Any]] = []
        """Tokens and weight version of every engine that is gone."""
        self._before = Columns()
        self._now = Columns()
        self._first: dict[str, Any] | None = None
        self._last: dict[str, Any] = {}
        self._is_finished = False
        self._is_unknown = False
        """Whether there are sampled tokens that the engine does not tell."""

    @property
    def tokens(self) -> int:
        """Sampled tokens so far."""
        return len(self._before.ids) + len(self._now.ids)

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    @property
    def is_handed_back(self) -> bool:
        """Finished without an end: the engine gave up the reply."""
        return self.is_finished and self._finish_type(self._last) == "abort"

    def next_body(self, *, streams: bool, resumes: bool = False) -> dict[str, Any]:
        """What to ask the next engine. Raises ``CannotContinue`` with the reason.

        ``streams``: ask for events although the client wants the reply in one piece, so that tokens are known as
        soon as they are made. ``resumes``: the engine takes the beginning of a reply.
        """
        if self._is_unknown:
            raise CannotContinue("the lost engine gave no token ids")
        if self._now.ids:
            self.parts.append({"tokens": len(self._now.ids), "weight_version": self._version(self._last)})
        self._before, self._now = self._before.joined(self._now), Columns()
        body = dict(self.body)
        if streams and not self.wants_stream:
            body |= {"stream": True, **self.stream_fields}
        if not self._before.ids:
            return body
        body["sampling_params"] = sampling = dict(body.get("sampling_params") or {})
        if resumes:
            body["resume_token_ids"] = [*(body.get("resume_token_ids") or ()), *self._before.ids]
            return self._as_rest(body)
        _refuse_look_back(sampling)
        made = len(self._before.ids)
        limit = sampling.get(self.limit_field, self.default_limit)
        if limit is not None:
            sampling[self.limit_field] = limit - made
        if sampling.get(self.minimum_field):
            sampling[self.minimum_field] = max(0, sampling[self.minimum_field] - made)
        body[self.prompt_field] = [*self.body[self.prompt_field], *self._before.ids]
        return self._as_rest(body)

    def closing(self) -> dict[str, Any] | None:
        """The last event of a reply that its lost engine had in truth finished: a stop id or the last token was
        sampled, and only the word about it is missing. None when there is more to sample."""
        sampling, ids = self.body.get("sampling_params") or {}, (self._before.ids + self._now.ids)
        if not ids:
            return None
        limit = sampling.get(self.limit_field, self.default_limit)
        least = sampling.get(self.minimum_field) or 0
        if ids[-1] in (sampling.get("stop_token_ids") or ()) and len(ids) > least:
            finish = ("stop", ids[-1])
        elif limit is not None and len(ids) >= limit:
            finish = ("length", limit)
        else:
            return None
        self._is_finished = True
        self._last = self._with_finish(*finish)
        return self._last

    @abc.abstractmethod
    def feed(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """Take an engine's event; returns what the client is told (the same object where nothing changes, None
        where it is told with the next one)."""

    @abc.abstractmethod
    def whole(self) -> dict[str, Any]:
        """The finished reply in one piece."""

    @abc.abstractmethod
    def reopen(self, told: dict[str, Any]) -> dict[str, Any]:
        """The reply was handed back and goes on elsewhere: ``told`` without its finish."""

    @abc.abstractmethod
    def _as_rest(self, body: dict[str, Any]) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _with_finish(self, kind: str, detail: int) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _finish_type(self, event: Mapping[str, Any]) -> str | None: ...

    @abc.abstractmethod
    def _version(self, event: Mapping[str, Any]) -> Any: ...


class SglangReply(TokenReply):
    """``/generate``: events are cumulative, or carry only what is new where the server is set so."""

    prompt_field, limit_field, minimum_field = "input_ids", "max_new_tokens", "min_new_tokens"
    stream_fields = MappingProxyType({"incremental_streaming_output": True})
    default_limit = 128

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__(body)
        self._is_told = False
        """Whether the client has heard of what this engine made."""
        if body.get("incremental_streaming_output"):
            self.is_incremental = True

    def feed(self, event: dict[str, Any]) -> dict[str, Any] | None:
        meta = event.get("meta_info") or {}
        ids = event.get("output_ids")
        if ids is None:
            ids = [entry[1] for entry in meta.get("output_token_logprobs") or ()]
        held, total = len(self._now.ids), meta.get("completion_tokens", len(ids))
        is_delta = bool(held) and held + len(ids) == total
        self._first = self._first or event
        self._last = event
        self._is_finished = meta.get("finish_reason") is not None
        if not is_delta and len(ids) != total:
            if self._before.ids:
                raise CannotContinue(f"an event has {len(ids)} ids of {total} after {held}")
            self._is_unknown = True
            return event
        columns = Columns(list(ids), _columns(meta, len(ids)), event.get("text") or "")
        new = columns if is_delta else columns.after(self._now)
        if held and ids and self.is_incremental is None:
            self.is_incremental = is_delta
        self._now = self._now.joined(columns) if is_delta else columns
        if not self._before.ids:
            return event
        if self.is_incremental is None and not self._is_finished:
            return None  # the lost engine sent one event only: this one's second shows which kind they are
        if held and not self._is_told:
            new = self._now
        self._is_told = True
        return self._merged(new if self.is_incremental else self._before.joined(self._now))

    def whole(self) -> dict[str, Any]:
        if not self._before.ids and not self.is_incremental:
            return self._last
        return self._merged(self._before.joined(self._now))

    def reopen(self, told: dict[str, Any]) -> dict[str, Any]:
        self._is_finished = False
        return {**told, "meta_info": {**told["meta_info"], "finish_reason": None}}

    def _merged(self, columns: Columns) -> dict[str, Any]:
        first = (self._first or {}).get("meta_info") or {}
        meta = {**(self._last.get("meta_info") or {}), **columns.named}
        meta |= {name: first[name] for name in _OF_THE_PROMPT if name in first}
        meta["completion_tokens"] = self.tokens
        if self.parts:
            latest = {"tokens": len(self._now.ids), "weight_version": self._version(self._last)}
            meta["parts"] = [*self.parts, *([latest] if self._now.ids else [])]
        merged = {**self._last, "output_ids": columns.ids, "meta_info": meta}
        if "text" in self._last:
            merged["text"] = columns.text
        return merged

    def _as_rest(self, body: dict[str, Any]) -> dict[str, Any]:
        self._is_told = False
        if "logprob_start_len" in body:
            body["logprob_start_len"] = -1
        return body

    def _with_finish(self, kind: str, detail: int) -> dict[str, Any]:
        reason = {"type": kind, ("matched" if kind == "stop" else "length"): detail}
        event = self._merged(Columns() if self.is_incremental else self._before.joined(self._now))
        return {**event, "meta_info": {**event["meta_info"], "finish_reason": reason}}

    def _finish_type(self, event: Mapping[str, Any]) -> str | None:
        return ((event.get("meta_info") or {}).get("finish_reason") or {}).get("type")

    def _version(self, event: Mapping[str, Any]) -> Any:
        return (event.get("meta_info") or {}).get("weight_version")


class VllmReply(TokenReply):
    """``/inference/v1/generate``: every event carries what is new."""

    prompt_field, limit_field, minimum_field = "token_ids", "max_tokens", "min_tokens"
    stream_fields = MappingProxyType({"stream_options": {"include_usage": True}})
    default_limit = None

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__(body)
        self.is_incremental = True

    def feed(self, event: dict[str, Any]) -> dict[str, Any]:
        choice = (event.get("choices") or [{}])[0]
        ids = choice.get("token_ids") or []
        named = _columns(choice, len(ids))
        entries = (choice.get("logprobs") or {}).get("content")
        if entries is not None and len(entries) == len(ids):
            named["logprobs"] = list(entries)
        if self._before.ids and choice.get("routed_experts") is not None:
            raise CannotContinue("routed experts of two engines are not joined")
        self._now = self._now.joined(Columns(list(ids), named))
        self._first = self._first or event
        self._last = event if event.get("choices") else {**event, "choices": self._last.get("choices", [])}
        self._is_finished = self._is_finished or choice.get("finish_reason") is not None
        return self._told(event) if self._before.ids else event

    def whole(self) -> dict[str, Any]:
        columns = self._before.joined(self._now)
        choice = {**(self._last.get("choices") or [{"index": 0}])[0], "token_ids": columns.ids}
        choice |= {name: values for name, values in columns.named.items() if name != "logprobs"}
        if "logprobs" in columns.named:
            choice["logprobs"] = {**(choice.get("logprobs") or {}), "content": columns.named["logprobs"]}
        return self._told({**(self._first or {}), **self._last, "choices": [choice]})

    def reopen(self, told: dict[str, Any]) -> dict[str, Any]:
        self._is_finished = False
        return {**told, "choices": [{**choice, "finish_reason": None} for choice in told.get("choices") or ()]}

    def _told(self, event: dict[str, Any]) -> dict[str, Any]:
        told = dict(event)
        first = self._first or {}
        told |= {name: first[name] for name in ("request_id", "id", "created") if name in first}
        if usage := event.get("usage"):
            prompt = len(self.body[self.prompt_field])
            counts = {"prompt_tokens": prompt, "completion_tokens": self.tokens, "total_tokens": prompt + self.tokens}
            told["usage"] = {**usage, **counts}
        if self._is_finished and self.parts:
            latest = {"tokens": len(self._now.ids), "weight_version": self._version(event)}
            told["parts"] = [*self.parts, *([latest] if self._now.ids else [])]
        return told

    def _as_rest(self, body: dict[str, Any]) -> dict[str, Any]:
        body["sampling_params"].pop("prompt_logprobs", None)
        return body

    def _with_finish(self, kind: str, detail: int) -> dict[str, Any]:
        choice = {"index": 0, "token_ids": [], "finish_reason": kind}
        if kind == "stop":
            choice["stop_reason"] = detail
        return self._told({"choices": [choice]})

    def _finish_type(self, event: Mapping[str, Any]) -> str | None:
        return (event.get("choices") or [{}])[0].get("finish_reason")

    def _version(self, event: Mapping[str, Any]) -> Any:
        versions = self._now.named.get("weight_versions") or [(self._last or {}).get("weight_version")]
        return event.get("weight_version", versions[-1])


_OF_THE_PROMPT = ("id", "prompt_tokens", "cached_tokens", "input_token_logprobs", "input_top_logprobs")


def _columns(record: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    """The lists with one entry for each of ``count`` new tokens."""
    return {
        name: list(value)
        for name, value in record.items()
        if isinstance(value, list) and len(value) == count and count and not name.startswith(("input_", "prompt_"))
        if name not in ("token_ids", "parts")
    }


def _refuse_look_back(sampling: Mapping[str, Any]) -> None:
    for name in _LOOK_BACK:
        if sampling.get(name):
            raise CannotContinue(f"{name} counts the sampled tokens, which another engine would take for the prompt")
    for name in _CONSTRAINTS:
        if sampling.get(name):
            raise CannotContinue(f"{name} would begin anew on another engine")
    if sampling.get("stop"):
        raise CannotContinue("a stop string may have begun on the lost engine")


def token_reply(path: str, body: Mapping[str, Any]) -> TokenReply | None:
    """The reply to follow for a request to a token endpoint; None where the request is not for one reply from ids."""
    kind = {"/generate": SglangReply, "/inference/v1/generate": VllmReply}.get(path)
    ids = body.get(kind.prompt_field) if kind else None
    sampling = body.get("sampling_params")
    if kind is None or not isinstance(ids, list) or not isinstance(sampling, dict | None):
        return None
    limit = (sampling or {}).get(kind.limit_field)
    is_plain = (sampling or {}).get("n") in (None, 1) and (limit is None or type(limit) is int)
    return kind(body) if is_plain and ids and all(type(token) is int for token in ids) else None

"""The chat client over any server that speaks OpenAI's ``/v1/chat/completions``."""

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from yunque.agents.chat_client import BadCall, CallDelta, ChatEvent, ChatOptions, ChatReply, ChatUsage
from yunque.core.errors import DataError
from yunque.core.records import Message, ToolCall, ToolSpec, parse_json
from yunque.protocol.clients import HttpSettings, JsonTransport
from yunque.protocol.clients.problems import error_from
from yunque.protocol.errors import EngineUnavailable, UnusableReply
from yunque.protocol.openai import dump
from yunque.protocol.sse import DONE, SseDecoder
from yunque.protocol.vllm import SESSION_HEADER
from yunque.text.events import ReasoningDelta, TextDelta

PATH = "/chat/completions"


class HttpChatClient:
    """``ChatClient`` over HTTP, streaming. ``base_url`` may end in ``/v1``; ``model`` None: the first one served."""

    def __init__(self, base_url: str, settings: HttpSettings | None = None, *, model: str | None = None) -> None:
        base_url = base_url.rstrip("/")
        self._transport = JsonTransport(base_url if base_url.endswith("/v1") else base_url + "/v1", settings)
        self._model = model

    async def model(self) -> str:
        """The model's name."""
        if self._model is None:
            self._model = _first_model(await self._transport.get("/models"))
        return self._model

    async def stream(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: ChatOptions
    ) -> AsyncGenerator[ChatEvent, None]:
        """See ``ChatClient.stream``. A stream that ends without saying why is ``EngineUnavailable``."""
        body = _body(await self.model(), messages, tools, options)
        headers = {} if options.session is None else {SESSION_HEADER: options.session}
        reader = _ReplyReader()
        decoder = SseDecoder()
        async with self._transport.stream(PATH, body, headers=headers) as response:
            async for chunk in response.aiter_bytes():
                for event in decoder.feed(chunk):
                    for shown in reader.read(event.data):
                        yield shown
            for event in decoder.finish():
                for shown in reader.read(event.data):
                    yield shown
        yield reader.reply()

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()


class _ReplyReader:
    """Chunks of one reply into events, and in the end the reply."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}
        self._finish: str | None = None
        self._is_done = False
        self._usage = ChatUsage()

    def read(self, data: str) -> list[ChatEvent]:
        """The events of one chunk."""
        if data == DONE:
            self._is_done = True
            return []
        try:
            chunk = parse_json(data)
        except (ValueError, RecursionError) as error:
            raise UnusableReply(f"an event of the stream is not JSON: {error}: {data[:80]!r}") from error
        match chunk:
            case {"error": dict() as fields}:
                status = fields.get("code")
                raise error_from(fields, status if isinstance(status, int) else 500, where="in the stream")
            case {"choices": list() as choices}:
                if isinstance(chunk.get("usage"), dict):
                    self._usage = _usage(chunk["usage"])
                return self._choice(choices[0]) if choices else []
        raise UnusableReply(f"an event of the stream has no choices: {data[:80]!r}")

    def reply(self) -> ChatReply:
        """The whole reply. Raises ``EngineUnavailable`` when its end has not come."""
        if self._finish is None and not self._is_done:
            raise EngineUnavailable("the stream ended in the middle of the reply")
        calls: list[ToolCall] = []
        bad: list[BadCall] = []
        for index in sorted(self._calls):
            call = self._calls[index]
            function = {"name": call["name"], "arguments": call["arguments"]}
            try:
                calls.append(ToolCall.from_openai({"id": call["id"] or _new_id(), "function": function}))
            except DataError as error:
                bad.append(BadCall(call["name"], call["arguments"], str(error)))
        reasoning = "".join(self._reasoning) or None
        message = Message("assistant", "".join(self._text), reasoning, tuple(calls))
        return ChatReply(message, self._finish or "stop", tuple(bad), self._usage)

    def _choice(self, choice: Any) -> list[ChatEvent]:
        match choice:
            case {"delta": dict() as delta}:
                pass
            case _:
                raise UnusableReply(f"a choice of the stream has no delta: {str(choice)[:80]}")
        if isinstance(choice.get("finish_reason"), str):
            self._finish = choice["finish_reason"]
        events: list[ChatEvent] = []
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(thought, str) and thought:
            self._reasoning.append(thought)
            events.append(ReasoningDelta(thought))
        text = delta.get("content")
        if isinstance(text, str) and text:
            self._text.append(text)
            events.append(TextDelta(text))
        return events + [event for entry in delta.get("tool_calls") or () for event in self._call(entry)]

    def _call(self, entry: Any) -> list[ChatEvent]:
        if not isinstance(entry, Mapping):
            raise UnusableReply(f"a tool call of the stream is no object: {str(entry)[:80]}")
        index = entry.get("index", 0)
        function = entry.get("function") or {}
        if not isinstance(index, int) or not isinstance(function, Mapping):
            raise UnusableReply(f"a tool call of the stream cannot be read: {str(entry)[:80]}")
        call = self._calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
        call["id"] = call["id"] or str(entry.get("id") or "")
        call["name"] = call["name"] or str(function.get("name") or "")
        piece = function.get("arguments") or ""
        piece = piece if isinstance(piece, str) else dump(piece)
        call["arguments"] += piece
        return [CallDelta(index, call["name"], piece)]


def _body(model: str, messages: Sequence[Message], tools: Sequence[ToolSpec], options: ChatOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": [message.to_openai() for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    thinking = None if options.enable_thinking is None else {"enable_thinking": options.enable_thinking}
    optional = {
        "tools": [dict(tool.raw) for tool in tools] or None,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "chat_template_kwargs": thinking,
    }
    return body | {key: value for key, value in optional.items() if value is not None}


def _usage(fields: Mapping[str, Any]) -> ChatUsage:
    prompt = fields.get("prompt_tokens_details") or {}
    completion = fields.get("completion_tokens_details") or {}
    accepted = _count(completion, "accepted_prediction_tokens")
    return ChatUsage(
        prompt_tokens=_count(fields, "prompt_tokens"),
        completion_tokens=_count(fields, "completion_tokens"),
        cached_tokens=_count(prompt, "cached_tokens"),
        reasoning_tokens=_count(completion, "reasoning_tokens"),
        drafted=accepted + _count(completion, "rejected_prediction_tokens"),
        accepted=accepted,
    )


def _count(fields: Any, name: str) -> int:
    value = fields.get(name) if isinstance(fields, Mapping) else None
    return value if isinstance(value, int) and value >= 0 else 0


def _first_model(body: bytes) -> str:
    try:
        listed = parse_json(body.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise UnusableReply(f"the list of models is not JSON: {error}") from error
    match listed:
        case {"data": [{"id": str() as name}, *_]}:
            return name
    raise UnusableReply(f"the list of models names none: {str(listed)[:80]}")


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"

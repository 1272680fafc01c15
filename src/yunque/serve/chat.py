"""``POST /v1/chat/completions``: OpenAI's chat completions."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from yunque.protocol.errors import RequestError
from yunque.protocol.generation import Constraint, Finish, JsonConstraint, RegexConstraint
from yunque.protocol.http_errors import engine_failed
from yunque.protocol.openai import ChatCompletionRequest, dump, messages_of, output_of, refuse, tools_of
from yunque.protocol.openai_replies import ReplyHead, chat_logprobs, chat_message, token_fields, usage_body
from yunque.protocol.sampling_fields import structured
from yunque.protocol.sse import DONE, encode_event
from yunque.protocol.vllm import SESSION_HEADER
from yunque.serve.answers import JsonResponse, StrictJsonRoute
from yunque.serve.context import ServeContext
from yunque.serve.conversation import (
    CallStart,
    ChatTurn,
    FinishedTurn,
    PreparedTurn,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolChoice,
    TurnEnd,
    TurnEvent,
    TurnStep,
)
from yunque.serve.replies import Replies, ReplyEvents
from yunque.serve.streaming import EventStream, until_client_leaves


def chat_routes(context: ServeContext) -> APIRouter:
    """The route, for one server."""
    router = APIRouter(route_class=StrictJsonRoute, tags=["OpenAI"])

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        model = context.model(body.model)
        chat = chat_turn(body, context, session=request.headers.get(SESSION_HEADER))
        turn = await context.conversations.prepare(chat)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        start = partial(context.conversations.start, turn, request_id=request_id)
        replies = await Replies.start(partial(start, choice=choice) for choice in range(body.num_choices))
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        writer = _Writer(body, turn, ReplyHead(request_id, model, int(time.time()), kind), context)
        leave = context.metrics.client_left
        if body.stream:
            events = ReplyEvents(replies, writer.stream)
            return EventStream(events, ping_interval_s=context.settings.ping_interval_s, on_leave=leave)
        try:
            turns = await until_client_leaves(request.receive, replies.collect(), on_leave=leave)
        finally:
            await replies.aclose()
        return JsonResponse(writer.whole(turns))

    return router


def chat_turn(body: ChatCompletionRequest, context: ServeContext, *, session: str | None) -> ChatTurn:
    """What a request asks for. Raises ``RequestError``."""
    refuse(body)
    return ChatTurn(
        messages=messages_of(body.messages),
        tools=tools_of(body.tools),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        output=_output(body),
        template=body.template_options(enable_thinking=context.settings.enable_thinking),
        sampling=body.params(
            max_new_tokens=body.max_new_tokens,
            vocab_size=context.service.info.vocab_size,
            num_top=body.num_top,
        ),
        session=session or body.prompt_cache_key,
        priority=-(body.priority or 0),
        cache_salt=body.cache_salt,
        resumed=body.resumed(vocab_size=context.service.info.vocab_size, num_replies=body.num_choices),
    )


def _output(body: ChatCompletionRequest) -> JsonConstraint | RegexConstraint | None:
    asked: Constraint | None = output_of(body.response_format) or structured(body.structured_outputs)
    assert asked is None or isinstance(asked, JsonConstraint | RegexConstraint)
    return asked


def _tool_choice(choice: str | Mapping[str, Any] | None) -> ToolChoice:
    match choice:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "required":
            return ToolChoice("required")
        case {"type": "function", "function": {"name": str() as name}}:
            return ToolChoice("named", name)
    raise RequestError(
        f"tool_choice is {str(choice)[:80]!r}; valid: none, auto, required, "
        '{"type": "function", "function": {"name": NAME}}',
        param="tool_choice",
    )


class _Writer:
    """Writes the replies to one request, whole or as chunks."""

    def __init__(self, body: ChatCompletionRequest, turn: PreparedTurn, head: ReplyHead, context: ServeContext) -> None:
        self._body = body
        self._turn = turn
        self._head = head
        self._token_bytes = context.token_bytes

    def whole(self, turns: list[FinishedTurn]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": chat_message(turn.content, turn.reasoning, turn.tool_calls),
                "finish_reason": turn.end.reason,
                "stop_reason": turn.end.stop_reason,
                "logprobs": self._logprobs(turn.deltas),
                **(token_fields(turn.deltas, turn.resumed) if self._body.return_token_ids else {}),
            }
            for index, turn in enumerate(turns)
        ]
        usage = _usage([turn.end for turn in turns])
        return self._head.body(choices, usage=usage, prompt_token_ids=self._prompt_ids())

    async def stream(self, replies: Replies) -> AsyncIterator[bytes]:
        """One chunk per engine step that shows something, then the reason, the usage if asked for, and ``[DONE]``."""
        for index in range(self._body.num_choices):
            opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield self._chunk(opening, prompt_token_ids=self._prompt_ids())
        ends: dict[int, TurnEnd] = {}
        async for index, step in replies:
            if step.end is not None and step.end.finish is Finish.ERROR:
                yield encode_event(dump(engine_failed(step.delta.error).openai_body()))
                return
            shown = self._step(index, step)
            if shown is not None:
                yield self._chunk(shown)
            if step.end is not None:
                ends[index] = step.end
                yield self._chunk(
                    {
                        "index": index,
                        "delta": {},
                        "finish_reason": step.end.reason,
                        "stop_reason": step.end.stop_reason,
                    }
                )
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            usage = _usage([ends[index] for index in sorted(ends)])
            yield encode_event(dump(self._head.body([], usage=usage)))
        yield encode_event(DONE)

    def _step(self, index: int, step: TurnStep) -> dict[str, Any] | None:
        delta = chat_delta(step.events)
        has_tokens = bool(step.resumed or step.delta.tokens) and bool(
            self._body.return_token_ids or self._body.logprobs
        )
        if not delta and not has_tokens:
            return None
        return {
            "index": index,
            "delta": delta,
            "finish_reason": None,
            "logprobs": self._logprobs((step.delta,)),
            **(token_fields((step.delta,), step.resumed) if self._body.return_token_ids else {}),
        }

    def _chunk(self, choice: Mapping[str, Any], **fields: Any) -> bytes:
        return encode_event(dump(self._head.body([choice], **fields)))

    def _logprobs(self, deltas: Any) -> dict[str, Any] | None:
        return chat_logprobs(deltas, self._token_bytes) if self._body.logprobs else None

    def _prompt_ids(self) -> list[int] | None:
        return list(self._turn.prompt) if self._body.return_token_ids else None


def chat_delta(events: tuple[TurnEvent, ...]) -> dict[str, Any]:
    """The ``delta`` of a chunk; the pieces of one call are one entry of ``tool_calls``, known by its ``index``."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case ReasoningDelta(text):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case TextDelta(text):
                delta["content"] = delta.get("content", "") + text
            case CallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case ToolCallDelta(index, arguments):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += arguments
            case _:
                pass
    return delta | ({"tool_calls": list(calls.values())} if calls else {})


def _usage(ends: list[TurnEnd]) -> dict[str, Any]:
    """The prompt counts once, however many choices were made of it."""
    usages = [end.usage for end in ends]
    return usage_body(
        usages[0].prompt_tokens,
        sum(usage.completion_tokens for usage in usages),
        cached=usages[0].cached_tokens,
        reasoning=sum(usage.reasoning_tokens for usage in usages),
        drafted=sum(end.drafted for end in ends),
        accepted=sum(end.accepted for end in ends),
    )

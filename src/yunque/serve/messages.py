"""Anthropic's Messages API: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response

from yunque.protocol.anthropic import (
    CountTokensRequest,
    MessagesRequest,
    ToolChoiceParam,
    read_messages,
    read_output,
    read_sampling,
    read_template,
    read_tools,
)
from yunque.protocol.anthropic_reply import PING, ReplyBuilder, StopReason, usage
from yunque.protocol.errors import ContextLengthExceeded
from yunque.protocol.http_errors import HttpProblem
from yunque.protocol.vllm import SESSION_HEADER
from yunque.serve.answers import JsonResponse, StrictJsonRoute
from yunque.serve.context import ServeContext
from yunque.serve.conversation import ChatTurn, ToolChoice, TurnEnd
from yunque.serve.replies import Replies, ReplyEvents
from yunque.serve.reply_events import WireEvent, complete, streamed
from yunque.serve.streaming import EventStream, until_client_leaves


def message_routes(context: ServeContext) -> APIRouter:
    """The routes, for one server."""
    router = APIRouter(route_class=StrictJsonRoute, tags=["Anthropic"])
    enable_thinking = context.settings.enable_thinking

    @router.post("/v1/messages", summary="Answer a conversation")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        model = context.model(body.model)
        session = request.headers.get(SESSION_HEADER)
        message_id = f"msg_{uuid.uuid4().hex}"
        with _named_for_clients():
            turn = await context.conversations.prepare(message_turn(body, enable_thinking, session=session))
            replies = await Replies.start([partial(context.conversations.start, turn, request_id=message_id)])
        eager = [tool.name for tool in body.tools or () if tool.eager_input_streaming]
        reply = _Reply(ReplyBuilder(message_id, model, eager_tools=eager), len(turn.prompt))
        leave = context.metrics.client_left
        if body.stream:
            events = ReplyEvents(replies, partial(streamed, dialect=reply))
            return EventStream(events, ping_interval_s=context.settings.ping_interval_s, on_leave=leave)
        try:
            await until_client_leaves(request.receive, complete(replies, reply), on_leave=leave)
        finally:
            await replies.aclose()
        return JsonResponse(reply.writer.whole)

    @router.post("/v1/messages/count_tokens", summary="Count a conversation's tokens")
    async def count_tokens(body: CountTokensRequest) -> Response:
        context.model(body.model)
        with _named_for_clients():
            turn = await context.conversations.prepare(message_turn(body, enable_thinking))
        return JsonResponse({"input_tokens": len(turn.prompt)})

    return router


def message_turn(body: CountTokensRequest, enable_thinking: bool, *, session: str | None = None) -> ChatTurn:
    """What a request asks for; ``enable_thinking`` where it does not say. Raises ``RequestError``."""
    chat = ChatTurn(
        messages=read_messages(body),
        tools=read_tools(body),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        output=read_output(body),
        template=read_template(body, enable_thinking=enable_thinking),
        session=session,
    )
    if not isinstance(body, MessagesRequest):
        return chat
    user = body.metadata.user_id if body.metadata is not None else None
    return replace(chat, sampling=read_sampling(body), session=session or user)


def _tool_choice(choice: ToolChoiceParam | None) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "tool":
        return ToolChoice("named", choice.name)
    return ToolChoice("required" if choice.type == "any" else "none")


@contextlib.contextmanager
def _named_for_clients() -> Iterator[None]:
    """Anthropic's clients know a prompt that does not fit by these words; they compact it and go on."""
    try:
        yield
    except ContextLengthExceeded as error:
        raise ContextLengthExceeded(f"prompt is too long: {error}", param=error.param) from error


class _Reply:
    """Begins and ends one message."""

    def __init__(self, writer: ReplyBuilder, prompt_tokens: int) -> None:
        self.writer = writer
        self._prompt_tokens = prompt_tokens

    def begin(self) -> list[WireEvent]:
        """The message starts with its counts: they are not known yet."""
        return []

    def open(self, cached_tokens: int) -> list[WireEvent]:
        counts = usage(
            prompt_tokens=self._prompt_tokens, cached_tokens=cached_tokens, output_tokens=0, thinking_tokens=0
        )
        return [*self.writer.start(counts), PING]

    def close(self, end: TurnEnd) -> list[WireEvent]:
        counts = usage(
            prompt_tokens=end.usage.prompt_tokens,
            cached_tokens=end.usage.cached_tokens,
            output_tokens=end.usage.completion_tokens,
            thinking_tokens=end.usage.reasoning_tokens,
        )
        reason = _stop_reason(end)
        return self.writer.end(reason, end.stop_string if reason == "stop_sequence" else None, counts)

    def fail(self, found: HttpProblem) -> list[WireEvent]:
        return [found.anthropic_body()]


def _stop_reason(end: TurnEnd) -> StopReason:
    if end.reason == "tool_calls":
        return "tool_use"
    if end.reason == "length":
        return "max_tokens"
    return "end_turn" if end.stop_string is None else "stop_sequence"

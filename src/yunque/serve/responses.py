"""``POST /v1/responses``: OpenAI's Responses API, without anything kept between requests."""

import time
import uuid
from functools import partial

from fastapi import APIRouter, Request, Response

from yunque.protocol.errors import RequestError
from yunque.protocol.http_errors import HttpProblem
from yunque.protocol.responses import (
    ResponsesRequest,
    ToolChoiceParam,
    read_messages,
    read_output,
    read_sampling,
    read_template,
    read_tools,
    refuse_stateful,
)
from yunque.protocol.responses_reply import ResponseBuilder, envelope, usage
from yunque.protocol.vllm import SESSION_HEADER
from yunque.serve.answers import JsonResponse, StrictJsonRoute
from yunque.serve.context import ServeContext
from yunque.serve.conversation import ChatTurn, ToolChoice, TurnEnd
from yunque.serve.replies import Replies, ReplyEvents
from yunque.serve.reply_events import WireEvent, complete, streamed
from yunque.serve.streaming import EventStream, until_client_leaves


def response_routes(context: ServeContext) -> APIRouter:
    """The route, for one server."""
    router = APIRouter(route_class=StrictJsonRoute, tags=["OpenAI"])

    @router.post("/v1/responses", summary="Answer a conversation of items")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        model = context.model(body.model)
        session = request.headers.get(SESSION_HEADER)
        turn = await context.conversations.prepare(
            response_turn(body, context.settings.enable_thinking, session=session)
        )
        response_id = f"resp_{uuid.uuid4().hex}"
        replies = await Replies.start([partial(context.conversations.start, turn, request_id=response_id)])
        head = envelope(body, model=model, response_id=response_id, created_at_s=int(time.time()))
        wants_summary = body.reasoning is not None and body.reasoning.summary is not None
        reply = _Reply(ResponseBuilder(head, thought_as_summary=wants_summary))
        leave = context.metrics.client_left
        if body.stream:
            events = ReplyEvents(replies, partial(streamed, dialect=reply))
            return EventStream(events, ping_interval_s=context.settings.ping_interval_s, on_leave=leave)
        try:
            await until_client_leaves(request.receive, complete(replies, reply), on_leave=leave)
        finally:
            await replies.aclose()
        return JsonResponse(reply.writer.whole)

    return router


def response_turn(body: ResponsesRequest, enable_thinking: bool, *, session: str | None = None) -> ChatTurn:
    """What a request asks for; ``enable_thinking`` where it does not say. Raises ``RequestError``."""
    refuse_stateful(body)
    return ChatTurn(
        messages=read_messages(body),
        tools=read_tools(body),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        output=read_output(body),
        template=read_template(body, enable_thinking=enable_thinking),
        sampling=read_sampling(body),
        session=session or body.prompt_cache_key,
        cache_salt=body.cache_salt,
    )


def _tool_choice(choice: str | ToolChoiceParam | None) -> ToolChoice:
    match choice:
        case None | "auto" | ToolChoiceParam(type="allowed_tools", mode="auto"):
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "required" | ToolChoiceParam(type="allowed_tools", mode="required"):
            return ToolChoice("required")
        case ToolChoiceParam(type="function", name=str() as name):
            return ToolChoice("named", name)
    kind = choice if isinstance(choice, str) else choice.type
    raise RequestError(
        f"tool_choice of type {kind!r} is not supported; valid: none, auto, required, function, allowed_tools",
        param="tool_choice",
    )


class _Reply:
    """Begins and ends one response."""

    def __init__(self, writer: ResponseBuilder) -> None:
        self.writer = writer

    def begin(self) -> list[WireEvent]:
        return self.writer.start()

    def open(self, cached_tokens: int) -> list[WireEvent]:  # noqa: ARG002 - the counts stand at the end
        return []

    def close(self, end: TurnEnd) -> list[WireEvent]:
        counts = usage(
            prompt_tokens=end.usage.prompt_tokens,
            cached_tokens=end.usage.cached_tokens,
            output_tokens=end.usage.completion_tokens,
            reasoning_tokens=end.usage.reasoning_tokens,
        )
        return self.writer.end(counts, is_cut=end.reason == "length")

    def fail(self, found: HttpProblem) -> list[WireEvent]:
        return self.writer.fail(found.message)

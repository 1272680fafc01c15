"""``POST /v1/completions``: OpenAI's completions, of text or of token ids."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from yunque.protocol.errors import RequestError
from yunque.protocol.generation import Finish, SamplingParams, TopToken
from yunque.protocol.http_errors import engine_failed
from yunque.protocol.openai import CompletionRequest, dump, prompts_of, refuse
from yunque.protocol.openai_replies import ReplyHead, text_logprobs, token_fields, usage_body
from yunque.protocol.sampling_fields import MAX_CHOICES
from yunque.protocol.sse import DONE, encode_event
from yunque.protocol.vllm import SESSION_HEADER
from yunque.serve.answers import JsonResponse, StrictJsonRoute
from yunque.serve.context import ServeContext
from yunque.serve.conversation import FinishedTurn, TextDelta, TurnStep, Usage
from yunque.serve.plain import PlainPrompt, start_plain
from yunque.serve.replies import Replies, ReplyEvents
from yunque.serve.streaming import EventStream, until_client_leaves


def completion_routes(context: ServeContext) -> APIRouter:
    """The route, for one server."""
    router = APIRouter(route_class=StrictJsonRoute, tags=["OpenAI"])

    @router.post("/v1/completions", summary="Continue a text or token ids")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        asked = await _read(body, context, session=request.headers.get(SESSION_HEADER))
        request_id = f"cmpl-{uuid.uuid4().hex}"
        starts = [
            partial(start_plain, context, prompt, asked.sampling, request_id=f"{request_id}-{i}", choice=choice)
            for i, prompt in enumerate(asked.prompts)
            for choice in range(body.num_choices)
        ]
        replies = await Replies.start(starts)
        writer = _Writer(asked, ReplyHead(request_id, context.model(body.model), int(time.time()), "text_completion"))
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


@dataclass(frozen=True)
class _Asked:
    """A request that was read: its prompts as ids, with the text that ``echo`` shows."""

    body: CompletionRequest
    context: ServeContext
    prompts: tuple[PlainPrompt, ...]
    sampling: SamplingParams

    def prompt(self, index: int) -> PlainPrompt:
        """The prompt of the ``index``-th choice."""
        return self.prompts[index // self.body.num_choices]

    @property
    def shows_reply(self) -> bool:
        """``max_tokens`` 0 asks for the prompt alone: one token is made, and not shown."""
        return self.body.max_tokens != 0


async def _read(body: CompletionRequest, context: ServeContext, *, session: str | None) -> _Asked:
    context.model(body.model)
    refuse(body)
    if body.suffix:
        raise RequestError("suffix is not supported: these models were not trained to fill in", param="suffix")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens is 0; it must be at least 1 unless echo is set", param="max_tokens")
    vocab_size = context.service.info.vocab_size
    given = prompts_of(body.prompt, vocab_size=vocab_size)
    if len(given) * body.num_choices > MAX_CHOICES:
        raise RequestError(f"{len(given)} prompts times n {body.num_choices} exceed {MAX_CHOICES}", param="prompt")
    resumed = body.resumed(vocab_size=vocab_size, num_replies=len(given) * body.num_choices)
    if resumed and body.echo:
        raise RequestError("echo and resume_token_ids exclude each other", param="resume_token_ids")
    sampling = body.params(
        max_new_tokens=None if body.max_tokens is None else max(body.max_tokens, 1),
        vocab_size=vocab_size,
        eos_ids=context.renderer.tokenizer.special.eos_ids,
        num_top=body.logprobs or 0,
    )
    if sampling.constraint is not None:
        await context.service.prepare(sampling.constraint)
    plan = PlainPrompt(
        (),
        session=session or body.prompt_cache_key,
        priority=-(body.priority or 0),
        logprobs=bool(body.echo) and body.logprobs is not None,
        cache_salt=body.cache_salt,
        resumed=resumed,
    )
    prompts = []
    for prompt in given:
        tokens = await context.encode_prompt(prompt, param="prompt") if isinstance(prompt, str) else prompt
        prompts.append(replace(plan, tokens=tokens))
    return _Asked(body, context, tuple(prompts), sampling)


class _Writer:
    """Writes the replies to one request, whole or as chunks. The log-probabilities are those of the model's own
    distribution."""

    def __init__(self, asked: _Asked, head: ReplyHead) -> None:
        self._asked = asked
        self._body = asked.body
        self._head = head
        self._tokenizer = asked.context.renderer.tokenizer

    def whole(self, turns: list[FinishedTurn]) -> dict[str, Any]:
        choices = []
        for index, turn in enumerate(turns):
            step = TurnStep(turn.deltas[0], ())
            echo = self._echo(index, step) if self._body.echo else None
            offset = len(echo["text"]) if echo else 0
            body = self._choice(index, turn.content, turn.deltas, offset, turn.resumed)
            choice = _joined(echo, body) if echo else body
            finish = {"finish_reason": turn.end.reason, "stop_reason": turn.end.stop_reason}
            choices.append(choice | finish | self._prompt_ids(index))
        return self._head.body(choices, usage=self._usage({i: turn.end.usage for i, turn in enumerate(turns)}))

    async def stream(self, replies: Replies) -> AsyncIterator[bytes]:
        """One chunk per engine step that shows something; an echoed prompt comes with the first."""
        usages: dict[int, Usage] = {}
        offsets: dict[int, int] = {}
        async for index, step in replies:
            if step.end is not None and step.end.finish is Finish.ERROR:
                yield encode_event(dump(engine_failed(step.delta.error).openai_body()))
                return
            if index not in offsets:
                offsets[index] = 0
                if self._body.echo:
                    echo = self._echo(index, step)
                    offsets[index] = len(echo["text"])
                    yield self._chunk(echo | self._prompt_ids(index))
                elif self._body.return_token_ids:
                    yield self._chunk(self._choice(index, "", (), 0) | self._prompt_ids(index))
            text = "".join(event.text for event in step.events if isinstance(event, TextDelta))
            finish = {} if step.end is None else {"stop_reason": step.end.stop_reason}
            finish |= {"finish_reason": None if step.end is None else step.end.reason}
            if text or step.end is not None or self._body.logprobs is not None or self._body.return_token_ids:
                yield self._chunk(self._choice(index, text, (step.delta,), offsets[index], step.resumed) | finish)
            offsets[index] += len(text)
            if step.end is not None:
                usages[index] = step.end.usage
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield encode_event(dump(self._head.body([], usage=self._usage(usages))))
        yield encode_event(DONE)

    def _choice(
        self, index: int, text: str, deltas: Sequence[Any], offset: int, resumed: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        offset += len(self._tokenizer.decode(resumed))
        if not self._asked.shows_reply:
            text, deltas = "", ()
        tokens = [token for delta in deltas for token in delta.tokens]
        logprobs = [value for delta in deltas for value in delta.model_logprobs]
        tops: list[Sequence[TopToken]] = [top for delta in deltas for top in delta.top] or [()] * len(tokens)
        return {
            "index": index,
            "text": text,
            "finish_reason": None,
            "logprobs": self._logprobs(tokens, logprobs, tops, offset),
            **(token_fields(deltas, resumed) if self._body.return_token_ids else {}),
        }

    def _echo(self, index: int, first: TurnStep) -> dict[str, Any]:
        """The prompt as the beginning of a choice; its first token has no log-probability, and no place has best
        tokens."""
        tokens = self._asked.prompt(index).tokens
        logprobs = [None, *(first.delta.prompt_logprobs or [None] * (len(tokens) - 1))]
        return {
            "index": index,
            "text": self._tokenizer.decode(tokens),
            "finish_reason": None,
            "logprobs": self._logprobs(tokens, logprobs, [None] * len(tokens), 0),
        }

    def _logprobs(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Sequence[TopToken] | None],
        offset: int,
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        return text_logprobs(tokens, logprobs, tops, token_bytes=self._asked.context.token_bytes, offset=offset)

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._asked.prompt(index).tokens)} if self._body.return_token_ids else {}

    def _chunk(self, choice: Mapping[str, Any]) -> bytes:
        return encode_event(dump(self._head.body([choice])))

    def _usage(self, usages: Mapping[int, Usage]) -> dict[str, Any]:
        """Each prompt counts once, however many choices were made of it."""
        firsts = [usage for index, usage in usages.items() if index % self._body.num_choices == 0]
        made = sum(usage.completion_tokens for usage in usages.values()) if self._asked.shows_reply else 0
        return usage_body(
            sum(usage.prompt_tokens for usage in firsts),
            made,
            cached=sum(usage.cached_tokens for usage in firsts),
        )


def _joined(echo: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """A choice that begins with its prompt."""
    joined = {**body, "text": echo["text"] + body["text"]}
    if body["logprobs"] is not None:
        joined["logprobs"] = {key: echo["logprobs"][key] + value for key, value in body["logprobs"].items()}
    return joined

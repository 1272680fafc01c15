"""Token endpoints in the shapes of SGLang (``/generate``) and vLLM (``/inference/v1/generate``).

Their log-probabilities are those of the distribution that each token was drawn from (the behaviour policy's, after
temperature, penalties and kept sets): what a trainer needs. Chat and completions report the model's own distribution.
"""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from yunque.protocol.errors import RequestError
from yunque.protocol.generation import Finish, TokenDelta
from yunque.protocol.http_errors import engine_failed
from yunque.protocol.openai import dump
from yunque.protocol.openai_replies import usage_body
from yunque.protocol.sampling_fields import MAX_CHOICES, token_ids
from yunque.protocol.sglang import (
    SglangGenerateRequest,
    SglangSampling,
    sglang_finish,
    sglang_logprobs,
    sglang_prompt_logprobs,
)
from yunque.protocol.sse import DONE, encode_event
from yunque.protocol.vllm import SESSION_HEADER, VllmGenerateRequest, prompt_logprobs, vllm_choice
from yunque.serve.answers import JsonResponse, StrictJsonRoute
from yunque.serve.context import ServeContext
from yunque.serve.conversation import FinishedTurn, TextDelta, TurnEnd
from yunque.serve.plain import PlainPrompt, start_plain
from yunque.serve.replies import Replies, ReplyEvents
from yunque.serve.streaming import EventStream, until_client_leaves

_VLLM_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}


def token_routes(context: ServeContext) -> APIRouter:
    """Both routes, for one server."""
    router = APIRouter(route_class=StrictJsonRoute, tags=["tokens"])

    @router.post("/generate", summary="SGLang's token endpoint")
    async def generate(body: SglangGenerateRequest, request: Request) -> Response:
        asked = await _SglangReply.read(body, context, session=request.headers.get(SESSION_HEADER))
        return await _answer(asked, body.stream, context, request)

    @router.post("/inference/v1/generate", summary="vLLM's token endpoint")
    async def inference_generate(body: VllmGenerateRequest, request: Request) -> Response:
        context.model(body.model)
        asked = _VllmReply(body, context, session=request.headers.get(SESSION_HEADER))
        return await _answer(asked, body.stream, context, request)

    return router


async def _answer(
    asked: "_SglangReply | _VllmReply", stream: bool | None, context: ServeContext, request: Request
) -> Response:
    replies = await asked.start()
    leave = context.metrics.client_left
    if stream:
        events = ReplyEvents(replies, asked.stream)
        return EventStream(events, ping_interval_s=context.settings.ping_interval_s, on_leave=leave)
    try:
        turns = await until_client_leaves(request.receive, replies.collect(), on_leave=leave)
    finally:
        await replies.aclose()
    return JsonResponse(asked.whole(turns))


class _VllmReply:
    """One ``/inference/v1/generate`` request that was read, and the answers to it. Raises ``RequestError``."""

    def __init__(self, body: VllmGenerateRequest, context: ServeContext, *, session: str | None) -> None:
        self._body = body
        self._context = context
        self._fields = body.sampling_params
        vocab_size, fields = context.service.info.vocab_size, self._fields
        self._prompt = PlainPrompt(
            token_ids(body.token_ids, param="token_ids", vocab_size=vocab_size),
            session=session,
            priority=-(body.priority or 0),
            logprobs=fields.prompt_logprobs is not None,
            cache_salt=body.cache_salt,
            resumed=body.resumed(vocab_size=vocab_size, num_replies=fields.num_choices),
            shows_resumed=False,
        )
        params = fields.params(
            max_new_tokens=fields.max_tokens,
            vocab_size=vocab_size,
            eos_ids=context.renderer.tokenizer.special.eos_ids,
            num_top=fields.logprobs if fields.logprobs and fields.logprobs > 1 else 0,
        )
        self._params = replace(params, record_kept=bool(fields.record_kept))
        self._id = body.request_id or f"generate-{uuid.uuid4().hex}"

    async def start(self) -> Replies:
        """Submit the prompt as often as there are choices."""
        if self._params.constraint is not None:
            await self._context.service.prepare(self._params.constraint)
        start = partial(start_plain, self._context, self._prompt, self._params, request_id=self._id)
        return await Replies.start(partial(start, choice=choice) for choice in range(self._fields.num_choices))

    def whole(self, turns: list[FinishedTurn]) -> dict[str, Any]:
        choices = [self._choice(index, turn.deltas, turn.end) for index, turn in enumerate(turns)]
        return self._body_of(choices, turns[0].deltas) | {"usage": self._usage([turn.end for turn in turns])}

    async def stream(self, replies: Replies) -> AsyncIterator[bytes]:
        """One event per step, with what is new; the first of each choice has what is said of the prompt."""
        ends: dict[int, TurnEnd] = {}
        begun: set[int] = set()
        async for index, step in replies:
            if step.end is not None and step.end.finish is Finish.ERROR:
                yield encode_event(dump(engine_failed(step.delta.error).openai_body()))
                return
            choice = self._choice(index, (step.delta,), step.end)
            if index in begun:
                yield encode_event(dump({"request_id": self._id, "choices": [choice]}))
            else:
                yield encode_event(dump(self._body_of([choice], (step.delta,))))
            begun.add(index)
            if step.end is not None:
                ends[index] = step.end
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            usage = self._usage([ends[index] for index in sorted(ends)])
            yield encode_event(dump({"request_id": self._id, "choices": [], "usage": usage}))
        yield encode_event(DONE)

    def _choice(self, index: int, deltas: Sequence[TokenDelta], end: TurnEnd | None) -> dict[str, Any]:
        reason = None if end is None else _VLLM_REASONS.get(end.finish, "abort")
        fields = self._fields
        return vllm_choice(index, deltas, reason, logprobs=fields.logprobs is not None, kept=bool(fields.record_kept))

    def _body_of(self, choices: list[dict[str, Any]], deltas: Sequence[TokenDelta]) -> dict[str, Any]:
        tokens = self._prompt.tokens
        of_prompt = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None)
        told = {"prompt_logprobs": None if of_prompt is None else prompt_logprobs(tokens, of_prompt)}
        told |= {"prompt_token_ids": list(tokens)} if self._body.return_token_ids else {}
        return {"request_id": self._id, "choices": choices, **told}

    def _usage(self, ends: list[TurnEnd]) -> dict[str, Any]:
        made = sum(end.usage.completion_tokens for end in ends)
        return usage_body(len(self._prompt.tokens), made, cached=ends[0].usage.cached_tokens)


@dataclass
class _Told:
    """What was made of one reply so far, and told to whom every event repeats it."""

    text: str = ""
    deltas: list[TokenDelta] = field(default_factory=list)
    num_tokens: int = 0
    cached_tokens: int = 0


class _SglangReply:
    """One ``/generate`` request that was read, and the answers to it."""

    def __init__(self, body: SglangGenerateRequest, context: ServeContext, prompts: tuple[PlainPrompt, ...]) -> None:
        self._body = body
        self._context = context
        self._prompts = prompts
        self._fields = body.sampling_params or SglangSampling()
        self._num_choices = self._fields.n or 1
        self._num_top = (body.top_logprobs_num or 0) if body.return_logprob else 0
        self._begin_s = time.monotonic()
        self._ids = self._request_ids()

    @staticmethod
    async def read(body: SglangGenerateRequest, context: ServeContext, *, session: str | None) -> "_SglangReply":
        """Check a request and encode its texts."""
        wants_prompt = bool(body.return_logprob) and body.logprob_start_len not in (None, -1)
        vocab_size = context.service.info.vocab_size
        texts = body.prompts(vocab_size=vocab_size)
        num_replies = len(texts) * ((body.sampling_params and body.sampling_params.n) or 1)
        plan = PlainPrompt(
            (),
            session=session,
            priority=body.priority or 0,
            logprobs=wants_prompt,
            cache_salt=body.cache_salt,
            resumed=body.resumed(vocab_size=vocab_size, num_replies=num_replies),
            shows_resumed=False,
        )
        prompts = []
        for given in texts:
            tokens = await context.encode_prompt(given, param="text") if isinstance(given, str) else given
            prompts.append(replace(plan, tokens=tokens))
        asked = _SglangReply(body, context, tuple(prompts))
        if len(prompts) * asked._num_choices > MAX_CHOICES:
            raise RequestError(f"{len(prompts)} prompts times n {asked._num_choices} exceed {MAX_CHOICES}", param="n")
        return asked

    async def start(self) -> Replies:
        """Submit every prompt as often as there are choices."""
        params = self._fields.params(
            vocab_size=self._context.service.info.vocab_size,
            eos_ids=self._context.renderer.tokenizer.special.eos_ids,
            num_top=self._num_top,
        )
        if params.constraint is not None:
            await self._context.service.prepare(params.constraint)
        has_special = self._fields.skip_special_tokens is False
        return await Replies.start(
            partial(
                start_plain,
                self._context,
                prompt,
                params,
                request_id=request_id,
                choice=choice,
                has_special=has_special,
            )
            for prompt, request_id in zip(self._prompts, self._ids, strict=True)
            for choice in range(self._num_choices)
        )

    def whole(self, turns: list[FinishedTurn]) -> Any:
        """The answer: a list where a list was given, or where n is above 1."""
        told = [
            _Told(t.content, list(t.deltas), t.end.usage.completion_tokens, t.end.usage.cached_tokens) for t in turns
        ]
        bodies = [self._reply(index, one) for index, one in enumerate(told)]
        return bodies if self._is_list else bodies[0]

    async def stream(self, replies: Replies) -> AsyncIterator[bytes]:
        """One event per step; text, ids and log-probabilities are those from the beginning on, as SGLang sends them,
        or with ``incremental_streaming_output`` those that are new."""
        told: dict[int, _Told] = {}
        async for index, step in replies:
            if step.end is not None and step.end.finish is Finish.ERROR:
                yield encode_event(dump(engine_failed(step.delta.error).openai_body()))
                return
            one = told.setdefault(index, _Told())
            if self._body.incremental_streaming_output:
                one.text, one.deltas = "", []
            one.text += "".join(event.text for event in step.events if isinstance(event, TextDelta))
            one.deltas.append(step.delta)
            one.num_tokens += len(step.delta.tokens)
            one.cached_tokens = max(one.cached_tokens, step.delta.cached_tokens or 0)
            yield encode_event(dump(self._reply(index, one) | ({"index": index} if self._is_list else {})))
        yield encode_event(DONE)

    @property
    def _is_list(self) -> bool:
        return self._body.is_batch or self._num_choices > 1

    def _request_ids(self) -> list[str]:
        rid = self._body.rid
        if isinstance(rid, list):
            if len(rid) != len(self._prompts) or len(set(rid)) != len(rid):
                raise RequestError(f"rid needs {len(self._prompts)} different ids", param="rid")
            return rid
        rid = rid or uuid.uuid4().hex
        return [f"{rid}_{i}" for i in range(len(self._prompts))] if self._body.is_batch else [rid]

    def _reply(self, index: int, told: _Told) -> dict[str, Any]:
        prompt = self._prompts[index // self._num_choices]
        deltas, last = told.deltas, told.deltas[-1]
        tokens = [token for delta in deltas for token in delta.tokens]
        versions = [version for delta in deltas for version in delta.versions]
        meta: dict[str, Any] = {
            "id": self._ids[index // self._num_choices],
            "finish_reason": sglang_finish(last.finish, last.stopped_by, len(prompt.resumed) + told.num_tokens),
            "prompt_tokens": len(prompt.tokens),
            "completion_tokens": told.num_tokens,
            "cached_tokens": min(told.cached_tokens, len(prompt.tokens)),
            "weight_version": str(versions[-1] if versions else self._context.service.info.version),
            "weight_versions": versions,
            "e2e_latency": time.monotonic() - self._begin_s,
        }
        if last.drafted:
            meta |= {"spec_draft_token_num": last.drafted, "spec_accept_token_num": last.accepted}
        if self._fields.record_kept:
            meta["output_kept_tokens"] = [
                None if kept is None else list(kept) for delta in deltas for kept in delta.kept
            ]
        if self._body.return_logprob:
            meta |= self._logprobs(prompt, deltas)
        return {"text": told.text, "output_ids": tokens, "meta_info": meta}

    def _logprobs(self, prompt: PlainPrompt, deltas: list[TokenDelta]) -> dict[str, Any]:
        tokenizer = self._context.renderer.tokenizer
        text_of = (lambda token: tokenizer.decode([token])) if self._body.return_text_in_logprobs else None
        found = sglang_logprobs(deltas, num_top=self._num_top, text_of=text_of)
        of_prompt = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None)
        found["input_token_logprobs"] = []
        if prompt.logprobs and (of_prompt is not None or len(prompt.tokens) == 1):
            start = max(self._body.logprob_start_len or 0, 0)
            found["input_token_logprobs"] = sglang_prompt_logprobs(
                prompt.tokens, of_prompt or (), start=start, text_of=text_of
            )
        return found

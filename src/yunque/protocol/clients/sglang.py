"""The policy client of SGLang's ``POST /generate``."""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from yunque.core.errors import YunqueError
from yunque.protocol.clients.problems import error_from
from yunque.protocol.clients.replies import (
    Count,
    Logprob,
    ReplyModel,
    TokenId,
    best_first,
    cuts_of,
    is_idempotent,
    read_reply,
    refuse,
    refuse_other_scoring,
    require_equal,
    unclamped,
)
from yunque.protocol.clients.settings import HttpSettings
from yunque.protocol.clients.transport import JsonTransport
from yunque.protocol.errors import UnusableReply
from yunque.protocol.generation import Completion, Finish, JsonConstraint, RegexConstraint, SamplingParams
from yunque.protocol.vllm import SESSION_HEADER

ROUTER_SESSION_HEADER = "X-SMG-Routing-Key"
"""What SGLang's router hashes by."""
PATH = "/generate"
_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}
_ABORTS = {"aborted": Finish.ABORTED}
Triple = tuple[Logprob, TokenId, str | None]


class FinishReason(ReplyModel):
    """``{"type": "stop", "matched": id or text}``, ``length``, or ``abort`` with a message and maybe a status."""

    type: str
    matched: TokenId | str | None = None
    message: str | None = None
    status_code: int | None = None


class MetaInfo(ReplyModel):
    """``meta_info``. The last four are our own server's, of which SGLang has the first two when it speculates."""

    finish_reason: FinishReason
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0
    weight_version: str | int | None = None
    output_token_logprobs: list[Triple] = Field(default_factory=list)
    output_top_logprobs: list[list[tuple[Logprob | None, TokenId, str | None]] | None] | None = None
    input_token_logprobs: list[tuple[Logprob | None, TokenId, str | None]] | None = None
    spec_draft_token_num: Count = 0
    spec_accept_token_num: Count = 0
    weight_versions: list[int] | None = None
    output_kept_tokens: list[list[TokenId] | None] | None = None


class GenerateReply(ReplyModel):
    """The reply to one prompt."""

    output_ids: list[TokenId] | None = None
    meta_info: MetaInfo


class SGLangClient:
    """``PolicyClient`` over an SGLang server, or its router.

    One version stands for all tokens of a reply: SGLang says only which weights ended it. Its log-probabilities come
    before ``top_k``, ``top_p`` and ``min_p``: with one of these they are not the behaviour policy's, so that such a
    request is refused unless ``allow_inexact_logprobs``. A seed is honoured by servers started with
    ``--enable-deterministic-inference``. Where ``stop_ids`` are given, the model's own end tokens end a reply too.
    """

    def __init__(
        self, base_url: str, settings: HttpSettings | None = None, *, allow_inexact_logprobs: bool = False
    ) -> None:
        self._transport = JsonTransport(base_url, settings)
        self._allows_inexact = allow_inexact_logprobs

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams, session: str | None = None) -> Completion:
        """One reply. Raises ``RequestError``, ``Overloaded``, ``EngineUnavailable``, ``UnusableReply``."""
        self._refuse(sampling)
        body = generate_body(tokens, sglang_fields(sampling), num_top=sampling.num_top)
        headers = {} if session is None else {SESSION_HEADER: session, ROUTER_SESSION_HEADER: session}
        answer = await self._transport.post(PATH, body, headers=headers, is_idempotent=is_idempotent(sampling))
        reply = read_reply(GenerateReply, answer, server="SGLang")
        version = _version(reply.meta_info.weight_version)
        versions = (version,) * reply.meta_info.completion_tokens
        return completion_of(reply, tokens, versions, num_top=sampling.num_top, server="SGLang")

    async def score(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        """Log-probability of every token but the first, under the model's own distribution; others are refused."""
        refuse_other_scoring(sampling, server="SGLang")
        fields = {"max_new_tokens": 0, "temperature": 1.0}
        return await score(self._transport, tokens, fields, server="SGLang")

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    def _refuse(self, sampling: SamplingParams) -> None:
        cut = cuts_of(sampling)
        refuse("record_kept", if_=sampling.record_kept, why="SGLang does not report kept-token sets")
        refuse(
            cut or "",
            if_=cut is not None and not self._allows_inexact,
            why="SGLang reports log-probabilities from before it, which are not those that the tokens were drawn with; "
            "construct the client with allow_inexact_logprobs=True where that does not matter",
        )


def sglang_fields(sampling: SamplingParams) -> dict[str, Any]:
    """``sampling_params`` with every field spelled out, whatever a server's defaults are. ``ignore_eos`` would
    switch ``stop_token_ids`` off too."""
    fields = {
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": sorted(sampling.stop_ids),
        "ignore_eos": not sampling.stop_ids,
        "skip_special_tokens": False,
    }
    optional = {
        "stop": list(sampling.stop),
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "sampling_seed": sampling.seed,
    }
    return fields | {key: value for key, value in optional.items() if value not in ([], {}, None)} | _form(sampling)


def _form(sampling: SamplingParams) -> dict[str, str]:
    match sampling.constraint:
        case None:
            return {}
        case JsonConstraint(schema):
            return {"json_schema": json.dumps(dict(schema) or {"type": "object"})}
        case RegexConstraint(pattern):
            return {"regex": pattern}
    refuse("constraint", if_=True, why="tool calls cannot be constrained over /generate")
    raise AssertionError


def generate_body(
    tokens: Sequence[int], fields: dict[str, Any], *, num_top: int = 0, start: int = -1
) -> dict[str, Any]:
    """The request; ``start`` 0 asks for the prompt's own log-probabilities."""
    return {
        "input_ids": list(tokens),
        "sampling_params": fields,
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": num_top,
        "stream": False,
    }


async def score(
    transport: JsonTransport, tokens: Sequence[int], fields: dict[str, Any], *, server: str
) -> tuple[float, ...]:
    """The prompt's log-probabilities, without those of the first token; every id is checked."""
    answer = await transport.post(PATH, generate_body(tokens, fields, start=0), is_idempotent=True)
    reply = read_reply(GenerateReply, answer, server=server)
    raise_if_failed(reply.meta_info, server=server)
    rows = reply.meta_info.input_token_logprobs or []
    require_equal([token for _, token, _ in rows], list(tokens), "input_token_logprobs", server=server)
    values = [logprob for logprob, _, _ in rows[1:]]
    if any(value is None for value in values):
        raise UnusableReply(f"{server}: input_token_logprobs holds null at {values.index(None) + 1}")
    return tuple(unclamped(value) for value in values if value is not None)


def completion_of(
    reply: GenerateReply, prompt: Sequence[int], versions: Sequence[int], *, num_top: int, server: str
) -> Completion:
    """The reply, once its counts agree."""
    meta = reply.meta_info
    raise_if_failed(meta, server=server)
    tokens = [token for _, token, _ in meta.output_token_logprobs]
    require_equal(len(tokens), meta.completion_tokens, "output_token_logprobs and completion_tokens", server=server)
    require_equal(meta.prompt_tokens, len(prompt), "prompt_tokens and the prompt that was sent", server=server)
    require_equal(len(versions), len(tokens), "versions and tokens", server=server)
    if reply.output_ids is not None:
        require_equal(reply.output_ids, tokens, "output_ids and output_token_logprobs", server=server)
    columns: dict[str, tuple[Any, ...]] = {}
    if num_top:
        tops = meta.output_top_logprobs or []
        require_equal(len(tops), len(tokens), "output_top_logprobs and tokens", server=server)
        pairs = [[(logprob, token) for logprob, token, _ in top or ()] for top in tops]
        columns["top"] = tuple(best_first(place, num_top) for place in pairs)
    if meta.output_kept_tokens is not None:
        require_equal(len(meta.output_kept_tokens), len(tokens), "output_kept_tokens and tokens", server=server)
        columns["kept"] = tuple(None if kept is None else tuple(kept) for kept in meta.output_kept_tokens)
    reason = meta.finish_reason
    return Completion(
        tokens=tuple(tokens),
        logprobs=tuple(logprob for logprob, _, _ in meta.output_token_logprobs),
        versions=tuple(versions),
        finish=_FINISHES.get(reason.type) or _ABORTS.get(reason.message or "", Finish.PARTIAL),
        columns={name: values for name, values in columns.items() if values},
        stopped_by=reason.matched,
        prompt_tokens=meta.prompt_tokens,
        cached_tokens=meta.cached_tokens,
        drafted=meta.spec_draft_token_num,
        accepted=meta.spec_accept_token_num,
    )


def raise_if_failed(meta: MetaInfo, *, server: str) -> None:
    """An ``abort`` with a status is an error that SGLang met too late for an HTTP one; without it, a short reply."""
    reason = meta.finish_reason
    if reason.type not in (*_FINISHES, "abort"):
        raise UnusableReply(f"{server}: finish_reason has the type {reason.type!r}; valid: stop, length, abort")
    if reason.status_code is not None and reason.status_code >= 400:
        raise _failure(reason, server=server)


def _failure(reason: FinishReason, *, server: str) -> YunqueError:
    status = reason.status_code or 500
    return error_from({"message": reason.message}, status, where=f"{server} aborted with {status}")


def _version(value: str | int | None) -> int:
    """SGLang's weight version is a text, ``default`` before the first exchange of weights."""
    if value in (None, "default"):
        return 0
    try:
        return int(value)
    except ValueError:
        raise UnusableReply(f"SGLang: weight_version is {value!r}; it must be a number (or 'default')") from None

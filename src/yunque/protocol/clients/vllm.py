"""The policy client of vLLM: ``POST /inference/v1/generate``, or ``/v1/completions`` with token ids."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

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
from yunque.protocol.errors import EngineUnavailable, UnusableReply
from yunque.protocol.generation import Completion, Finish, JsonConstraint, RegexConstraint, SamplingParams, TopToken
from yunque.protocol.vllm import SESSION_HEADER

_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.PARTIAL}
_PREFIX = "token_id:"
_PATHS = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}


class TokenLogprob(ReplyModel):
    """``{"token": "token_id:N", "logprob": x}``."""

    token: str
    logprob: Logprob


class ContentEntry(TokenLogprob):
    """One sampled token and, where asked for, the best ones at its place."""

    top_logprobs: list[TokenLogprob] = Field(default_factory=list)


class Logprobs(ReplyModel):
    """``content`` is the token endpoint's; the other three are those of completions."""

    content: list[ContentEntry] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[Logprob | None] | None = None
    top_logprobs: list[dict[str, Logprob] | None] | None = None


class PromptLogprob(ReplyModel):
    """One entry of ``prompt_logprobs``."""

    logprob: Logprob


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Choice(ReplyModel):
    """One reply. ``prompt_token_ids`` and ``prompt_logprobs`` stand here in completions."""

    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: TokenId | str | None = None
    logprobs: Logprobs | None = None
    prompt_token_ids: list[TokenId] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class PromptDetails(ReplyModel):
    """Of ``usage``; null unless the server runs with ``--enable-prompt-tokens-details``."""

    cached_tokens: Count | None = None


class Usage(ReplyModel):
    """Counts; token endpoints of older servers have none."""

    prompt_tokens: Count | None = None
    prompt_tokens_details: PromptDetails | None = None


class VllmReply(ReplyModel):
    """The reply of either route."""

    choices: list[Choice] = Field(min_length=1, max_length=1)
    prompt_logprobs: PromptLogprobs | None = None
    usage: Usage | None = None


class VLLMClient:
    """``PolicyClient`` over a vLLM server.

    ``route`` chooses the token endpoint, or for servers without one ``/v1/completions`` with token ids in and out.
    ``logprobs_mode`` is what the server was started with (``--logprobs-mode``): with ``raw_logprobs``, vLLM's
    default, reported numbers are the model's own, and a request that is drawn from another distribution is refused
    unless ``allow_inexact_logprobs``. vLLM does not say which weights made a token: ``version`` is asked before each
    request, so that no token counts as newer than it is.
    """

    def __init__(
        self,
        base_url: str,
        settings: HttpSettings | None = None,
        *,
        model: str | None = None,
        route: Literal["generate", "completions"] = "generate",
        logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs",
        allow_inexact_logprobs: bool = False,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        self._transport = JsonTransport(base_url, settings)
        self._model = model
        self._route = route
        self._is_exact = logprobs_mode == "processed_logprobs" or allow_inexact_logprobs
        self._version = version

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams, session: str | None = None) -> Completion:
        """One reply. Raises ``RequestError``, ``Overloaded``, ``EngineUnavailable``, ``UnusableReply``."""
        self._refuse(sampling)
        version = self._version()
        headers = {} if session is None else {SESSION_HEADER: session}
        reply = await self._ask(tokens, vllm_fields(sampling), headers=headers, is_idempotent=is_idempotent(sampling))
        (choice,) = reply.choices
        ids = list(self._ids(choice))
        logprobs, tops = self._numbers(choice, ids, sampling.num_top)
        details = None if reply.usage is None else reply.usage.prompt_tokens_details
        return Completion(
            tokens=tuple(ids),
            logprobs=tuple(logprobs),
            versions=(version,) * len(ids),
            finish=_finish(choice.finish_reason),
            columns={"top": tuple(tops)} if sampling.num_top and ids else {},
            stopped_by=_stopped_by(choice, ids, sampling),
            prompt_tokens=len(tokens),
            cached_tokens=(details.cached_tokens if details is not None else None) or 0,
        )

    async def score(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        """Log-probability of every token but the first, under the model's own distribution; others are refused.
        One token is drawn and dropped: vLLM makes at least one."""
        refuse_other_scoring(sampling, server="vLLM")
        fields = vllm_fields(SamplingParams(max_new_tokens=1, temperature=0)) | {"prompt_logprobs": 1}
        reply = await self._ask(tokens, fields, headers={}, is_idempotent=True)
        rows = reply.prompt_logprobs or reply.choices[0].prompt_logprobs or []
        require_equal(len(rows), len(tokens), "prompt_logprobs and the prompt that was sent", server="vLLM")
        found: list[float] = []
        for place, (token, row) in enumerate(zip(tokens[1:], rows[1:], strict=True), start=1):
            if row is None or str(token) not in row:
                raise UnusableReply(f"vLLM: prompt_logprobs has no entry for token {token} at {place}")
            found.append(unclamped(row[str(token)].logprob))
        return tuple(found)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    def _refuse(self, sampling: SamplingParams) -> None:
        refuse("record_kept", if_=sampling.record_kept, why="vLLM does not report kept-token sets")
        refuse("max_new_tokens", if_=sampling.max_new_tokens == 0, why="vLLM makes at least one token")
        altered = _alteration(sampling)
        refuse(
            altered or "",
            if_=altered is not None and not self._is_exact,
            why="this vLLM server reports raw log-probabilities, which are not those that the tokens were drawn with; "
            "start it with --logprobs-mode processed_logprobs and say so (logprobs_mode='processed_logprobs'), or "
            "construct the client with allow_inexact_logprobs=True where that does not matter",
        )

    async def _ask(
        self, tokens: Sequence[int], fields: dict[str, Any], *, headers: Mapping[str, str], is_idempotent: bool
    ) -> VllmReply:
        named = {} if self._model is None else {"model": self._model}
        if self._route == "generate":
            body = {"token_ids": list(tokens), "sampling_params": fields, "stream": False}
        else:
            asked = {"return_token_ids": True, "return_tokens_as_token_ids": True, "stream": False}
            body = {"prompt": list(tokens), **fields, **asked}
        answer = await self._transport.post(
            _PATHS[self._route], named | body, headers=headers, is_idempotent=is_idempotent
        )
        reply = read_reply(VllmReply, answer, server="vLLM")
        echoed = reply.choices[0].prompt_token_ids
        if echoed is not None:
            require_equal(echoed, list(tokens), "prompt_token_ids and the prompt that was sent", server="vLLM")
        return reply

    def _ids(self, choice: Choice) -> Sequence[int]:
        if choice.token_ids is None:
            raise UnusableReply("vLLM: the reply has no token_ids; the server is too old to return them")
        return choice.token_ids

    def _numbers(self, choice: Choice, ids: list[int], num_top: int) -> tuple[list[float], list[tuple[TopToken, ...]]]:
        """The log-probability of every id, and the best tokens at its place."""
        if choice.logprobs is None:
            raise UnusableReply("vLLM: the reply has no logprobs")
        if self._route == "generate":
            entries = choice.logprobs.content or []
            named = [_id(entry.token) for entry in entries]
            require_equal(named, ids, "logprobs and token_ids", server="vLLM")
            tops = [[(top.logprob, _id(top.token)) for top in entry.top_logprobs] for entry in entries]
            return [entry.logprob for entry in entries], [best_first(top, num_top) for top in tops]
        logprobs = choice.logprobs.token_logprobs or []
        require_equal(len(logprobs), len(ids), "token_logprobs and token_ids", server="vLLM")
        names = choice.logprobs.tokens or []
        if all(name.startswith(_PREFIX) for name in names):
            require_equal([_id(name) for name in names], ids, "logprobs and token_ids", server="vLLM")
        values = [value for value in logprobs if value is not None]
        require_equal(len(values), len(ids), "token_logprobs that are numbers, and token_ids", server="vLLM")
        rows = (choice.logprobs.top_logprobs or []) if num_top else []
        if num_top:
            require_equal(len(rows), len(ids), "top_logprobs and token_ids", server="vLLM")
        return values, [
            best_first([(value, _id(name)) for name, value in (row or {}).items()], num_top) for row in rows
        ]


def vllm_fields(sampling: SamplingParams) -> dict[str, Any]:
    """``sampling_params`` with every field spelled out, whatever a server's defaults are.

    One more of the best tokens is asked for than is wanted: the sampled one stands among them, best or not.
    """
    fields = {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": sorted(sampling.stop_ids),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": sampling.num_top + 1,
    }
    optional = {
        "stop": list(sampling.stop),
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "seed": sampling.seed,
    }
    return fields | {key: value for key, value in optional.items() if value not in ([], {}, None)} | _form(sampling)


def _form(sampling: SamplingParams) -> dict[str, Any]:
    match sampling.constraint:
        case None:
            return {}
        case JsonConstraint(schema):
            return {"structured_outputs": {"json": dict(schema)} if schema else {"json_object": True}}
        case RegexConstraint(pattern):
            return {"structured_outputs": {"regex": pattern}}
    refuse("constraint", if_=True, why="tool calls cannot be constrained over vLLM's token routes")
    raise AssertionError


def _alteration(sampling: SamplingParams) -> str | None:
    """The first setting that makes the distribution another one than the model's own."""
    if sampling.temperature == 0:
        return None
    altered = {
        "temperature": sampling.temperature != 1,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "logit_bias": bool(sampling.logit_bias),
    }
    return cuts_of(sampling) or next((name for name, is_on in altered.items() if is_on), None)


def _id(name: str) -> int:
    digits = name.removeprefix(_PREFIX)
    if not name.startswith(_PREFIX) or not (digits.isascii() and digits.isdigit()):
        raise UnusableReply(f"vLLM: a token is named {name[:40]!r}; it must be token_id:N")
    return int(digits)


def _finish(reason: str | None) -> Finish:
    if reason == "error":
        raise EngineUnavailable("vLLM: the engine failed while it made the reply")
    if reason not in _FINISHES:
        raise UnusableReply(f"vLLM: finish_reason is {reason!r}; valid: {', '.join(_FINISHES)}")
    return _FINISHES[reason]


def _stopped_by(choice: Choice, ids: Sequence[int], sampling: SamplingParams) -> str | int | None:
    """The token endpoint does not say what ended a reply; the last id, or the only stop string, tells."""
    if choice.finish_reason != "stop" or choice.stop_reason is not None:
        return choice.stop_reason
    if ids and ids[-1] in sampling.stop_ids:
        return ids[-1]
    return sampling.stop[0] if len(sampling.stop) == 1 else None

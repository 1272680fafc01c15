"""vLLM's token endpoint, ``POST /inference/v1/generate``: ids in, ids out, nothing tokenised on the way."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field, WithJsonSchema

from yunque.protocol.generation import TokenDelta
from yunque.protocol.openai import StreamOptions
from yunque.protocol.openai_replies import finite
from yunque.protocol.sampling_fields import ID_LIST_SCHEMA, ReplyFields, SamplingFields

SESSION_HEADER = "X-Session-ID"
"""Requests of one rollout carry the same value, so that they find their cached prefix."""


class VllmSampling(SamplingFields):
    """``sampling_params``. Absent or null ``max_tokens``: as many as fit. ``logprobs: 1`` asks for each token's own
    log-probability, k > 1 for the k best beside it. ``record_kept`` (ours) asks for ``sampling_mask``: the token set
    that ``top_k``, ``top_p`` and ``min_p`` left at each place."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    record_kept: bool | None = None


class VllmGenerateRequest(ReplyFields):
    """The request. ``priority``: the smaller goes first, as in vLLM. Unknown fields are ignored. Of a reply that is
    resumed (``resume_token_ids``) what follows those ids is answered."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    token_ids: Annotated[list[Any], WithJsonSchema(ID_LIST_SCHEMA)]
    sampling_params: VllmSampling = Field(default_factory=VllmSampling)
    request_id: str | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None


def vllm_choice(
    index: int, deltas: Sequence[TokenDelta], finish_reason: str | None, *, logprobs: bool, kept: bool
) -> dict[str, Any]:
    """One choice. Its log-probabilities are those of the distribution that the tokens were drawn from (the behaviour
    policy's); ``top_logprobs`` are the model's own. In ``sampling_mask`` null is a place where every token was left."""
    choice: dict[str, Any] = {
        "index": index,
        "token_ids": [token for delta in deltas for token in delta.tokens],
        "finish_reason": finish_reason,
        "logprobs": None,
        "weight_versions": [version for delta in deltas for version in delta.versions],
    }
    if logprobs:
        choice["logprobs"] = {"content": [entry for delta in deltas for entry in _entries(delta)]}
    if kept:
        choice["sampling_mask"] = [None if ids is None else list(ids) for delta in deltas for ids in delta.kept]
    return choice


def prompt_logprobs(tokens: Sequence[int], logprobs: Sequence[float]) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: null for the first token, then each token's by its id."""
    rows = zip(tokens[1:], logprobs, strict=True)
    return [None, *({str(token): {"logprob": finite(logprob)}} for token, logprob in rows)]


def _entries(delta: TokenDelta) -> list[dict[str, Any]]:
    tops = delta.top or ((),) * len(delta.tokens)
    return [
        {
            "token": f"token_id:{token}",
            "logprob": finite(logprob),
            "top_logprobs": [{"token": f"token_id:{other.token}", "logprob": finite(other.logprob)} for other in top],
        }
        for token, logprob, top in zip(delta.tokens, delta.logprobs, tops, strict=True)
    ]

"""Replies and stream chunks of OpenAI's chat completions and completions, models and tokenisation."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from yunque.core.records import ToolCall
from yunque.protocol.generation import EngineInfo, TokenDelta, TopToken

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not."""


@dataclass(frozen=True)
class ReplyHead:
    """What every reply and chunk of one request begins with."""

    id: str
    model: str
    created_unix_s: int
    kind: str

    def body(self, choices: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """A reply or chunk with these choices; fields that are None are left out."""
        head = {"id": self.id, "object": self.kind, "created": self.created_unix_s, "model": self.model}
        return {**head, "choices": list(choices)} | {key: value for key, value in fields.items() if value is not None}


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB) if not math.isnan(logprob) else LOWEST_LOGPROB


def usage_body(
    prompt: int, completion: int, *, cached: int, reasoning: int = 0, drafted: int = 0, accepted: int = 0
) -> dict[str, Any]:
    """OpenAI's ``usage``. Where tokens were drafted (speculation), those that were accepted and rejected are in its
    fields for predicted output."""
    drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning} | (drafts if drafted else {}),
    }


def chat_message(content: str, reasoning: str | None, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """The assistant's message: ``content`` is null where there are calls and no text."""
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [call.to_openai() for call in calls]
    return message


def token_fields(deltas: Sequence[TokenDelta], resumed: Sequence[int] = ()) -> dict[str, Any]:
    """``token_ids``, and beside them the policy version that made each one; null for those of ``resumed``, which
    stand before the deltas."""
    return {
        "token_ids": [*resumed, *(token for delta in deltas for token in delta.tokens)],
        "weight_versions": [*[None] * len(resumed), *(version for delta in deltas for version in delta.versions)],
    }


def chat_logprobs(deltas: Sequence[TokenDelta], token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    """Chat's ``logprobs``: one entry per sampled token, the id that ended the turn included.

    The numbers are the model's own distribution (``model_logprobs``: temperature 1, nothing removed), as OpenAI's are;
    the distribution that was drawn from is what the token endpoints report.
    """
    entries = []
    for delta in deltas:
        tops = delta.top or ((),) * len(delta.tokens)
        for token, logprob, top in zip(delta.tokens, delta.model_logprobs, tops, strict=True):
            best = [_entry(other.token, other.logprob, token_bytes) for other in top]
            entries.append(_entry(token, logprob, token_bytes) | {"top_logprobs": best})
    return {"content": entries, "refusal": None}


def text_logprobs(
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Sequence[TopToken] | None],
    *,
    token_bytes: Callable[[int], bytes],
    offset: int = 0,
) -> dict[str, Any]:
    """Completions' ``logprobs``, of the model's own distribution. ``offset`` is where the first token's text begins.

    A token's text is its bytes with what is not UTF-8 replaced; places without a log-probability (the first of an
    echoed prompt) or without best tokens have null.
    """
    texts = [token_bytes(token).decode("utf-8", errors="replace") for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [None if logprob is None else finite(logprob) for logprob in logprobs],
        "top_logprobs": [
            None
            if top is None
            else {token_bytes(other.token).decode("utf-8", errors="replace"): finite(other.logprob) for other in top}
            for top in tops
        ],
        "text_offset": offsets,
    }


def model_card(info: EngineInfo) -> dict[str, Any]:
    """One entry of ``/v1/models``; ``max_model_len`` counts prompt and reply (vLLM's field, read by clients)."""
    return {
        "id": info.model_name,
        "object": "model",
        "created": info.created_unix_s,
        "owned_by": "yunque",
        "root": info.model_name,
        "parent": None,
        "max_model_len": info.max_model_len,
    }


def _entry(token: int, logprob: float, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    raw = token_bytes(token)
    return {"token": raw.decode("utf-8", errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}

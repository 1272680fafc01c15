"""Replies of token endpoints read and checked; what contradicts itself is an ``UnusableReply``."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from yunque.protocol.errors import RequestError, UnusableReply
from yunque.protocol.generation import SamplingParams, TopToken
from yunque.protocol.openai_replies import LOWEST_LOGPROB

TokenId = Annotated[int, Field(ge=0, strict=True)]
Logprob = Annotated[float, Field(le=1e-3, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
_Reply = TypeVar("_Reply", bound="ReplyModel")


class ReplyModel(BaseModel):
    """A part of a reply; fields that we do not read are passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def read_reply(model: type[_Reply], body: bytes, *, server: str) -> _Reply:
    """A reply of the documented shape. Raises ``UnusableReply`` naming the first field that is wrong."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the reply"
        raise UnusableReply(f"{server}: {place}: {first['msg']}; got {_clip(first['input'])}") from error


def require_equal(found: Any, expected: Any, what: str, *, server: str) -> None:
    """Two statements of one reply must agree."""
    if found != expected:
        raise UnusableReply(f"{server}: {what}: {_clip(found)} is not {_clip(expected)}")


def refuse(param: str, *, if_: bool, why: str) -> None:
    """Refuse a setting that a server would drop or answer otherwise."""
    if if_:
        raise RequestError(f"{param}: {why}", param=param)


def cuts_of(sampling: SamplingParams) -> str | None:
    """The first setting that removes tokens from the distribution, if one does."""
    cuts = {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1, "min_p": sampling.min_p > 0}
    return None if sampling.temperature == 0 else next((name for name, is_on in cuts.items() if is_on), None)


def refuse_other_scoring(sampling: SamplingParams, *, server: str) -> None:
    """Prompt log-probabilities of these servers are the model's own: temperature 1, nothing removed."""
    cut = cuts_of(sampling)
    why = f"{server} scores under the model's own distribution"
    refuse("temperature", if_=sampling.temperature not in (0, 1), why=f"{why}; valid: 1")
    refuse(cut or "", if_=cut is not None, why=f"{why}, with nothing removed")
    refuse("logit_bias", if_=bool(sampling.logit_bias), why=why)


def best_first(pairs: Sequence[tuple[float | None, int]], num_top: int) -> tuple[TopToken, ...]:
    """The ``num_top`` best of a place's tokens; those without a number are barred ones."""
    known = [TopToken(token, logprob) for logprob, token in pairs if logprob is not None]
    return tuple(sorted(known, key=lambda top: (-top.logprob, top.token))[:num_top])


def unclamped(logprob: float) -> float:
    """A score as it was before it became JSON, which has no minus infinity."""
    return -math.inf if logprob <= LOWEST_LOGPROB else logprob


def is_idempotent(sampling: SamplingParams) -> bool:
    """Whether asking twice gives the same reply."""
    return sampling.seed is not None or sampling.temperature == 0


def _clip(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 100 else shown[:97] + "..."

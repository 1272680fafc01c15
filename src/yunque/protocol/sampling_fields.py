"""The sampling fields that OpenAI's requests and vLLM's have in common, as sampling settings."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from yunque.protocol.errors import RequestError
from yunque.protocol.generation import Constraint, JsonConstraint, RegexConstraint, SamplingParams

MAX_CHOICES = 128
MAX_STOPS = 64
Count = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Repetition = Annotated[float, Field(gt=0, le=100)]
Penalty = Annotated[float, Field(ge=-100, le=100)]

ID_LIST_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
"""How a list of token ids stands in the OpenAPI document; ``token_ids`` checks it."""
_RESUMED = {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}}


class SamplingFields(BaseModel):
    """Fields of the same name and meaning in OpenAI's chat and completions and in vLLM's ``sampling_params``.

    ``None`` and an absent field mean the default. ``top_k`` -1 and 0 switch it off.
    """

    model_config = ConfigDict(extra="ignore")

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    structured_outputs: dict[str, Any] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    @property
    def num_choices(self) -> int:
        """How many replies are asked for."""
        return self.n or 1

    def params(
        self,
        *,
        max_new_tokens: int | None,
        vocab_size: int,
        eos_ids: Sequence[int] = (),
        num_top: int = 0,
        constraint: Constraint | None = None,
    ) -> SamplingParams:
        """The settings; ``eos_ids`` end a reply unless ``ignore_eos``. ``RequestError`` names a field at fault."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens or 0,
            temperature=_or(self.temperature, 1.0),
            top_k=max(self.top_k or 0, 0),
            top_p=_or(self.top_p, 1.0),
            min_p=self.min_p or 0.0,
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=biases(self.logit_bias, vocab_size),
            stop=stops(self.stop),
            stop_ids=frozenset(self.stop_token_ids or ()) | frozenset(() if self.ignore_eos else eos_ids),
            seed=self.seed,
            num_top=num_top,
            constraint=structured(self.structured_outputs) if constraint is None else constraint,
        )


class ReplyFields(BaseModel):
    """Fields of requests that concern the reply as a whole. Requests of different ``cache_salt`` share no cached rows
    (vLLM's). ``resume_token_ids`` (ours): the beginning of the reply, made by another engine."""

    model_config = ConfigDict(extra="ignore")

    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    resume_token_ids: Annotated[list[Any] | None, WithJsonSchema(_RESUMED)] = None

    def resumed(self, *, vocab_size: int, num_replies: int) -> tuple[int, ...]:
        """The ids that the reply begins with; ``RequestError`` where there are several replies."""
        if not self.resume_token_ids:
            return ()
        if num_replies != 1:
            raise RequestError(f"{num_replies} replies cannot be resumed at once", param="resume_token_ids")
        return token_ids(self.resume_token_ids, param="resume_token_ids", vocab_size=vocab_size)


def stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    found = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(found) > MAX_STOPS:
        raise RequestError(f"stop has {len(found)} strings; at most {MAX_STOPS}", param="stop")
    return found


def biases(logit_bias: Mapping[str, float] | None, vocab_size: int) -> dict[int, float]:
    """Logit biases by token id; JSON has them by its digits."""
    found = {}
    for key, value in (logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocab_size):
            raise RequestError(
                f"logit_bias has the key {key[:40]!r}; it must be a token id below {vocab_size}", param="logit_bias"
            )
        found[int(key)] = value
    return found


def structured(fields: Mapping[str, Any] | None) -> Constraint | None:
    """vLLM's ``structured_outputs``: ``{"json": schema}``, ``{"json_object": true}`` or ``{"regex": pattern}``."""
    given = {key: value for key, value in (fields or {}).items() if value not in (None, False)}
    match given:
        case {} if not given:
            return None
        case {"json": dict() as schema} if len(given) == 1:
            return JsonConstraint(schema)
        case {"json_object": True} if len(given) == 1:
            return JsonConstraint()
        case {"regex": str() as pattern} if len(given) == 1:
            return RegexConstraint(pattern)
    raise RequestError(
        f"structured_outputs has {sorted(given)}; valid: one of json (a schema), json_object (true), regex (text)",
        param="structured_outputs",
    )


def token_ids(value: Any, *, param: str, vocab_size: int) -> tuple[int, ...]:
    """A list of token ids, checked one by one without a model for each (a prompt may have a million)."""
    if not isinstance(value, list) or not value:
        raise RequestError(f"{param} must be a list of token ids that is not empty", param=param)
    if any(type(token) is not int for token in value):
        wrong = next(token for token in value if type(token) is not int)
        raise RequestError(f"{param} must hold token ids only; it holds {str(wrong)[:40]!r}", param=param)
    if min(value) < 0 or max(value) >= vocab_size:
        wrong = next(token for token in value if not 0 <= token < vocab_size)
        raise RequestError(f"{param} has the id {wrong}; the vocabulary has {vocab_size} tokens", param=param)
    return tuple(value)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value

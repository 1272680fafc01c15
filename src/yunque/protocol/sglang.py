"""SGLang's ``POST /generate``: ids or text in, ids with the log-probabilities of the behaviour policy out."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from yunque.core.records import parse_json
from yunque.protocol.errors import RequestError
from yunque.protocol.generation import (
    Constraint,
    Finish,
    JsonConstraint,
    RegexConstraint,
    SamplingParams,
    TokenDelta,
)
from yunque.protocol.openai_replies import finite
from yunque.protocol.sampling_fields import (
    ID_LIST_SCHEMA,
    MAX_CHOICES,
    Count,
    MinP,
    Penalty,
    Repetition,
    ReplyFields,
    Seed,
    Temperature,
    TopK,
    TopP,
    biases,
    stops,
    token_ids,
)

_IDS = {"anyOf": [ID_LIST_SCHEMA, {"type": "array", "items": ID_LIST_SCHEMA, "minItems": 1}, {"type": "null"}]}

TextOf = Callable[[int], str]


class SglangSampling(BaseModel):
    """``sampling_params``. ``sampling_seed`` and ``seed`` are the same; ``json_schema`` is a schema as text;
    ``max_new_tokens`` 0 computes the prompt alone. ``record_kept`` (ours) asks for ``output_kept_tokens``."""

    model_config = ConfigDict(extra="ignore")

    max_new_tokens: Count | None = 128
    min_new_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    sampling_seed: Seed | None = None
    seed: Seed | None = None
    json_schema: str | None = None
    regex: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    record_kept: bool | None = None

    def params(self, *, vocab_size: int, eos_ids: Sequence[int], num_top: int) -> SamplingParams:
        """The settings; ``RequestError`` names a field at fault."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens or 0,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=biases(self.logit_bias, vocab_size),
            stop=stops(self.stop),
            stop_ids=frozenset(self.stop_token_ids or ()) | frozenset(() if self.ignore_eos else eos_ids),
            seed=self.sampling_seed if self.sampling_seed is not None else self.seed,
            num_top=num_top,
            record_kept=bool(self.record_kept),
            constraint=self._constraint(),
        )

    def _constraint(self) -> Constraint | None:
        if self.regex is not None:
            return RegexConstraint(self.regex)
        if self.json_schema is None:
            return None
        try:
            schema = parse_json(self.json_schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json_schema is not JSON: {error}", param="json_schema") from error
        if not isinstance(schema, dict):
            raise RequestError("json_schema must be an object", param="json_schema")
        return JsonConstraint(schema)


class SglangGenerateRequest(ReplyFields):
    """The request: ``input_ids`` or ``text``, one or a list of them. ``logprob_start_len`` -1: no prompt tokens.
    ``incremental_streaming_output``: events carry only what is new. Of a reply that is resumed (``resume_token_ids``)
    what follows those ids is answered."""

    model_config = ConfigDict(extra="ignore")

    text: str | list[str] | None = None
    input_ids: Annotated[Any, WithJsonSchema(_IDS)] = None
    sampling_params: SglangSampling | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=100)] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    incremental_streaming_output: bool | None = None
    rid: str | list[str] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list."""
        given = self.input_ids if self.input_ids is not None else self.text
        return isinstance(given, list) and bool(given) and isinstance(given[0], list | str)

    def prompts(self, *, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
        """The prompts; exactly one of ``input_ids`` and ``text`` is given."""
        if (self.input_ids is None) == (self.text is None):
            raise RequestError("give either input_ids or text", param="input_ids")
        if self.text is not None:
            texts = (self.text,) if isinstance(self.text, str) else tuple(self.text)
            if not texts:
                raise RequestError("text is an empty list", param="text")
            return texts
        batch = self.input_ids if self.is_batch else [self.input_ids]
        return tuple(token_ids(ids, param="input_ids", vocab_size=vocab_size) for ids in batch)


def sglang_finish(finish: Finish | None, stopped_by: str | int | None, length: int) -> dict[str, Any] | None:
    """SGLang's ``finish_reason``; null while the reply runs. Aborted and handed-back replies are ``abort``."""
    match finish:
        case None:
            return None
        case Finish.STOP:
            return {"type": "stop"} | ({} if stopped_by is None else {"matched": stopped_by})
        case Finish.LENGTH:
            return {"type": "length", "length": length}
        case _:
            return {"type": "abort", "message": str(finish)}


def sglang_logprobs(deltas: Sequence[TokenDelta], *, num_top: int, text_of: TextOf | None) -> dict[str, Any]:
    """``output_token_logprobs`` (``[logprob, id, text or null]`` under the distribution that the token was drawn from)
    and, where asked for, ``output_top_logprobs`` of the model's own distribution."""
    found: dict[str, Any] = {
        "output_token_logprobs": [
            _triple(logprob, token, text_of)
            for delta in deltas
            for logprob, token in zip(delta.logprobs, delta.tokens, strict=True)
        ]
    }
    if num_top:
        found["output_top_logprobs"] = [
            [_triple(other.logprob, other.token, text_of) for other in top] for delta in deltas for top in delta.top
        ]
    return found


def sglang_prompt_logprobs(
    prompt: Sequence[int], logprobs: Sequence[float], *, start: int, text_of: TextOf | None
) -> list[list[Any]]:
    """``input_token_logprobs`` from position ``start`` on; the first token of a prompt has null."""
    values: list[float | None] = [None, *logprobs]
    return [_triple(value, token, text_of) for value, token in list(zip(values, prompt, strict=True))[start:]]


def _triple(logprob: float | None, token: int, text_of: TextOf | None) -> list[Any]:
    return [None if logprob is None else finite(logprob), token, None if text_of is None else text_of(token)]

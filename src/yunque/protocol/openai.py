"""Requests of OpenAI's chat completions and completions, and of ``/tokenize``, as engines in the field take them.

Unknown fields are accepted and ignored (``IGNORED_FIELDS`` lists those that clients are known to send); a field whose
loss would change what is answered is refused instead.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from yunque.core.errors import DataError
from yunque.core.records import Message, ToolSpec, parse_json
from yunque.protocol.effort import effort_options
from yunque.protocol.errors import RequestError
from yunque.protocol.generation import JsonConstraint
from yunque.protocol.sampling_fields import ID_LIST_SCHEMA, Count, ReplyFields, SamplingFields, token_ids

IGNORED_FIELDS = (
    "add_special_tokens",
    "allowed_openai_params",
    "best_of",
    "extra_body",
    "include_stop_str_in_output",
    "metadata",
    "modalities",
    "prediction",
    "prompt_cache_retention",
    "prompt_logprobs",
    "return_tokens_as_token_ids",
    "safety_identifier",
    "service_tier",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "store",
    "stream_options.include_obfuscation",
    "truncate_prompt_tokens",
    "user",
    "verbosity",
    "web_search_options",
)
"""Fields that clients send and that change nothing here."""

REFUSED_FIELDS = ("audio", "functions", "function_call", "guided_json", "guided_regex", "guided_grammar")
"""Fields whose loss would change the answer: a request that sets one is refused, with the field's name."""

_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}
_MESSAGE = {
    "anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ["system", "developer", "user", "tool"]}, "content": _CONTENT},
        },
        {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"const": "assistant"},
                "content": {"anyOf": [_CONTENT, {"type": "null"}]},
                "reasoning_content": {"type": ["string", "null"]},
                "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
            },
        },
    ]
}
_MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1}
_TOOLS = {
    "type": ["array", "null"],
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"type": "string", "minLength": 1}, "parameters": {"type": "object"}},
            },
        },
    },
}
_FORMAT = {
    "type": ["object", "null"],
    "required": ["type"],
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": {"type": "object"}},
}
_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        ID_LIST_SCHEMA,
        {"type": "array", "items": ID_LIST_SCHEMA, "minItems": 1},
    ]
}


class StreamOptions(BaseModel):
    """``include_usage``: one more chunk before the end, with the usage."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool | None = None


class Thinking(BaseModel):
    """The switch of Z.ai's own API: ``{"type": "enabled" | "disabled", "clear_thinking": bool}``."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["enabled", "disabled"] | None = None
    clear_thinking: bool | None = None


class ChatCompletionRequest(SamplingFields, ReplyFields):
    """``POST /v1/chat/completions``."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    messages: Annotated[list[Any], WithJsonSchema(_MESSAGES)]
    tools: Annotated[list[dict[str, Any]] | None, WithJsonSchema(_TOOLS)] = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[dict[str, Any] | None, WithJsonSchema(_FORMAT)] = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    prompt_cache_key: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

    @property
    def max_new_tokens(self) -> int | None:
        """The newer spelling wins where both are given."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_top(self) -> int:
        """How many best tokens to report for each one."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return self.top_logprobs or 0

    def template_options(self, *, enable_thinking: bool) -> dict[str, Any]:
        """The chat template's options: the server's default for thinking, then ``thinking``, then
        ``reasoning_effort`` (``effort_options``), then ``chat_template_kwargs``, the later winning."""
        options: dict[str, Any] = {"enable_thinking": enable_thinking}
        if self.thinking is not None:
            if self.thinking.type is not None:
                options["enable_thinking"] = self.thinking.type == "enabled"
            if self.thinking.clear_thinking is not None:
                options["clear_thinking"] = self.thinking.clear_thinking
        return options | effort_options(self.reasoning_effort) | (self.chat_template_kwargs or {})


class CompletionRequest(SamplingFields, ReplyFields):
    """``POST /v1/completions``. The spelling of a special token in a text prompt means that token."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    max_tokens: Count | None = 16
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None


class TokenizeRequest(BaseModel):
    """``POST /tokenize``: a ``prompt`` (``text`` is the same), or ``messages`` as a chat would render them."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: str | None = None
    text: str | None = None
    messages: Annotated[list[Any] | None, WithJsonSchema(_MESSAGES)] = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """``POST /detokenize``."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    tokens: Annotated[list[Any], WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})]


def refuse(request: BaseModel) -> None:
    """Raise for a field of REFUSED_FIELDS that is set."""
    extra = request.model_extra or {}
    for name in REFUSED_FIELDS:
        if extra.get(name) is not None:
            hint = " use tools and tool_choice" if name.startswith("function") else " use response_format"
            raise RequestError(f"{name} is not supported;{'' if name == 'audio' else hint}", param=name)


def messages_of(entries: Sequence[Any]) -> tuple[Message, ...]:
    """Read OpenAI's ``messages``; the role ``developer`` is ``system``. Raises ``RequestError``.

    An assistant's null content is how clients say that there was no text: it is read as ``""``. (GLM-5's template
    would write the word None for it, which the model never said, and which the prefix cache would miss.)
    A past call whose arguments are no JSON object is what a client heard of a call that broke off: it becomes the
    plain text that such a call is shown as, so that the conversation can go on.
    """
    return tuple(_message(entry, f"messages[{i}]") for i, entry in enumerate(entries))


def tools_of(entries: Sequence[Any] | None) -> tuple[ToolSpec, ...]:
    """Read OpenAI's ``tools``; two of one name are refused."""
    tools: dict[str, ToolSpec] = {}
    for i, entry in enumerate(entries or ()):
        where = f"tools[{i}]"
        if isinstance(entry, Mapping) and entry.get("type", "function") != "function":
            raise RequestError(f"{where}: type {entry['type']!r} is not supported; valid: function", param="tools")
        try:
            tool = ToolSpec.from_openai(entry, where=where)
        except DataError as error:
            raise RequestError(str(error), param="tools") from error
        if tool.name in tools:
            raise RequestError(f"{where}: the name {tool.name!r} is taken", param="tools")
        tools[tool.name] = tool
    return tuple(tools.values())


def output_of(response_format: Mapping[str, Any] | None) -> JsonConstraint | None:
    """Read ``response_format``: text, json_object, or json_schema."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return JsonConstraint()
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return JsonConstraint(schema)
        case {"type": "json_schema"}:
            raise RequestError("response_format.json_schema needs a schema that is an object", param="response_format")
    raise RequestError(
        f"response_format has the type {response_format.get('type')!r}; valid: text, json_object, json_schema",
        param="response_format",
    )


def prompts_of(value: Any, *, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    """Read a completions ``prompt``: text, texts, ids, or lists of ids. An empty one is refused."""
    match value:
        case str():
            prompts: list[Any] = [value]
        case [str() | list(), *_]:
            prompts = list(value)
        case _:
            return (token_ids(value, param="prompt", vocab_size=vocab_size),)
    return tuple(
        prompt if isinstance(prompt, str) else token_ids(prompt, param="prompt", vocab_size=vocab_size)
        for prompt in prompts
    )


def _message(entry: Any, where: str) -> Message:
    if isinstance(entry, Mapping):
        if entry.get("role") == "developer":
            entry = {**entry, "role": "system"}
        if entry.get("role") == "assistant":
            entry = _without_broken_calls({**entry, "content": entry.get("content") or ""})
    try:
        return Message.from_openai(entry, where=where)
    except DataError as error:
        raise RequestError(str(error), param="messages") from error


def _without_broken_calls(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = entry.get("tool_calls")
    broken = [call for call in calls if _is_broken(call)] if isinstance(calls, list) else []
    if not broken or calls is None:
        return entry
    shown = [f"<tool_call>{call['function'].get('name')}{call['function']['arguments']}" for call in broken]
    whole = [call for call in calls if call not in broken]
    return {**entry, "content": entry["content"] or "".join(shown), "tool_calls": whole}


def _is_broken(call: Any) -> bool:
    match call:
        case {"function": {"arguments": str() as arguments}} if arguments:
            try:
                return not isinstance(parse_json(arguments), dict)
            except (ValueError, RecursionError):
                return True
    return False


def dump(value: Any) -> str:
    """Compact JSON, ASCII only: whatever a client sent, it can be written."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)

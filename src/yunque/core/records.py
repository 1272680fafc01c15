"""Conversation records (authors, messages, tool calls, tools), read from and written to OpenAI's shape."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeVar, get_args

from yunque.core.errors import DataError, unknown

MessageRole = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[MessageRole, ...] = get_args(MessageRole)

_Kind = TypeVar("_Kind")


class Author(StrEnum):
    """Who wrote a token. TEMPLATE is the chat format itself: role markers, the tools block, ``<think>``."""

    SYSTEM = "system"
    USER = "user"
    TOOL = "tool"
    ASSISTANT = "assistant"
    TEMPLATE = "template"


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool: its name, its arguments as a JSON object, and the id that its result refers to."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None

    @staticmethod
    def from_openai(call: Mapping[str, Any], *, where: str = "tool call") -> "ToolCall":
        """Read ``{"id", "type": "function", "function": {"name", "arguments"}}``, or the inner object alone.

        ``arguments`` may be a JSON object or, as the OpenAI API sends it, that object encoded as a string
        (zai-org/GLM-5#158); absent, None and ``""`` mean no arguments. Raises DataError for anything else.
        """
        _expect(call, Mapping, where)
        if call.get("type") not in (None, "function"):
            raise DataError(f"{where}: type {call['type']!r} is not supported; valid: function")
        function = _expect(call.get("function") or call, Mapping, f"{where}.function")
        name = _text(function, "name", where)
        if not name.strip():
            raise DataError(f"{where}: the function's name is empty")
        call_id = call.get("id")
        if call_id is not None:
            _expect(call_id, str, f"{where}.id")
        return ToolCall(name, _arguments(function.get("arguments"), f"{where} {name!r}"), call_id)

    def to_openai(self) -> dict[str, Any]:
        """The OpenAI object, with ``arguments`` encoded as a JSON string; without ``id`` if there is none."""
        arguments = json.dumps(self.arguments, ensure_ascii=False, allow_nan=False)
        call = {"type": "function", "function": {"name": self.name, "arguments": arguments}}
        return call if self.id is None else {"id": self.id, **call}


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    ``content`` is text; None (only for an assistant) says that the field was null, which some chat formats
    show. ``reasoning`` is the thinking of an assistant turn: None where there was none, ``""`` where it was
    opened and left empty. Raises DataError when a field does not belong to the role.
    """

    role: MessageRole
    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise DataError(unknown("role", str(self.role), ROLES, where="message"))
        if self.content is None and self.role != "assistant":
            raise DataError(f"{self.role} message: content is None; only an assistant message may have none")
        if self.role != "assistant" and (self.reasoning is not None or self.tool_calls):
            raise DataError(f"{self.role} message: only an assistant message has reasoning or tool_calls")
        if self.role != "tool" and self.tool_call_id is not None:
            raise DataError(f"{self.role} message: only a tool message has tool_call_id")

    @property
    def author(self) -> Author:
        """Who wrote this message's text."""
        return Author(self.role)

    @staticmethod
    def from_openai(message: Mapping[str, Any], *, where: str = "message") -> "Message":
        """Read one entry of OpenAI's ``messages``; ``where`` names it in errors.

        Content given as a list of text parts is joined (vllm-project/recipes#327); other parts (images,
        audio, tool references) are refused. Reasoning is read from ``reasoning_content``, else from
        ``reasoning``. A missing content field is ``""``, a null one None. Fields that do not change what was
        said are ignored. Raises DataError.
        """
        _expect(message, Mapping, where)
        role = message.get("role")
        if role not in ROLES:
            raise DataError(unknown("role", str(role), ROLES, where=where))
        for refused in ("function_call", "audio"):
            if message.get(refused):
                raise DataError(f"{where}: {refused!r} is not supported")
        calls = message.get("tool_calls") or ()
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise DataError(f"{where}.tool_calls: expected a list, got {type(calls).__name__}")
        return Message(
            role,
            _content(message.get("content", ""), f"{where}.content"),
            _optional_text(message, ("reasoning_content", "reasoning"), where),
            tuple(ToolCall.from_openai(call, where=f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)),
            _optional_text(message, ("tool_call_id",), where),
            _optional_text(message, ("name",), where),
        )

    def to_openai(self) -> dict[str, Any]:
        """The OpenAI object; ``from_openai`` of it is this message again."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        optional = {
            "reasoning_content": self.reasoning,
            "tool_calls": [call.to_openai() for call in self.tool_calls] or None,
            "tool_call_id": self.tool_call_id,
            "name": self.name,
        }
        return message | {key: value for key, value in optional.items() if value is not None}


@dataclass(frozen=True)
class ToolSpec:
    """A tool that the assistant may call. ``raw`` is the whole object as given; GLM-5 shows it verbatim."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    raw: Mapping[str, Any]

    @property
    def function(self) -> Mapping[str, Any]:
        """The inner ``function`` object of ``raw``, or ``raw`` itself when it was given bare."""
        return self.raw.get("function", self.raw)

    @staticmethod
    def from_openai(tool: Mapping[str, Any], *, where: str = "tool") -> "ToolSpec":
        """Read ``{"type": "function", "function": {"name", "description", "parameters"}}`` or the inner part.

        Missing ``parameters`` become ``{}``, a schema that says nothing. Raises DataError.
        """
        _expect(tool, Mapping, where)
        function = _expect(tool.get("function", tool), Mapping, f"{where}.function")
        parameters = function.get("parameters")
        return ToolSpec(
            _text(function, "name", where),
            _optional_text(function, ("description",), where),
            {} if parameters is None else _expect(parameters, Mapping, f"{where}.parameters"),
            tool,
        )


def parse_json(text: str) -> Any:
    """``json.loads`` of values that JSON can hold: NaN, infinities and larger floats are a ValueError too."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a finite number")
    return value


def _arguments(value: Any, where: str) -> Mapping[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: arguments are not JSON: {error}: {_clip(value)}") from error
    return _expect(value, Mapping, f"{where}: arguments")


def _content(value: Any, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    parts = _expect(value, Sequence, where)
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(parts))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = _expect(part, Mapping, where).get("type")
    if kind != "text":
        raise DataError(f"{where}: part type {kind!r} is not supported; valid: text")
    return _text(part, "text", where)


def _text(mapping: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(mapping.get(key), str):
        raise DataError(f"{where}: {key!r} must be text, got {_clip(mapping.get(key))}")
    return mapping[key]


def _optional_text(mapping: Mapping[str, Any], keys: tuple[str, ...], where: str) -> str | None:
    for key in keys:
        if mapping.get(key) is not None:
            return _text(mapping, key, where)
    return None


def _expect(value: Any, kind: type[_Kind], where: str) -> _Kind:
    if not isinstance(value, kind):
        raise DataError(f"{where}: expected {kind.__name__}, got {_clip(value)}")
    return value


def _clip(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."

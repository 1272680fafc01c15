"""OpenAI's Responses API: requests as clients send them, read into conversations and sampling settings."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from yunque.core.errors import DataError
from yunque.core.records import Message, ToolCall, ToolSpec
from yunque.protocol.effort import effort_options
from yunque.protocol.errors import RequestError
from yunque.protocol.generation import JsonConstraint, SamplingParams
from yunque.protocol.openai import tools_of

STATEFUL = ("previous_response_id", "conversation", "prompt")
"""Fields that refer to something kept on the server. Nothing is."""


class _Wire(BaseModel):
    """Fields that are not listed are accepted and ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class TextPart(_Wire):
    """Text of a message, a thought or a result."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class OtherPart(_Wire):
    """A part that this server cannot read (images, files, audio): refused by name."""

    type: str


def _part_kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else getattr(part, "type", None)
    return "text" if kind in _TEXTS else "other"


_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
Part = Annotated[Annotated[TextPart, Tag("text")] | Annotated[OtherPart, Tag("other")], Discriminator(_part_kind)]


def _as_parts(value: Any) -> Any:
    """A string stands for one text part, null for none."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return [] if value is None else value


Parts = Annotated[list[Part], BeforeValidator(_as_parts, json_schema_input_type=str | list[Part] | None)]


class MessageItem(_Wire):
    """A message: text, or parts."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class FunctionCallItem(_Wire):
    """A call that the assistant made; ``arguments`` is a JSON object as text."""

    type: Literal["function_call"]
    call_id: str
    name: str = Field(pattern=r"\S")
    arguments: str


class FunctionCallOutputItem(_Wire):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningItem(_Wire):
    """A thought, sent back: in ``content``, or where that is missing in ``summary``."""

    type: Literal["reasoning"]
    content: Parts = []
    summary: Parts = []


class OtherItem(_Wire):
    """An item that this server cannot read (references, hosted tools): refused by name."""

    type: str


def _item_kind(item: Any) -> str:
    if not isinstance(item, Mapping):
        return str(getattr(item, "type", "other"))
    kind = item.get("type")
    if kind is None and "role" in item:
        return "message"
    return kind if isinstance(kind, str) and kind in _ITEMS else "other"


_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_item_kind),
]


def _as_items(value: Any) -> Any:
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


class FunctionTool(_Wire):
    """A function that the client runs. Every other ``type`` is run by OpenAI: refused."""

    type: str = "function"
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceParam(_Wire):
    """One function by its name, or a part of the tools."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]] | None = None


class TextFormat(_Wire):
    """Plain text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class TextParam(_Wire):
    """The form of the answer."""

    format: TextFormat | None = None


class ReasoningParam(_Wire):
    """How much to think; with ``summary`` the thought stands in the item's summary, whole, not in its content."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(_Wire):
    """``POST /v1/responses``. ``chat_template_kwargs`` are this server's own addition."""

    model: str | None = None
    input: Annotated[list[Item], BeforeValidator(_as_items, json_schema_input_type=str | list[Item])]
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceParam | None = None
    parallel_tool_calls: bool | None = None
    text: TextParam | None = None
    reasoning: ReasoningParam | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def refuse_stateful(request: ResponsesRequest) -> None:
    """Raise ``RequestError`` for a request that needs what an earlier one left on the server, or leaves something."""
    for name in STATEFUL:
        if getattr(request, name):
            raise RequestError(
                f"{name} is not supported: this server keeps no responses; send the whole conversation as input items",
                param=name,
            )
    if request.background:
        raise RequestError("background is not supported: this server keeps no responses", param="background")


def read_messages(request: ResponsesRequest) -> tuple[Message, ...]:
    """The conversation: consecutive thoughts, messages and calls of the assistant are one turn. Raises
    ``RequestError`` for items that cannot be read."""
    messages = [Message("system", request.instructions)] if request.instructions else []
    turn: list[tuple[str, Any]] = []
    for index, item in enumerate(request.input):
        where = f"input.{index}"
        if isinstance(item, FunctionCallItem | ReasoningItem) or (
            isinstance(item, MessageItem) and item.role == "assistant"
        ):
            turn.append((where, item))
            continue
        messages += _assistant(turn)
        turn = []
        match item:
            case MessageItem():
                role = "user" if item.role == "user" else "system"
                messages.append(Message(role, _text(item.content, f"{where}.content")))
            case FunctionCallOutputItem():
                output = _text(item.output, f"{where}.output")
                messages.append(Message("tool", output, tool_call_id=item.call_id))
            case _:
                raise RequestError(
                    f"{where}: items of type {item.type!r} are not supported; valid: {', '.join(_ITEMS)}", param=where
                )
    messages += _assistant(turn)
    if not messages:
        raise RequestError("there is neither input nor instructions", param="input")
    return tuple(messages)


def read_tools(request: ResponsesRequest) -> tuple[ToolSpec, ...]:
    """The functions, without those that ``tool_choice`` does not allow. Raises ``RequestError`` for hosted tools."""
    tools = tools_of([_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools or ())])
    choice = request.tool_choice
    if not isinstance(choice, ToolChoiceParam) or choice.type != "allowed_tools":
        return tools
    allowed = {tool.get("name") for tool in choice.tools or ()}
    return tuple(tool for tool in tools if tool.name in allowed)


def read_template(request: ResponsesRequest, *, enable_thinking: bool) -> dict[str, Any]:
    """The chat template's options: the server's default for thinking, then ``reasoning.effort``, then
    ``chat_template_kwargs``, the later winning."""
    effort = request.reasoning.effort if request.reasoning is not None else None
    return {"enable_thinking": enable_thinking} | effort_options(effort) | (request.chat_template_kwargs or {})


def read_sampling(request: ResponsesRequest) -> SamplingParams:
    """The sampling settings. Raises ``RequestError`` for a value out of range."""
    return SamplingParams(
        max_new_tokens=request.max_output_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
    )


def read_output(request: ResponsesRequest) -> JsonConstraint | None:
    """The form that the answer must have. Raises ``RequestError`` for a schema that is missing."""
    chosen = request.text.format if request.text is not None else None
    if chosen is None or chosen.type == "text":
        return None
    if chosen.type == "json_object":
        return JsonConstraint()
    if chosen.json_schema is None:
        raise RequestError("text.format: json_schema needs a schema", param="text.format.schema")
    return JsonConstraint(chosen.json_schema)


def _text(parts: Sequence[Any], where: str) -> str:
    for place, part in enumerate(parts):
        if isinstance(part, OtherPart):
            raise RequestError(
                f"{where}.{place}: parts of type {part.type!r} are not supported: this model reads text only; "
                "valid: input_text, output_text",
                param=f"{where}.{place}",
            )
    return "".join(part.text for part in parts)


def _assistant(items: Iterable[tuple[str, Any]]) -> list[Message]:
    """The message of one assistant turn, or none. Its pieces are joined as they are.

    A call whose arguments are no JSON object is what a client heard of a call that broke off. The text that this
    server sent after it says what the model wrote; where a client dropped that text the call itself becomes text.
    """
    items = tuple(items)
    thoughts: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    broken: list[str] = []
    for where, item in items:
        match item:
            case ReasoningItem():
                thoughts.append(_text(item.content or item.summary, where))
            case FunctionCallItem():
                try:
                    call = {"id": item.call_id, "name": item.name, "arguments": item.arguments}
                    calls.append(ToolCall.from_openai(call))
                except DataError:
                    broken.append(f"<tool_call>{item.name}{item.arguments}")
            case _:
                content.append(_text(item.content, f"{where}.content"))
    reasoning = "".join(thoughts) if any(thoughts) else None
    text = "".join(content) or "".join(broken)
    return [Message("assistant", text, reasoning, tuple(calls))] if items else []


def _tool(tool: FunctionTool, where: str) -> dict[str, Any]:
    """The function in the shape of chat completions."""
    if tool.type != "function":
        raise RequestError(
            f"{where}: tools of type {tool.type!r} are not supported: this server runs no tools; valid: function",
            param=where,
        )
    if not tool.name.strip():
        raise RequestError(f"{where}: a function needs a name", param=f"{where}.name")
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.parameters or {}}
    shown = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": shown | ({"strict": True} if tool.strict else {})}

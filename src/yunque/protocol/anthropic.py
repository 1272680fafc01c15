"""Anthropic's Messages API: requests as clients send them, read into conversations and sampling settings."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from yunque.core.records import Message, ToolCall, ToolSpec
from yunque.protocol.effort import effort_options
from yunque.protocol.errors import RequestError
from yunque.protocol.generation import JsonConstraint, SamplingParams
from yunque.protocol.openai import tools_of
from yunque.protocol.sampling_fields import TopK, stops

BILLING_PREFIX = "x-anthropic-billing-header:"
"""Claude Code opens its system prompt with a block of this kind. It differs in every request and is not meant for the
model: kept in the prompt it would miss the prefix cache each time (ggml-org/llama.cpp#20623)."""


class _Wire(BaseModel):
    """Fields that are not listed (``cache_control``, ``citations``, betas) are accepted and ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class TextBlock(_Wire):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(_Wire):
    """An assistant's thought, sent back. Its ``signature`` is not checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(_Wire):
    """A thought that cannot be read: left out of the conversation."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(_Wire):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str = Field(pattern=r"\S")
    input: dict[str, Any]


class OtherBlock(_Wire):
    """A block that this server cannot read (images, documents, results of server tools): refused by name."""

    type: str


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else getattr(block, "type", None)
    return kind if isinstance(kind, str) and kind in _KINDS else "other"


def _result_kind(block: Any) -> str:
    return "text" if _kind(block) == "text" else "other"


def _as_blocks(value: Any) -> Any:
    """A string stands for one text block, null for none."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return [] if value is None else value


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[OtherBlock, Tag("other")], Discriminator(_result_kind)
]


class ToolResultBlock(_Wire):
    """What a call gave: text, or text blocks."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        list[ResultBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[ResultBlock] | None)
    ] = []
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_kind),
]
_KINDS: dict[str, type[_Wire]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
_BY_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


class MessageParam(_Wire):
    """One message: text, or blocks."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])]


class ToolParam(_Wire):
    """A tool that the client runs. Tools with another ``type`` than "custom" run on Anthropic's side: refused."""

    type: str | None = None
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None


class ToolChoiceParam(_Wire):
    """Which tool to use: any or none, one of them, or the one named."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingParam(_Wire):
    """Whether to think. ``budget_tokens`` and ``display`` are accepted and have no effect."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None


class OutputFormat(_Wire):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Wire):
    """How much effort, and in which form."""

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(_Wire):
    """Who asks: requests with the same ``user_id`` go to the same engine."""

    user_id: str | None = None


class CountTokensRequest(_Wire):
    """What makes a prompt. ``chat_template_kwargs`` are this server's own addition."""

    model: str | None = None
    messages: list[MessageParam] = Field(min_length=1)
    system: Annotated[
        list[ResultBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[ResultBlock] | None)
    ] = []
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """``POST /v1/messages``."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    metadata: Metadata | None = None


def read_messages(request: CountTokensRequest) -> tuple[Message, ...]:
    """The conversation. Consecutive messages of one role are one turn, as Anthropic counts them; each tool result
    becomes a message of its own. Raises ``RequestError`` for blocks that cannot be read and for prefill."""
    system = "\n\n".join(_texts(_without_billing(request.system), "system"))
    messages = [Message("system", system)] if system else []
    turns: list[tuple[str, list[tuple[str, Any]]]] = []
    for index, message in enumerate(request.messages):
        blocks = [(f"messages.{index}.content.{place}", block) for place, block in enumerate(message.content)]
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    for role, blocks in turns:
        _check_kinds(role, blocks)
        messages += [_assistant(block for _, block in blocks)] if role == "assistant" else _others(role, blocks)
    if messages[-1].role == "assistant":
        raise RequestError(
            "the last message is the assistant's; continuing it (prefill) is not supported: end with a user message",
            param="messages",
        )
    return tuple(messages)


def read_tools(request: CountTokensRequest) -> tuple[ToolSpec, ...]:
    """The tools, in the shape in which the chat formats show them. Raises ``RequestError`` for server tools."""
    if request.mcp_servers:
        raise RequestError("mcp_servers are not supported: connect to them in the client", param="mcp_servers")
    return tools_of([_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools or ())])


def read_template(request: CountTokensRequest, *, enable_thinking: bool) -> dict[str, Any]:
    """The chat template's options: the server's default for thinking, then ``output_config.effort``, then
    ``thinking``, then ``chat_template_kwargs``, the later winning."""
    effort = request.output_config.effort if request.output_config is not None else None
    options = {"enable_thinking": enable_thinking} | effort_options(effort)
    if request.thinking is not None:
        options["enable_thinking"] = request.thinking.type != "disabled"
    return options | (request.chat_template_kwargs or {})


def read_sampling(request: MessagesRequest) -> SamplingParams:
    """The sampling settings. Raises ``RequestError`` for a value out of range."""
    return SamplingParams(
        max_new_tokens=request.max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=max(request.top_k or 0, 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        stop=stops(request.stop_sequences),
    )


def read_output(request: CountTokensRequest) -> JsonConstraint | None:
    """The form that the answer must have."""
    chosen = request.output_config.format if request.output_config is not None else None
    return None if chosen is None else JsonConstraint(chosen.json_schema)


def _without_billing(blocks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for index, block in enumerate(blocks):
        if not (isinstance(block, TextBlock) and block.text.startswith(BILLING_PREFIX)):
            yield f"system.{index}", block


def _texts(blocks: Iterable[tuple[str, Any]], where: str) -> list[str]:
    texts = []
    for param, block in blocks:
        if not isinstance(block, TextBlock):
            raise _refused(block.type, ("text",), where, param)
        if block.text:
            texts.append(block.text)
    return texts


def _check_kinds(role: str, blocks: Iterable[tuple[str, Any]]) -> None:
    for param, block in blocks:
        if isinstance(block, OtherBlock) or block.type not in _BY_ROLE[role]:
            raise _refused(block.type, _BY_ROLE[role], f"a message of role {role!r}", param)


def _refused(kind: str, valid: Iterable[str], where: str, param: str) -> RequestError:
    hint = "; this model reads text only" if kind in ("image", "document") else ""
    return RequestError(
        f"{param}: block type {kind!r} is not supported in {where}{hint}; valid: {', '.join(valid)}", param=param
    )


def _assistant(blocks: Iterable[Any]) -> Message:
    """The pieces of a turn are joined as they are: this server's own replies come back unchanged."""
    blocks = tuple(blocks)
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return Message(
        "assistant",
        "".join(block.text for block in _of(TextBlock, blocks)),
        "".join(thoughts) if thoughts else None,
        tuple(ToolCall(block.name, block.input, block.id) for block in _of(ToolUseBlock, blocks)),
    )


_AnyBlock = TypeVar("_AnyBlock", bound=_Wire)


def _of(kind: type[_AnyBlock], blocks: Iterable[Any]) -> Iterator[_AnyBlock]:
    return (block for block in blocks if isinstance(block, kind))


def _others(role: str, blocks: Iterable[tuple[str, Any]]) -> Iterator[Message]:
    """A user's or the system's turn: runs of text, and tool results between them, in order."""
    run: list[str] = []
    speaker: Literal["user", "system"] = "system" if role == "system" else "user"
    has_spoken = False
    for param, block in blocks:
        if isinstance(block, ToolResultBlock):
            if run:
                yield Message(speaker, "\n\n".join(run))
                run = []
            has_spoken = True
            yield Message("tool", _result(block, param), tool_call_id=block.tool_use_id)
        elif block.text:
            run.append(block.text)
    if run or not has_spoken:
        yield Message(speaker, "\n\n".join(run))


def _result(block: ToolResultBlock, param: str) -> str:
    """A result's text. The chat formats have no mark for a failed call, so a text that does not say so gets one."""
    places = ((f"{param}.content.{place}", part) for place, part in enumerate(block.content))
    text = "\n".join(_texts(places, "a tool result"))
    if block.is_error and "error" not in text.casefold():
        return f"Error: {text}" if text else "Error"
    return text


def _tool(tool: ToolParam, where: str) -> dict[str, Any]:
    """The tool in OpenAI's shape."""
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{where}: tools of type {tool.type!r} run on Anthropic's servers and are not supported; valid: custom",
            param=where,
        )
    if not tool.name.strip() or tool.input_schema is None:
        raise RequestError(f"{where}: a tool needs a name and an input_schema", param=where)
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    flags = {"strict": tool.strict, "defer_loading": tool.defer_loading}
    shown = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": shown | {key: True for key, value in flags.items() if value}}

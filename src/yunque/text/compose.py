"""A conversation as the sequence of pieces that its chat format writes, each with its author."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from yunque.core.errors import TemplateError
from yunque.core.records import Author, Message, ToolCall, ToolSpec
from yunque.text.formats import RULES, ChatFormat, FormatRules, TemplateOptions, effort_shown

TOOLS_HEADER = (
    "\n# Tools\n\n"
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n"
    "<tools>\n"
)
TOOLS_FOOTER = (
    "</tools>\n\n"
    "For each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)

NO_MESSAGE = -1


class PieceKind(Enum):
    """How a piece becomes ids."""

    TOKEN = auto()
    """One token of the vocabulary, by its spelling."""
    FIXED = auto()
    """Text of the format itself: the spelling of a token in it means that token."""
    PLAIN = auto()
    """Somebody's text: it stays text, whatever it looks like."""


@dataclass(frozen=True)
class Piece:
    """A run of text with one author, and the index of the message it belongs to (NO_MESSAGE for none)."""

    text: str
    kind: PieceKind
    author: Author
    message: int


def compose(
    chat_format: ChatFormat,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    options: TemplateOptions,
    *,
    add_generation_prompt: bool,
    close_last_turn: bool,
) -> list[Piece]:
    """Write a conversation. The rules are FormatRules; the arguments are those of ``Renderer.render``."""
    if not messages:
        raise TemplateError("a conversation needs at least one message")
    if add_generation_prompt and close_last_turn:
        raise TemplateError("close_last_turn ends the conversation, so no generation prompt can follow it")
    composer = _Composer(RULES[chat_format], messages, options)
    effort = effort_shown(chat_format, options)
    return [
        *composer.opening(tools, effort),
        *composer.conversation(close_last_turn),
        *(composer.generation_prompt() if add_generation_prompt else ()),
    ]


def tool_line(rules: FormatRules, tool: ToolSpec) -> str | None:
    """The JSON with which a tool is shown, or None if the format omits it."""
    if rules.shows_whole_tool:
        return json.dumps(tool.raw, ensure_ascii=False)
    if rules.omits_deferred_tools and tool.function.get("defer_loading"):
        return None
    shown = {key: value for key, value in tool.function.items() if key not in ("strict", "defer_loading")}
    return json.dumps(shown, ensure_ascii=False)


class _Composer:
    def __init__(self, rules: FormatRules, messages: Sequence[Message], options: TemplateOptions) -> None:
        self.rules = rules
        self.messages = messages
        self.thinks = rules.always_thinks or options.enable_thinking
        self.clears = rules.clears_thinking if options.clear_thinking is None else options.clear_thinking
        self.last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)

    def opening(self, tools: Sequence[ToolSpec], effort: str | None) -> Iterator[Piece]:
        yield _template("[gMASK]")
        yield _template("<sop>")
        if effort is not None:
            yield _template("<|system|>")
            line = f"Reasoning Effort: {effort.capitalize()}"
            yield Piece(line, PieceKind.FIXED, Author.TEMPLATE, NO_MESSAGE)
        if tools:
            yield _template("<|system|>")
            yield Piece(TOOLS_HEADER, PieceKind.FIXED, Author.TEMPLATE, NO_MESSAGE)
            for tool in tools:
                line = tool_line(self.rules, tool)
                if line is not None:
                    yield Piece(line + "\n", PieceKind.PLAIN, Author.TEMPLATE, NO_MESSAGE)
            yield Piece(TOOLS_FOOTER, PieceKind.FIXED, Author.TEMPLATE, NO_MESSAGE)

    def conversation(self, close_last_turn: bool) -> Iterator[Piece]:
        for index, message in enumerate(self.messages):
            if message.role == "assistant":
                yield _template("<|assistant|>", index)
                yield from self._assistant(index, message)
            elif message.role == "tool":
                if index == 0 or self.messages[index - 1].role != "tool":
                    yield self._turn_marker("<|observation|>", index)
                    yield from self._tool_results(index)
            else:
                yield self._turn_marker(f"<|{message.role}|>", index)
                yield Piece(message.content or "", PieceKind.PLAIN, message.author, index)
        last = self.messages[-1]
        if close_last_turn and last.role == "assistant":
            end = "<|observation|>" if last.tool_calls else "<|endoftext|>"
            yield _written(end, len(self.messages) - 1, PieceKind.TOKEN)

    def generation_prompt(self) -> Iterator[Piece]:
        yield _template("<|assistant|>")
        for token in ("<think>",) if self.thinks else self.rules.hidden_thought:
            yield _template(token)

    def _turn_marker(self, token: str, index: int) -> Piece:
        """A role marker. The assistant writes the ``<|user|>`` or ``<|observation|>`` that ends its turn."""
        ends_turn = token != "<|system|>" and index > 0 and self.messages[index - 1].role == "assistant"
        return _written(token, index - 1, PieceKind.TOKEN) if ends_turn else _template(token, index)

    def _assistant(self, index: int, message: Message) -> Iterator[Piece]:
        reasoning, content = self._split(message)
        yield from self._thought(index, reasoning)
        if content.strip():
            author = Author.TEMPLATE if message.content is None else Author.ASSISTANT
            yield Piece(content.strip(), PieceKind.PLAIN, author, index)
        for call in message.tool_calls:
            yield from _call(call, index)

    def _split(self, message: Message) -> tuple[str | None, str]:
        """Reasoning and content; reasoning may stand in the content, before ``</think>``."""
        content = self.rules.null_content if message.content is None else message.content
        if message.reasoning is not None or "</think>" not in content:
            return message.reasoning, content
        parts = content.split("</think>")
        if self.rules.trims_split_newlines:
            return parts[0].rstrip("\n").split("<think>")[-1].lstrip("\n"), parts[-1]
        return parts[0].split("<think>")[-1], parts[-1]

    def _thought(self, index: int, reasoning: str | None) -> Iterator[Piece]:
        """The thinking part. ``<think>`` belongs to the prompt; what follows it is the assistant's own.

        A thought that is hidden because the template dropped it, or that was off, is the template's
        altogether.
        """
        is_current = index > self.last_user
        is_kept = is_current or not self.clears
        if is_kept and (reasoning or (reasoning is not None and self.rules.shows_empty_reasoning)):
            yield _template("<think>", index)
            yield _written(reasoning.strip() if self.rules.strips_reasoning else reasoning, index)
            yield _written("</think>", index, PieceKind.TOKEN)
            return
        wraps = self.rules.wraps_missing_thought and is_current and self.thinks
        shown = ("<think>", "</think>") if wraps else self.rules.hidden_thought
        wrote_its_end = len(shown) == 2 and self.thinks and is_kept
        for token in shown:
            is_own = wrote_its_end and token == "</think>"
            yield _written(token, index, PieceKind.TOKEN) if is_own else _template(token, index)

    def _tool_results(self, start: int) -> Iterator[Piece]:
        """The run of tool messages that begins at ``start``."""
        stop = start
        while stop < len(self.messages) and self.messages[stop].role == "tool":
            stop += 1
        order = self._by_call(start, stop) if self.rules.orders_tool_results else None
        for index in order or range(start, stop):
            yield _template("<tool_response>", index)
            yield Piece(self.messages[index].content or "", PieceKind.PLAIN, Author.TOOL, index)
            yield _template("</tool_response>", index)

    def _by_call(self, start: int, stop: int) -> list[int] | None:
        """The run's indices in the order of the calls, or None when ids are missing, repeated or strange."""
        calls = self.messages[start - 1].tool_calls if start > 0 else ()
        call_ids = [call.id for call in calls]
        index_of = {self.messages[index].tool_call_id: index for index in range(start, stop)}
        are_complete = all(call_ids) and all(index_of)
        are_unique = len(set(call_ids)) == len(call_ids) and len(index_of) == stop - start
        if not (are_complete and are_unique and index_of.keys() <= set(call_ids)):
            return None
        return [index_of[call_id] for call_id in call_ids if call_id in index_of]


def _call(call: ToolCall, index: int) -> Iterator[Piece]:
    yield _written("<tool_call>", index, PieceKind.TOKEN)
    yield _written(call.name, index)
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield _written("<arg_key>", index, PieceKind.TOKEN)
        yield _written(key, index)
        yield _written("</arg_key>", index, PieceKind.TOKEN)
        yield _written("<arg_value>", index, PieceKind.TOKEN)
        yield _written(text, index)
        yield _written("</arg_value>", index, PieceKind.TOKEN)
    yield _written("</tool_call>", index, PieceKind.TOKEN)


def _template(token: str, message: int = NO_MESSAGE) -> Piece:
    return Piece(token, PieceKind.TOKEN, Author.TEMPLATE, message)


def _written(text: str, message: int, kind: PieceKind = PieceKind.PLAIN) -> Piece:
    return Piece(text, kind, Author.ASSISTANT, message)

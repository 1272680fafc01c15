"""The four GLM-5 chat formats as data: what each release does differently, and the options they take."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypedDict

from yunque.core.errors import TemplateError, unknown


class ChatFormat(StrEnum):
    """Which release's chat template a conversation is written in."""

    GLM_5 = "glm-5"
    GLM_5_1 = "glm-5.1"
    GLM_5_2 = "glm-5.2"
    GLM_5_3 = "glm-5.3"

    @staticmethod
    def named(name: str) -> "ChatFormat":
        """The format of that name; TemplateError lists the valid ones."""
        try:
            return ChatFormat(name)
        except ValueError as error:
            raise TemplateError(unknown("chat format", name, ChatFormat)) from error


class EffortLine(StrEnum):
    """When a format opens with the system line ``Reasoning Effort: X``."""

    NEVER = "never"
    WHILE_THINKING = "while thinking"
    ALWAYS = "always"


@dataclass(frozen=True)
class FormatRules:
    """What distinguishes one release's template from the others; everything else is common to the four.

    Sources: the published templates of GLM-4.7, 5.2 and 5.3 and independent renderers of 5, 5.1, 5.2 and 5.3.
    Where published revisions of GLM-5.2 differ (null content, order of tool results) the later one is
    followed.
    """

    effort_line: EffortLine
    """When the effort line stands right after ``[gMASK]<sop>``."""
    effort_levels: tuple[str, ...]
    """Values of ``reasoning_effort`` that are kept; every other value, and none, means ``max``."""
    shows_whole_tool: bool
    """Tools are shown as given; otherwise the inner ``function`` without ``strict`` and ``defer_loading``."""
    omits_deferred_tools: bool
    """Tools whose function has a true ``defer_loading`` are left out."""
    always_thinks: bool
    """``enable_thinking=false`` has no effect (smg-project/smg#2538)."""
    clears_thinking: bool
    """Default of ``clear_thinking``: reasoning before the last user message is dropped."""
    hidden_thought: tuple[str, ...]
    """What stands for a thought that is not shown, and ends the generation prompt when thinking is off."""
    wraps_missing_thought: bool
    """A turn without reasoning after the last user message shows ``<think></think>`` while thinking is on."""
    shows_empty_reasoning: bool
    """Reasoning that is ``""`` counts as reasoning: the test is "defined", not "non-empty"."""
    strips_reasoning: bool
    """Reasoning is shown without the white space around it."""
    trims_split_newlines: bool
    """Newlines around reasoning that was found inside the content are removed."""
    null_content: str
    """How content None is shown."""
    orders_tool_results: bool
    """Tool results follow the order of their calls when all ids are there, unique, and name a call."""


_EMPTY_THOUGHT = ("<think>", "</think>")

RULES: dict[ChatFormat, FormatRules] = {
    ChatFormat.GLM_5: FormatRules(
        effort_line=EffortLine.NEVER,
        effort_levels=(),
        shows_whole_tool=True,
        omits_deferred_tools=False,
        always_thinks=False,
        clears_thinking=True,
        hidden_thought=("</think>",),
        wraps_missing_thought=False,
        shows_empty_reasoning=False,
        strips_reasoning=True,
        trims_split_newlines=True,
        null_content="None",
        orders_tool_results=False,
    ),
    ChatFormat.GLM_5_1: FormatRules(
        effort_line=EffortLine.NEVER,
        effort_levels=(),
        shows_whole_tool=False,
        omits_deferred_tools=False,
        always_thinks=False,
        clears_thinking=True,
        hidden_thought=("</think>",),
        wraps_missing_thought=True,
        shows_empty_reasoning=True,
        strips_reasoning=False,
        trims_split_newlines=True,
        null_content="None",
        orders_tool_results=False,
    ),
    ChatFormat.GLM_5_2: FormatRules(
        effort_line=EffortLine.WHILE_THINKING,
        effort_levels=("high",),
        shows_whole_tool=False,
        omits_deferred_tools=True,
        always_thinks=False,
        clears_thinking=True,
        hidden_thought=_EMPTY_THOUGHT,
        wraps_missing_thought=False,
        shows_empty_reasoning=True,
        strips_reasoning=False,
        trims_split_newlines=False,
        null_content="",
        orders_tool_results=True,
    ),
    ChatFormat.GLM_5_3: FormatRules(
        effort_line=EffortLine.ALWAYS,
        effort_levels=("low", "high"),
        shows_whole_tool=False,
        omits_deferred_tools=True,
        always_thinks=True,
        clears_thinking=False,
        hidden_thought=_EMPTY_THOUGHT,
        wraps_missing_thought=False,
        shows_empty_reasoning=True,
        strips_reasoning=False,
        trims_split_newlines=False,
        null_content="",
        orders_tool_results=True,
    ),
}


class TemplateKwargs(TypedDict, total=False):
    """The ``chat_template_kwargs`` that the formats take."""

    enable_thinking: bool
    clear_thinking: bool | None
    reasoning_effort: str | None


@dataclass(frozen=True)
class TemplateOptions:
    """Checked chat template options. None means the format's own default.

    ``reasoning_effort`` may be any text, as in the released templates: a level that the format does not know
    means ``max`` (``effort_shown`` tells which is in force), and GLM-5 and 5.1 do not show it at all.
    """

    enable_thinking: bool = True
    clear_thinking: bool | None = None
    reasoning_effort: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.enable_thinking, bool):
            raise TemplateError(f"enable_thinking must be true or false, got {self.enable_thinking!r}")
        if not isinstance(self.clear_thinking, bool | None):
            raise TemplateError(f"clear_thinking must be true, false or null, got {self.clear_thinking!r}")
        if not isinstance(self.reasoning_effort, str | None):
            raise TemplateError(f"reasoning_effort must be text or null, got {self.reasoning_effort!r}")

    @staticmethod
    def from_kwargs(kwargs: Mapping[str, Any]) -> "TemplateOptions":
        """Read ``chat_template_kwargs``; TemplateError names an unknown key and the valid ones.

        A released template ignores a key it does not know, such as ``thinking``, so that thinking stays on
        without a word (sgl-project/sglang#28454).
        """
        valid = TemplateKwargs.__annotations__
        for key in kwargs:
            if key not in valid:
                raise TemplateError(unknown("chat template option", key, valid))
        return TemplateOptions(**kwargs)


def effort_shown(chat_format: ChatFormat, options: TemplateOptions) -> str | None:
    """The effort level (``low``, ``high`` or ``max``) that the prompt states, or None if it states none."""
    rules = RULES[chat_format]
    thinks = rules.always_thinks or options.enable_thinking
    if rules.effort_line is EffortLine.NEVER:
        return None
    if rules.effort_line is EffortLine.WHILE_THINKING and not thinks:
        return None
    effort = options.reasoning_effort
    return effort if effort in rules.effort_levels else "max"

"""Tokenizer, GLM special tokens, chat formats and the parser of generated turns; imports without torch."""

from yunque.text.chat_template import CHAT_TEMPLATE_FILE, chat_template, format_of
from yunque.text.events import (
    Event,
    FailureReason,
    Malformed,
    ParsedTurn,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from yunque.text.formats import ChatFormat, TemplateKwargs, TemplateOptions, effort_shown
from yunque.text.parse import TurnParser
from yunque.text.render import Rendered, Renderer, TurnSpan
from yunque.text.special import CONTROL_TOKENS, RELEASED_IDS, TAG_TOKENS, SpecialTokens
from yunque.text.tokenizer import IncrementalDecoder, Tokenizer, train_bpe

__all__ = [
    "CHAT_TEMPLATE_FILE",
    "CONTROL_TOKENS",
    "RELEASED_IDS",
    "TAG_TOKENS",
    "ChatFormat",
    "Event",
    "FailureReason",
    "IncrementalDecoder",
    "Malformed",
    "ParsedTurn",
    "ReasoningDelta",
    "Rendered",
    "Renderer",
    "SpecialTokens",
    "TemplateKwargs",
    "TemplateOptions",
    "TextDelta",
    "Tokenizer",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "TurnParser",
    "TurnSpan",
    "chat_template",
    "effort_shown",
    "format_of",
    "train_bpe",
]

"""The Jinja text of each chat format, for engines that render with ``chat_template.jinja``."""

import json
from dataclasses import asdict
from importlib.resources import files

from yunque.text.formats import RULES, ChatFormat

CHAT_TEMPLATE_FILE = "chat_template.jinja"


def chat_template(chat_format: ChatFormat | str) -> str:
    """The template text that belongs into ``chat_template.jinja`` beside a checkpoint of that format.

    It renders what ``Renderer.render_text`` gives, in the environment that ``transformers`` sets up. Its
    first line is the format's FormatRules; the rest is one text for all formats. It takes tool arguments as
    objects or as JSON strings (zai-org/GLM-5#158) and content as text or as text parts, and keeps to what
    small Jinja engines have: no ``x.0`` (noonghunna/club-3090#1255), no ``break``, no value carried from one
    message to the next by scope.
    """
    chat_format = ChatFormat.named(chat_format)
    rules = json.dumps(asdict(RULES[chat_format]))
    body = files("yunque.text").joinpath("templates", "chat.jinja").read_text("utf-8")
    return f"{{#- {chat_format} -#}}\n{{%- set rules = {rules} -%}}\n{body}"


def format_of(template: str) -> ChatFormat | None:
    """The format whose ``chat_template`` is ``template``; None for a text that is none of ours."""
    return next((name for name in ChatFormat if chat_template(name) == template), None)

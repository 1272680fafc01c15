"""Which chat format a command writes messages in."""

from __future__ import annotations

from pathlib import Path

from yunque.core.logging import get_logger
from yunque.text.chat_template import CHAT_TEMPLATE_FILE, format_of
from yunque.text.formats import ChatFormat

CHAT_FORMATS = tuple(str(chat_format) for chat_format in ChatFormat)
_log = get_logger(__name__)


def chat_format_in(folder: Path) -> str:
    """The chat format of the folder's template; where that is none of ours, the first one, with a warning."""
    template = folder / CHAT_TEMPLATE_FILE
    found = format_of(template.read_text("utf-8", errors="replace")) if template.exists() else None
    if found is not None:
        return found
    fault = "is none of Yunque's four" if template.exists() else "does not exist"
    _log.warning(
        "%s %s: messages are written as in %s; choose with --chat-format (%s)",
        *(template, fault, CHAT_FORMATS[0], ", ".join(CHAT_FORMATS)),
    )
    return CHAT_FORMATS[0]

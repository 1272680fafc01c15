"""Where the messages of a chat come from: a person at a terminal, or a pipe."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

try:
    import readline
except ImportError:  # a system without it: no editing, no history
    readline = None  # type: ignore[assignment]

HISTORY_LINES = 1000
_FENCE = "```"
_PASTE_S = 0.03


class Prompter(Protocol):
    """Gives messages and commands."""

    def read(self) -> str | None:
        """The next one; None at the end."""
        ...


def read_message(next_line: Callable[[bool], str | None], has_more: Callable[[], bool]) -> str | None:
    """A message of one or more lines; None where no line comes any more.

    It goes on after a line that ends in a backslash, until an open fence is closed, and while ``has_more`` says that
    the rest of what was pasted waits. ``next_line`` is told whether a message has begun.
    """
    text, has_begun = "", False
    while (line := next_line(has_begun)) is not None:
        has_begun = True
        is_open = sum(part.lstrip().startswith(_FENCE) for part in (text + line).split("\n")) % 2 == 1
        if is_open or has_more():
            text += line + "\n"
        elif line.endswith("\\"):
            text += line[:-1] + "\n"
        else:
            return text + line
    return text.removesuffix("\n") if has_begun else None


class PipedInput:
    """Messages from a file or pipe: one a line (with the same ways to go on), or all of it as one."""

    def __init__(self, stream: TextIO, *, is_whole: bool) -> None:
        self._stream = stream
        self._is_whole = is_whole

    def read(self) -> str | None:
        """The next message that is not empty."""
        if self._is_whole:
            return self._stream.read().strip("\n") or None
        while (text := read_message(self._line, lambda: False)) is not None:
            if text.strip():
                return text
        return None

    def _line(self, has_begun: bool) -> str | None:  # noqa: ARG002 - pipes see no prompt
        line = self._stream.readline()
        return line.rstrip("\r\n") if line else None


class TerminalInput:
    """Messages typed at a terminal, with editing and a history that outlives the program where readline is there."""

    def __init__(self, history: History | None = None) -> None:
        self._history = history
        if readline is not None:
            readline.set_auto_history(False)
            with suppress(Exception):  # libedit knows no such setting
                readline.parse_and_bind("set enable-bracketed-paste on")
            for text in history.load() if history is not None else ():
                readline.add_history(text)

    def read(self) -> str | None:
        """The next message; None after the end-of-file key. ``KeyboardInterrupt`` gives up what was typed."""
        text = read_message(self._line, _is_waiting)
        if text is not None and text.strip() and readline is not None:
            readline.add_history(text)
            if self._history is not None:
                self._history.add(text)
        return text

    @staticmethod
    def _line(has_begun: bool) -> str | None:
        try:
            return input(_bold("… " if has_begun else "> "))
        except EOFError:
            return None


class History:
    """What was typed, one JSON string a line, the newest last. A file that cannot be read or written is no history."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[str]:
        """The last entries; a longer file is cut to them."""
        try:
            lines = self._path.read_text("utf-8", errors="replace").splitlines()
        except OSError:
            return []
        if len(lines) > 2 * HISTORY_LINES:
            with suppress(OSError):
                self._path.write_text("\n".join(lines[-HISTORY_LINES:]) + "\n", "utf-8")
        return [entry for line in lines[-HISTORY_LINES:] if (entry := _entry(line))]

    def add(self, text: str) -> None:
        """Append an entry; only the user may read the file."""
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with open(descriptor, "a", encoding="ascii") as file:
                file.write(json.dumps(text) + "\n")


def state_folder() -> Path:
    """Where programs keep what they remember of their user (XDG's state directory)."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "yunque"


def _entry(line: str) -> str | None:
    try:
        value: Any = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _is_waiting() -> bool:
    """Whether more input has come already: the rest of what was pasted."""
    return bool(select.select([sys.stdin], [], [], _PASTE_S)[0])


def _bold(prompt: str) -> str:
    """The marks tell readline which characters take no room."""
    return f"\001\033[1m\002{prompt}\001\033[0m\002" if readline is not None else prompt

"""How a chat looks: the answer as it comes, the thought dimmed or folded, tools and figures in dim lines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TextIO

from yunque.agents import (
    CallDelta,
    ChatReply,
    LoopDone,
    LoopEnd,
    LoopEvent,
    ToolEnded,
    ToolStarted,
)
from yunque.core.records import ToolCall
from yunque.text.events import ReasoningDelta, TextDelta

_DIM, _PLAIN, _CLEAR_LINE = "\033[2m", "\033[0m", "\r\033[K"
_RESULT_CHARS = 400
# What would move the cursor, change colours or ring is shown as a replacement character.
_HARMLESS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class ChatView:
    """Writes what a loop does. On a terminal everything goes to ``out``; elsewhere ``out`` gets the answers alone,
    and ``aside`` tools and figures, while thoughts are left out."""

    def __init__(
        self,
        out: TextIO,
        aside: TextIO,
        *,
        is_terminal: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folds_thoughts = False
        self.text = ""
        """The answer so far of the reply that is being made."""
        self._out = out
        self._aside = out if is_terminal else aside
        self._is_terminal = is_terminal
        self._clock = clock
        self._part = ""
        self._thought_chars = 0
        self._begin_s = 0.0
        self._first_s: float | None = None
        self._seconds = 0.0
        self._replies: list[ChatReply] = []

    def begin(self) -> None:
        """An exchange begins."""
        self._replies, self._seconds = [], 0.0
        self._begin_reply()

    def show(self, event: LoopEvent) -> None:
        """Write one event."""
        match event:
            case ReasoningDelta(text):
                self._start("thought")
                self._think(text)
            case TextDelta(text):
                self._start("answer")
                self.text += text
                self._write(text)
            case CallDelta():
                self._start("call")
            case ChatReply():
                self._close()
                if self._first_s is not None:
                    self._seconds += self._clock() - self._first_s
                self._replies.append(event)
            case ToolStarted(call):
                self.note(f"→ {_call_text(call)}")
            case ToolEnded(call, result):
                self.note(f"{'✗' if result.is_error else '←'} {call.name}: {_short(result.text)}")
                self._begin_reply()
            case LoopDone():
                self._end(event)
            case _:
                self._begin_reply()

    def stopped(self) -> None:
        """The reply was stopped by its reader."""
        self._close()
        self.note("stopped")

    def note(self, text: str) -> None:
        """A dim line."""
        self._close()
        shown = _harmless(text)
        print(f"{_DIM}{shown}{_PLAIN}" if self._is_terminal else shown, file=self._aside, flush=True)

    def _begin_reply(self) -> None:
        self.text = ""
        self._begin_s, self._first_s = self._clock(), None

    def _start(self, part: str) -> None:
        if self._first_s is None:
            self._first_s = self._clock()
        if self._part == part:
            return
        self._close()
        self._part, self._thought_chars = part, 0
        if part == "thought" and self._is_terminal and not self.folds_thoughts:
            self._out.write(_DIM)

    def _think(self, text: str) -> None:
        self._thought_chars += len(text)
        if not self._is_terminal:
            return
        if self.folds_thoughts:
            self._write(f"{_CLEAR_LINE}{_DIM}thinking … {self._thought_chars} characters{_PLAIN}", is_ours=True)
        else:
            self._write(text)

    def _close(self) -> None:
        """End the part that is being written, with its line."""
        part, self._part = self._part, ""
        if part == "thought" and self._is_terminal:
            if self.folds_thoughts:
                self._write(f"{_CLEAR_LINE}{_DIM}thought for {self._thought_chars} characters", is_ours=True)
            self._write(f"{_PLAIN}\n", is_ours=True)
        elif part == "answer":
            self._write("\n", is_ours=True)

    def _end(self, done: LoopDone) -> None:
        if done.end is LoopEnd.MAX_TURNS:
            self.note(f"stopped after {done.turns} turns; the last calls were not run")
        elif done.end is LoopEnd.LENGTH:
            self.note("cut: the length is reached")
        for bad in done.reply.bad_calls:
            self.note(f"unusable call: {bad.reason}")
        self.note(self._figures())

    def _figures(self) -> str:
        usages = [reply.usage for reply in self._replies]
        tokens = sum(usage.completion_tokens for usage in usages)
        parts = [f"{tokens} tokens"]
        if self._seconds > 0 and tokens > 1:
            parts.append(f"{tokens / self._seconds:.1f} tokens/s")
        if drafted := sum(usage.drafted for usage in usages):
            accepted = sum(usage.accepted for usage in usages)
            parts.append(f"{100 * accepted / drafted:.0f} % of {drafted} drafts accepted")
        if usages and usages[-1].prompt_tokens:
            parts.append(f"{usages[-1].cached_tokens} of {usages[-1].prompt_tokens} prompt tokens cached")
        return ", ".join(parts)

    def _write(self, text: str, *, is_ours: bool = False) -> None:
        self._out.write(text if is_ours else _harmless(text))
        self._out.flush()


def _harmless(text: str) -> str:
    return text.translate(_HARMLESS)


def _call_text(call: ToolCall) -> str:
    arguments = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in call.arguments.items())
    return _short(f"{call.name}({arguments})")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _RESULT_CHARS else f"{text[:_RESULT_CHARS]} … ({len(text)} characters)"

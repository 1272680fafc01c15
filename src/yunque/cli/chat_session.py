"""One conversation at the command line: what was said, what may be used, and the commands that change it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yunque.agents import ChatClient, ChatOptions, Toolset, TurnAdded, converse, load_tools
from yunque.cli.chat_view import ChatView
from yunque.core.errors import ConfigError, unknown
from yunque.core.records import Message

HELP = """\
/system TEXT        what the assistant is told first (without TEXT: nothing)
/tools FILE.py      run FILE.py and offer its public, typed functions as tools (without FILE: list them; off: none)
/think on|off       ask for replies with or without a thought
/fold on|off        show of a thought only how long it is
/temperature T      0: the best token; without T: what is set
/clear              forget the conversation
/retry              answer the last message again
/save FILE.jsonl    append the conversation to FILE.jsonl as one line of JSON
/help               this list
/quit               end (Ctrl-D too); Ctrl-C stops a reply
A message goes on after a line that ends in \\, and until an open ``` is closed. A space before / makes it text."""


@dataclass(frozen=True)
class SessionSettings:
    """``max_turns``: the most replies to one message. ``seed`` None: every reply differs."""

    max_turns: int = 16
    seed: int | None = None
    system: str | None = None


class ChatSession:
    """A conversation with one client."""

    def __init__(
        self, client: ChatClient, view: ChatView, options: ChatOptions, settings: SessionSettings, tools: Toolset
    ) -> None:
        self._client = client
        self._view = view
        self._options = options
        self._settings = settings
        self._system = settings.system
        self._tools = tools
        self._messages: list[Message] = []
        self._asked: str | None = None
        self._num_replies = 0
        self.is_over = False
        self._commands: dict[str, Callable[[str], Awaitable[None] | None]] = {
            "system": self._set_system,
            "tools": self._set_tools,
            "think": self._set_thinking,
            "fold": self._set_folding,
            "temperature": self._set_temperature,
            "clear": self._clear,
            "retry": self._retry,
            "save": self._save,
            "help": lambda _: self._view.note(HELP),
            "quit": self._quit,
        }

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, the system message first."""
        system = () if self._system is None else (Message("system", self._system),)
        return (*system, *self._messages)

    async def take(self, text: str) -> None:
        """Answer a message, or obey a command (``/word ...``). Raises ``YunqueError`` for what cannot be done."""
        if not text.startswith("/"):
            await self._answer(text[1:] if text.startswith(" /") else text)
            return
        word, _, rest = text[1:].partition(" ")
        command = self._commands.get(word)
        if command is None:
            raise ConfigError(unknown("command", word, self._commands) + " (a message may begin with a space)")
        done = command(rest.strip())
        if done is not None:
            await done

    async def _answer(self, text: str) -> None:
        """Answer a message. Where no reply comes the message is forgotten (``/retry`` sends it again); what a stopped
        reply had said is kept."""
        self._asked = text
        begin = len(self._messages)
        self._messages.append(Message("user", text))
        seed = self._settings.seed
        options = replace(self._options, seed=None if seed is None else seed + self._num_replies)
        self._num_replies += 1
        self._view.begin()
        is_whole = False
        try:
            loop = converse(
                self._client, self.messages, self._tools, options=options, max_turns=self._settings.max_turns
            )
            async with aclosing(loop) as events:
                async for event in events:
                    self._view.show(event)
                    if isinstance(event, TurnAdded):
                        self._messages += event.messages
            is_whole = True
        finally:
            if not is_whole:
                if self._view.text:
                    self._messages.append(Message("assistant", self._view.text))
                if len(self._messages) == begin + 1:
                    del self._messages[begin:]

    async def _retry(self, _: str) -> None:
        if self._asked is None:
            raise ConfigError("there is no message to answer again")
        asked = self._asked
        same = [place for place, said in enumerate(self._messages) if said.role == "user" and said.content == asked]
        if same:
            del self._messages[same[-1] :]
        await self._answer(asked)

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._view.note(f"system: {text}" if text else "no system message")

    def _set_tools(self, name: str) -> None:
        if name == "off":
            self._tools = Toolset()
        elif name:
            self._view.note(f"running {name}")
            self._tools = Toolset(load_tools(name))
        self._view.note(tools_line(self._tools))

    def _set_thinking(self, word: str) -> None:
        self._options = replace(self._options, enable_thinking=_switch(word, "think"))
        self._view.note(f"thinking {word}")

    def _set_folding(self, word: str) -> None:
        self._view.folds_thoughts = _switch(word, "fold")
        self._view.note(f"folding {word}")

    def _set_temperature(self, word: str) -> None:
        if word:
            try:
                value = float(word)
            except ValueError:
                raise ConfigError(f"temperature {word!r} is not a number") from None
            if not 0 <= value <= 100:
                raise ConfigError(f"temperature {word} is not between 0 and 100")
            self._options = replace(self._options, temperature=value)
        shown = self._options.temperature
        self._view.note(f"temperature {'as the server sets it' if shown is None else f'{shown:g}'}")

    def _clear(self, _: str) -> None:
        self._messages, self._asked = [], None
        self._view.note("the conversation is forgotten")

    def _save(self, name: str) -> None:
        if not name:
            raise ConfigError("/save needs a file: /save FILE.jsonl")
        row: dict[str, Any] = {"messages": [message.to_openai() for message in self.messages]}
        if len(self._tools):
            row["tools"] = [dict(spec.raw) for spec in self._tools.specs]
        with open(Path(name).expanduser(), "a", encoding="utf-8", errors="replace") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._view.note(f"{len(self.messages)} messages appended to {name}")

    def _quit(self, _: str) -> None:
        self.is_over = True


def tools_line(tools: Toolset) -> str:
    """The tools and their parameters."""
    shown = [f"{tool.spec.name}({', '.join(tool.spec.parameters.get('properties', {}))})" for tool in tools]
    return f"tools: {', '.join(shown)}" if shown else "no tools"


def _switch(word: str, command: str) -> bool:
    if word not in ("on", "off"):
        raise ConfigError(f"/{command} {word}".rstrip() + f" is not clear; valid: /{command} on, /{command} off")
    return word == "on"

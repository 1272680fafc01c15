"""What the settings of every kind of source share."""

import codecs
from dataclasses import dataclass
from typing import Literal

from yunque.core.checks import at_least
from yunque.data.report import OnBad

ThinkingMode = Literal["interleaved", "preserved", "off"]


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Settings common to all sources; abstract: a source is one of its subclasses.

    ``split`` "auto" divides the source by ``held_out_share``; "train" or "held_out" gives all of it to one
    side. ``max_epochs`` is how often training may read it (0: without end). ``on_bad`` "report" counts bad
    input and goes on, "stop" raises at the first.
    """

    split: Literal["auto", "train", "held_out"] = "auto"
    max_epochs: int = 0
    on_bad: OnBad = "report"

    def __post_init__(self) -> None:
        at_least(0, max_epochs=self.max_epochs)


@dataclass(frozen=True, kw_only=True)
class FileSource(SourceConfig):
    """Settings common to sources of files; abstract.

    ``path`` is a file, a folder (its files that end in one of ``extensions``, at any depth) or a glob,
    relative to the current folder. No document, and no line, has more than ``max_chars`` characters.
    """

    path: str
    extensions: tuple[str, ...] = ()
    max_chars: int = 16_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, max_chars=self.max_chars)


@dataclass(frozen=True, kw_only=True)
class TextFileSource(FileSource):
    """Settings common to sources of text files; abstract. ``encoding`` is a name that Python knows."""

    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            codecs.lookup(self.encoding)
        except LookupError as error:
            raise ValueError(f"encoding {self.encoding!r} is unknown; examples: utf-8, latin-1, gb18030") from error


@dataclass(frozen=True, kw_only=True)
class ChatSource(SourceConfig):
    """Settings common to sources of conversations; abstract.

    ``thinking`` "interleaved" shows earlier reasoning as the chat format does by default; "preserved" keeps
    all of it in context; "off" removes it and trains answers without thinking. ``reasoning_effort`` is passed
    to the format.
    """

    thinking: ThinkingMode = "interleaved"
    reasoning_effort: Literal["low", "high", "max"] | None = None

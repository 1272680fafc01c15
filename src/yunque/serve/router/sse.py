"""Server-sent events cut out of a stream of bytes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from yunque.protocol.sse import encode_event

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Event:
    """One event: ``raw`` with the empty line that ends it, ``data`` joined, ``name`` the event field."""

    raw: bytes
    data: str
    name: str = ""

    @property
    def is_done(self) -> bool:
        return self.data.strip() == "[DONE]"

    def json(self) -> dict[str, Any] | None:
        """The data as a JSON object; None where it is something else."""
        try:
            value = json.loads(self.data)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


class EventTooLong(ValueError):
    """An event has no end within the allowed bytes."""


def encode(data: dict[str, Any], *, name: str = "") -> bytes:
    """One event that carries ``data``."""
    return encode_event(json.dumps(data), event=name or None)


async def events(chunks: AsyncIterator[bytes], *, max_bytes: int = 256 * 2**20) -> AsyncIterator[Event]:
    """Events as soon as each is complete. Raises ``EventTooLong``; bytes after the last empty line are dropped: the
    event was cut off."""
    held = bytearray()
    searched = 0
    async for chunk in chunks:
        held += chunk
        while (cut := _end(held, max(0, searched - 3))) is not None:
            yield _read(bytes(held[:cut]))
            del held[:cut]
            searched = 0
        searched = len(held)
        if len(held) > max_bytes:
            raise EventTooLong(f"an event is longer than {max_bytes} bytes")


def _end(held: bytearray, start: int) -> int | None:
    """Where the first event ends: after an empty line, by either kind of line end."""
    ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := held.find(mark, start)) >= 0]
    return min(ends, default=None)


def _read(raw: bytes) -> Event:
    data, name = [], ""
    for line in raw.decode("utf-8", "replace").split("\n"):  # not splitlines: JSON may hold U+2028
        field, _, value = line.removesuffix("\r").partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
        elif field == "event":
            name = value.strip()
    return Event(raw, "\n".join(data), name)

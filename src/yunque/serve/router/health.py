"""Whether an engine may be used: heartbeats, ejection, return, and how long to wait before asking again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Sign(StrEnum):
    """What was seen of an engine."""

    OK = "ok"
    """It says that it can make a token."""
    PAUSED = "paused"
    """It lives and holds requests until it is resumed (weights are being exchanged)."""
    UNWELL = "unwell"
    """It answers, and says that it cannot make a token."""
    SILENT = "silent"
    """Nothing came: refused, cut off, or too late."""


class State(StrEnum):
    STARTING = "starting"
    """Never seen well: it may be loading its weights."""
    USABLE = "usable"
    EJECTED = "ejected"


@dataclass(frozen=True)
class HeartbeatSettings:
    """Ask every ``interval_s``, wait ``timeout_s`` for an answer, eject after ``eject_after`` bad signs in a row,
    take back after ``return_after`` good ones. The wait doubles for an ejected engine up to ``backoff_max_s``."""

    interval_s: float = 2.0
    timeout_s: float = 5.0
    eject_after: int = 3
    return_after: int = 2
    backoff_max_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("interval_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("eject_after", "return_after"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.backoff_max_s < self.interval_s:
            raise ValueError(f"backoff_max_s is {self.backoff_max_s}; it must be at least interval_s {self.interval_s}")


class EngineHealth:
    """The state of one engine, moved by what is seen of it. Time is passed in."""

    def __init__(self, settings: HeartbeatSettings, *, now_s: float) -> None:
        self._settings = settings
        self._bad_in_a_row = 0
        self._good_in_a_row = 0
        self._wait_s = settings.interval_s
        self.state = State.STARTING
        self.last_sign: Sign | None = None
        self.reason = "not asked yet"
        self.next_probe_s = now_s

    @property
    def is_usable(self) -> bool:
        return self.state is State.USABLE

    def observe(self, sign: Sign, *, now_s: float, reason: str = "") -> bool:
        """Take a heartbeat's answer into account; returns whether this ejected the engine."""
        is_ejected_now = self._count(sign, reason)
        if self.is_usable or sign in (Sign.OK, Sign.PAUSED):
            self._wait_s = self._settings.interval_s
        elif self.state is State.EJECTED and not is_ejected_now:
            self._wait_s = min(self._wait_s * 2, self._settings.backoff_max_s)
        self.next_probe_s = now_s + self._wait_s
        return is_ejected_now

    def blame(self, sign: Sign, *, now_s: float, reason: str) -> bool:
        """A request failed at the engine. Counts like a bad heartbeat, and the next heartbeat is due now; returns
        whether this ejected the engine."""
        is_ejected_now = self._count(sign, reason) if self.is_usable else False
        if self.is_usable:
            self.next_probe_s = min(self.next_probe_s, now_s)
        return is_ejected_now

    def _count(self, sign: Sign, reason: str) -> bool:
        self.last_sign, self.reason = sign, reason
        if sign in (Sign.OK, Sign.PAUSED):
            self._bad_in_a_row = 0
            self._good_in_a_row += 1
            needed = 1 if self.state is State.STARTING else self._settings.return_after
            if self._good_in_a_row >= needed:
                self.state = State.USABLE
            return False
        self._good_in_a_row = 0
        self._bad_in_a_row += 1
        if self.state is State.USABLE and self._bad_in_a_row >= self._settings.eject_after:
            self.state = State.EJECTED
            return True
        return False

"""How a client reaches a server: key, time-outs, repeated tries."""

from dataclasses import dataclass

from yunque.core.errors import ConfigError


@dataclass(frozen=True)
class HttpSettings:
    """Settings of one client. Raises ``ConfigError``.

    A server is silent while it makes a whole reply: ``read_timeout_s`` bounds the longest one. A request that may be
    tried again is tried ``attempts`` times in all, after ``backoff_s`` and then twice as long each time, at most
    ``backoff_max_s``; a server's own ``Retry-After`` goes first, and one above ``retry_after_max_s`` ends the tries.
    """

    api_key: str | None = None
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 3600.0
    attempts: int = 5
    backoff_s: float = 0.25
    backoff_max_s: float = 8.0
    retry_after_max_s: float = 60.0
    max_connections: int = 1024

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "read_timeout_s", "attempts", "max_connections"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("backoff_s", "backoff_max_s", "retry_after_max_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.api_key is not None and not (self.api_key.strip() and self.api_key.isascii()):
            raise ConfigError("the API key is empty or holds characters that no header can")

"""How a server listens, whom it answers, and how much it takes on."""

import ipaddress
from dataclasses import dataclass

from yunque.core.errors import ConfigError


@dataclass(frozen=True)
class ServeSettings:
    """Settings of one HTTP server. Raises ``ConfigError``.

    ``api_keys``: one of them must come with every request (none: everybody is answered, on loopback only).
    ``admin_key`` opens the admin routes; without one they are closed. ``max_concurrent`` replies are made at once,
    ``max_queued`` more requests wait, the next one is answered 429. A body must arrive within ``body_timeout_s``;
    all bodies together may take ``bodies_limit_bytes``, the next one is answered 429. A client that takes nothing of
    its reply for ``send_timeout_s`` is cut off (Linux).
    A stop signal drains: replies in flight get ``drain_timeout_s`` to end, then they are handed back as they are.
    ``accepts_any_model`` answers requests for other model names too.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    body_limit_bytes: int = 32 * 2**20
    bodies_limit_bytes: int = 512 * 2**20
    body_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    max_concurrent: int = 256
    max_queued: int = 256
    retry_after_s: float = 1.0
    keep_alive_s: float = 75.0
    ping_interval_s: float = 15.0
    drain_timeout_s: float = 30.0
    enable_thinking: bool = True
    accepts_any_model: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port {self.port} is not between 0 and 65535")
        for name in (
            "body_limit_bytes",
            "bodies_limit_bytes",
            "body_timeout_s",
            "send_timeout_s",
            "max_concurrent",
            "keep_alive_s",
            "ping_interval_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("max_queued", "retry_after_s", "drain_timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if any(not key.strip() for key in (*self.api_keys, self.admin_key or "-")):
            raise ConfigError("an API key or the admin key is empty")
        if self.admin_key in self.api_keys:
            raise ConfigError("the admin key must differ from the API keys")
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} is reachable from other machines: that needs an API key; "
                "give one, or listen on 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``. Names other than localhost may be anything: they count as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

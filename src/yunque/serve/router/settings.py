"""What a router may be told: bounds, time-outs, keys."""

from __future__ import annotations

from dataclasses import dataclass, field

from yunque.serve.router.health import HeartbeatSettings
from yunque.serve.router.placement import PlacementSettings


@dataclass(frozen=True)
class RouterSettings:
    """``max_attempts`` engines at most are asked for one request, of which two may answer that they are busy.

    ``api_keys``: what clients must present (empty: nothing). ``admin_key``: what opens the router's admin routes and
    broadcasts (None: they stay closed). ``engine_key`` and ``engine_admin_key`` are presented to the engines in place
    of what the client presented. ``session_by_api_key``: a client's key names its session, where nothing else does.
    """

    placement: PlacementSettings = field(default_factory=PlacementSettings)
    heartbeat: HeartbeatSettings = field(default_factory=HeartbeatSettings)
    max_attempts: int = 4
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 3600.0
    admin_timeout_s: float = 600.0
    max_body_bytes: int = 64 * 2**20
    api_keys: frozenset[str] = frozenset()
    admin_key: str | None = None
    engine_key: str | None = None
    engine_admin_key: str | None = None
    session_by_api_key: bool = False

    def __post_init__(self) -> None:
        for name in ("max_attempts", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("connect_timeout_s", "read_timeout_s", "admin_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

"""The router as a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import uvicorn

from yunque.core.errors import ConfigError
from yunque.serve.listener import listen, url_of
from yunque.serve.router.app import create_router
from yunque.serve.router.settings import RouterSettings
from yunque.serve.settings import is_loopback

#: Seconds that running requests get after SIGTERM.
GRACE_S = 30


def run_router(
    backends: Sequence[str],
    settings: RouterSettings,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT or SIGTERM; ``announce`` gets the URL when the port is open (0: any free one).

    Raises ``ConfigError`` for an address beyond loopback without API keys, and ``OSError`` when the port is taken.
    """
    if not backends:
        raise ConfigError("the router needs at least one engine, like http://127.0.0.1:8000")
    if not is_loopback(host) and not settings.api_keys:
        raise ConfigError(f"--host {host} can be reached from other machines: give --api-key")
    app = create_router(backends, settings)
    with listen(host, port) as listener:
        announce(url_of(listener))
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S)
        uvicorn.Server(config).run(sockets=[listener])

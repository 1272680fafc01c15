"""``yunque route``: one address for several engines."""

from __future__ import annotations

import argparse
import os
from typing import Any

from yunque.core.errors import ConfigError


def add_commands(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "route",
        help="one address for several engines",
        description="Route requests to engines: a session keeps its engine, dead engines are left, and replies that "
        "had begun go on at another one.",
        epilog="example:  yunque route http://127.0.0.1:8001 http://127.0.0.1:8002 --port 8000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("engines", metavar="URL", nargs="+", help="address of an engine's server")
    parser.add_argument("--host", default="127.0.0.1", help="default %(default)s; any other needs --api-key")
    parser.add_argument("--port", type=int, default=8080, metavar="N", help="0: any free one; default %(default)s")
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="what clients must present; may be given several times; default: YUNQUE_API_KEY",
    )
    parser.add_argument("--admin-key", metavar="KEY", help="opens the admin routes; default: YUNQUE_ADMIN_KEY")
    parser.add_argument("--engine-key", metavar="KEY", help="presented to engines; default: the client's own key")
    parser.add_argument("--engine-admin-key", metavar="KEY", help="the same for admin calls")
    parser.add_argument(
        "--load-factor", type=float, default=1.25, metavar="C", help="most load, by the mean load; default %(default)s"
    )
    parser.add_argument(
        "--free-slots", type=int, default=8, metavar="N", help="requests that an engine may always have; default 8"
    )
    parser.add_argument(
        "--heartbeat", type=float, default=2.0, metavar="SECONDS", help="between two looks; default %(default)s"
    )
    parser.add_argument("--session-by-api-key", action="store_true", help="every API key is a session of its own")
    parser.set_defaults(run=run_route)


def run_route(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    try:
        from yunque.serve.router.health import HeartbeatSettings
        from yunque.serve.router.placement import PlacementSettings
        from yunque.serve.router.run import run_router
        from yunque.serve.router.settings import RouterSettings
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; `pip install 'yunque[serve]'` brings it") from error
    api_keys = args.api_key or [key for key in [os.environ.get("YUNQUE_API_KEY")] if key]
    try:
        settings = RouterSettings(
            placement=PlacementSettings(load_factor=args.load_factor, free_slots=args.free_slots),
            heartbeat=HeartbeatSettings(interval_s=args.heartbeat, backoff_max_s=max(30.0, args.heartbeat)),
            api_keys=frozenset(api_keys),
            admin_key=args.admin_key or os.environ.get("YUNQUE_ADMIN_KEY") or None,
            engine_key=args.engine_key,
            engine_admin_key=args.engine_admin_key,
            session_by_api_key=args.session_by_api_key,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    run_router(args.engines, settings, host=args.host, port=args.port, announce=_announce)
    return 0


def _announce(url: str) -> None:
    print(f"router at {url}", flush=True)

"""Engines and a router on free ports of 127.0.0.1, in threads that end with the test."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from router_engines import Engine, Served, serve

from yunque.serve.router.app import create_router
from yunque.serve.router.health import HeartbeatSettings
from yunque.serve.router.settings import RouterSettings

QUICK = HeartbeatSettings(interval_s=0.05, timeout_s=1.0, eject_after=2, return_after=2, backoff_max_s=0.2)


@pytest.fixture
def engines() -> Iterator[Callable[..., list[Engine]]]:
    """Makes engines; they end with the test."""
    made: list[Engine] = []

    def make(count: int, **behaviour: object) -> list[Engine]:
        new = [Engine(name=f"engine-{len(made) + number}", **behaviour) for number in range(count)]
        made.extend(new)
        for engine in new:
            engine.start()
        return new

    yield make
    for engine in made:  # all at once: each takes a moment to notice
        if engine.served is not None:
            engine.served.ask_to_stop()
    for engine in made:
        engine.stop()


@pytest.fixture
def router() -> Iterator[Callable[..., Served]]:
    """Starts a router over engines, with quick heartbeats; returns where it is."""
    made: list[Served] = []

    def make(*backends: Engine | str, **settings: object) -> Served:
        urls = [backend if isinstance(backend, str) else backend.url for backend in backends]
        app = create_router(urls, RouterSettings(**{"heartbeat": QUICK, "admin_key": "admin", **settings}))
        made.append(serve(app))
        return made[-1]

    yield make
    for served in made:
        served.stop()

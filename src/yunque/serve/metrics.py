"""Prometheus metrics of one server: HTTP, turns, and the engine's own numbers read at each scrape."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from yunque.protocol.generation import EngineService
from yunque.serve.conversation import TurnEnd
from yunque.serve.limits import GENERATION_PATHS

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAUGES = {
    "running": "Requests that the engine works on.",
    "waiting": "Requests that wait in the engine.",
    "pages_total": "Cache pages that there are.",
    "pages_free": "Cache pages that nothing uses.",
    "pages_cached": "Cache pages that only the prefix tree holds.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens taken in.",
    "cached_tokens": "Prompt tokens that the prefix cache had.",
    "generated_tokens": "Tokens sampled.",
    "drafted_tokens": "Tokens drafted by speculation.",
    "accepted_tokens": "Drafted tokens that were accepted.",
    "preemptions": "Requests put back to be computed again.",
    "steps": "Engine steps.",
}


class ServerMetrics:
    """A registry of its own, so that two servers in one process do not mix. It observes turns."""

    def __init__(self, service: EngineService) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(service))
        self._requests = Counter(
            "yunque_http_requests", "HTTP requests answered.", ["route", "method", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "yunque_http_request_seconds",
            "From the request to the last byte of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._in_flight = Gauge("yunque_http_in_flight", "HTTP requests being answered.", registry=self.registry)
        self._disconnects = Counter("yunque_disconnects", "Clients that left early.", registry=self.registry)
        self._first_token = Histogram(
            "yunque_time_to_first_token_seconds",
            "From the submission of a turn to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._turn_seconds = Histogram(
            "yunque_turn_seconds",
            "From the submission of a turn to its end.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._turns = Counter("yunque_turns", "Turns ended.", ["finish"], registry=self.registry)
        self._malformed = Counter(
            "yunque_malformed", "Parts of turns that could not be used.", ["reason"], registry=self.registry
        )

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def turn_ended(self, end: TurnEnd, seconds: float) -> None:
        self._turn_seconds.observe(seconds)
        self._turns.labels(end.finish).inc()
        for failure in end.failures:
            self._malformed.labels(failure.reason).inc()

    def client_left(self) -> None:
        self._disconnects.inc()

    def request_began(self) -> None:
        self._in_flight.inc()

    def request_ended(self, route: str, method: str, status: int, seconds: float) -> None:
        self._in_flight.dec()
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class CountRequests:
    """ASGI middleware that counts what it sees. Requests that no route took are counted as one."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin_s = time.monotonic()
        status = 499  # unless something is sent: the client left before

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.request_began()
        try:
            await self._app(scope, receive, watch)
        except Exception:
            status = 500
            raise
        finally:
            path = scope["path"] if scope["path"] in GENERATION_PATHS else "(no route)"
            route = getattr(scope.get("route"), "path", path)
            method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
            self._metrics.request_ended(route, method, status, time.monotonic() - begin_s)


class _EngineCollector(Collector):
    """Reads ``EngineStats`` and health when scraped."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        stats = self._service.stats()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"yunque_engine_{name}", text, value=getattr(stats, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"yunque_engine_{name}", text, value=getattr(stats, name))
        healthy = float(self._service.health().ok)
        yield GaugeMetricFamily("yunque_engine_healthy", "1 while a token can be made.", value=healthy)
        version = float(self._service.info.version)
        yield GaugeMetricFamily("yunque_engine_version", "Version of the policy served.", value=version)

    def describe(self) -> list[Metric]:
        return []

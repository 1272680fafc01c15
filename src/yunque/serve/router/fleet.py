"""The engines behind a router: who may be used, who is draining, heartbeats, and who holds what."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx

from yunque.core.errors import ConfigError
from yunque.core.logging import get_logger
from yunque.serve.router.health import EngineHealth, Sign
from yunque.serve.router.placement import Ask, Placed, Placement
from yunque.serve.router.settings import RouterSettings

_log = get_logger(__name__)


@dataclass(eq=False)
class Backend:
    """One engine. ``scopes`` are its requests in flight, ``declines`` endpoints where it refuses or repeats streams,
    ``is_stale`` whether it missed an exchange of weights, ``resumes`` whether it takes ``resume_token_ids`` (its health
    says so)."""

    url: str
    health: EngineHealth
    running: int = 0
    is_stale: bool = False
    resumes: bool = False
    drain_until_s: float | None = None
    declines: set[str] = field(default_factory=set)
    scopes: set[anyio.CancelScope] = field(default_factory=set)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_draining(self) -> bool:
        return self.drain_until_s is not None


class Fleet:
    """Engines by URL. ``clock`` gives seconds that never go back."""

    def __init__(
        self, urls: Iterable[str], settings: RouterSettings, client: httpx.AsyncClient, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._client = client
        self._clock = clock
        self._placement = Placement(settings.placement)
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._is_watching = False
        self.backends: dict[str, Backend] = {}
        for url in urls:
            self._register(url)

    async def start(self) -> None:
        """Ask every engine once, then go on asking in the background until `stop`."""
        await asyncio.gather(*(self._probe(backend) for backend in self.backends.values()))
        self._is_watching = True
        for backend in self.backends.values():
            self._watch(backend)

    async def stop(self) -> None:
        self._is_watching = False
        watchers = list(self._watchers.values())
        self._watchers.clear()
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    async def add(self, url: str) -> Backend:
        """Take an engine in; one that is there already is taken out of draining. Raises ``ConfigError``."""
        known = self.backends.get(normal_url(url))
        if known is not None:
            known.drain_until_s = None
            return known
        backend = self._register(url)
        await self._probe(backend)
        if self._is_watching and self.backends.get(backend.url) is backend:
            self._watch(backend)
        return backend

    def remove(self, url: str) -> None:
        """Give an engine no more requests; those in flight go on. Raises ``KeyError``."""
        backend = self.backends.pop(normal_url(url))
        self._placement.remove(backend.url)
        watcher = self._watchers.pop(backend.url, None)
        if watcher is not None:
            watcher.cancel()

    def drain(self, url: str, *, grace_s: float) -> Backend:
        """Give an engine no new sessions; those it has may go on there for ``grace_s``. Raises ``KeyError``."""
        backend = self.backends[normal_url(url)]
        backend.drain_until_s = self._clock() + grace_s
        return backend

    def acquire(self, ask: Ask, *, exclude: Collection[str] = ()) -> tuple[Backend, Placed] | None:
        """Choose an engine for a request and count it there; None when none may be used. Wants its `release`."""
        loads = {b.url: b.running for b in self.backends.values() if b.url not in exclude and self._may_use(b, ask)}
        if not loads:
            return None
        placed = self._placement.place(ask, loads, now_s=self._clock())
        backend = self.backends[placed.engine]
        backend.running += 1
        return backend, placed

    def release(self, backend: Backend, ask: Ask) -> None:
        backend.running -= 1
        self._placement.release(ask)

    def blame(self, backend: Backend, sign: Sign, reason: str) -> None:
        """A request failed at the engine in a way that speaks of its health."""
        if backend.health.blame(sign, now_s=self._clock(), reason=reason):
            self._eject(backend)
        backend.wake.set()

    async def is_leaving(self, backend: Backend) -> bool:
        """Whether the engine ends: drained here, draining by itself, or gone already."""
        if backend.is_draining:
            return True
        sign, reason = await self._look_at(backend)
        return sign is Sign.SILENT or (sign is Sign.UNWELL and "draining" in reason.lower())

    def is_usable(self) -> bool:
        return any(backend.health.is_usable and not backend.is_stale for backend in self.backends.values())

    def status(self) -> list[dict[str, Any]]:
        """One record for each engine, for people."""
        now_s, sessions = self._clock(), self._placement.sessions_of
        return [
            {
                "url": backend.url,
                "state": str(backend.health.state),
                "sign": backend.health.last_sign and str(backend.health.last_sign),
                "reason": backend.health.reason,
                "running": backend.running,
                "sessions": sessions.get(backend.url, 0),
                "draining": backend.is_draining,
                "drained": backend.is_draining and not backend.running and not self._in_grace(backend, now_s),
                "stale": backend.is_stale,
            }
            for backend in self.backends.values()
        ]

    def gauges(self) -> dict[str, dict[str, float]]:
        sessions, backends = self._placement.sessions_of, self.backends.values()
        return {
            "running_requests": {b.url: b.running for b in backends},
            "live_sessions": {b.url: sessions.get(b.url, 0) for b in backends},
            "usable": {b.url: float(b.health.is_usable and not b.is_stale) for b in backends},
        }

    def _may_use(self, backend: Backend, ask: Ask) -> bool:
        if not backend.health.is_usable or backend.is_stale:
            return False
        if not backend.is_draining:
            return True
        return self._in_grace(backend, self._clock()) and self._placement.engine_of(ask.session) == backend.url

    def _in_grace(self, backend: Backend, now_s: float) -> bool:
        return backend.drain_until_s is not None and now_s < backend.drain_until_s

    def _register(self, url: str) -> Backend:
        backend = Backend(normal_url(url), EngineHealth(self._settings.heartbeat, now_s=self._clock()))
        if backend.url not in self.backends:
            self.backends[backend.url] = backend
            self._placement.add(backend.url)
        return self.backends[backend.url]

    def _watch(self, backend: Backend) -> None:
        self._watchers[backend.url] = asyncio.create_task(self._heartbeats(backend))

    async def _heartbeats(self, backend: Backend) -> None:
        while True:
            delay_s = backend.health.next_probe_s - self._clock()
            if delay_s > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(backend.wake.wait(), delay_s)
                backend.wake.clear()
                if backend.health.next_probe_s > self._clock():
                    continue
            await self._probe(backend)

    async def _probe(self, backend: Backend) -> None:
        state = backend.health.state
        sign, reason = await self._look_at(backend)
        if backend.health.observe(sign, now_s=self._clock(), reason=reason):
            self._eject(backend)
        elif backend.health.state is not state:
            _log.info("engine %s is %s", backend.url, backend.health.state)

    async def _look_at(self, backend: Backend) -> tuple[Sign, str]:
        try:
            async with asyncio.timeout(self._settings.heartbeat.timeout_s):
                response = await self._client.get(f"{backend.url}/health")
        except TimeoutError:
            return Sign.SILENT, f"no answer within {self._settings.heartbeat.timeout_s:g} s"
        except httpx.TransportError as error:
            return Sign.SILENT, f"{type(error).__name__}: {error}"
        backend.resumes = _says_that_it_resumes(response)
        if response.is_success:
            return Sign.OK, ""
        reason = f"{response.status_code}: {response.text[:200]}"
        return (Sign.PAUSED if "paused" in response.text[:1000].lower() else Sign.UNWELL), reason

    def _eject(self, backend: Backend) -> None:
        """Stop using an engine; where nothing comes from it any more, what it holds is made elsewhere."""
        _log.warning("engine %s is ejected: %s", backend.url, backend.health.reason)
        if backend.health.last_sign is not Sign.SILENT:
            return
        self._placement.forget_cache(backend.url)
        if self.is_usable():
            for scope in list(backend.scopes):
                scope.cancel()


def _says_that_it_resumes(response: httpx.Response) -> bool:
    try:
        body = response.json()
    except ValueError:
        return False
    return isinstance(body, dict) and body.get("resumes") is True


def normal_url(url: str) -> str:
    """``http://host:port`` without what follows from it. Raises ``ConfigError`` for anything else."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_valid = False
    if not is_valid or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"an engine is an address like http://127.0.0.1:8000, not {url!r}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"

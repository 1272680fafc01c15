"""The router as an ASGI application."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from yunque.protocol.http_errors import problem
from yunque.serve.router import admin
from yunque.serve.router.answers import answer
from yunque.serve.router.asks import api_key_of, ask_of
from yunque.serve.router.fleet import Fleet
from yunque.serve.router.forward import GENERATION_PATHS, Call, Relay
from yunque.serve.router.meters import Meters
from yunque.serve.router.placement import Ask
from yunque.serve.router.settings import RouterSettings

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
#: Bodies above this size are read in a thread: others go on meanwhile.
_LARGE_BYTES = 2**18
#: Below the five seconds after which common servers close an idle connection, so that none is used as it closes.
_KEEPALIVE_S = 2.0


def create_router(
    backends: Iterable[str],
    settings: RouterSettings | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Starlette:
    """One address for the engines at the URLs ``backends``. Raises ``ConfigError`` for what is no URL.

    Engines are asked for their health before the first request is taken. Everything but ``/health``, ``/metrics``,
    ``/router/...`` and admin calls goes to an engine.
    """
    router = _Router(backends, settings or RouterSettings(), clock)
    routes = [
        Route("/health", router.health),
        Route("/metrics", router.metrics),
        Route("/router/status", router.status),
        Route("/router/backends", router.change_backends, methods=["POST", "DELETE"]),
        Route("/router/backends/drain", router.change_backends, methods=["POST"]),
        Route("/{path:path}", router.forward, methods=_METHODS),
    ]
    app = Starlette(routes=routes, lifespan=router.lifespan)
    app.state.fleet = router.fleet
    return app


class _Router:
    def __init__(self, backends: Iterable[str], settings: RouterSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        timeout = httpx.Timeout(settings.read_timeout_s, connect=settings.connect_timeout_s, pool=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=_KEEPALIVE_S)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        self.fleet = Fleet(backends, settings, self._client, clock)
        self._meters = Meters(self.fleet.gauges)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self._client:
            await self.fleet.start()
            try:
                yield
            finally:
                await self.fleet.stop()

    async def health(self, _: Request) -> Response:
        if self.fleet.is_usable():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "reason": "no engine is usable"}, 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._meters.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, request: Request) -> Response:
        keys = [*self._settings.api_keys, *([self._settings.admin_key] if self._settings.admin_key else [])]
        if self._settings.api_keys and not _presents(request, keys):
            return _unauthorized()
        return JSONResponse({"engines": self.fleet.status()})

    async def change_backends(self, request: Request) -> Response:
        return self._closed(request) or await admin.change_backends(request, self.fleet)

    async def forward(self, request: Request) -> Any:
        if admin.is_admin(request.url.path):
            return self._closed(request) or await admin.broadcast(
                request, _target(request), self.fleet, self._client, self._settings
            )
        if self._settings.api_keys and not _presents(request, list(self._settings.api_keys)):
            return _unauthorized()
        try:
            content = await self._content(request)
        except ClientDisconnect:
            return Response(status_code=400)
        if content is None:
            return answer(problem(413, f"the body is larger than {self._settings.max_body_bytes} bytes"))
        call = await self._read_call(request, content)
        return Relay(call, self.fleet, self._client, self._meters, self._settings)

    async def _read_call(self, request: Request, content: bytes) -> Call:
        path = request.url.path
        ask, body = Ask(), None
        if request.method == "POST" and path in GENERATION_PATHS:
            headers = dict(request.headers)
            arguments = (content, headers, self._settings.session_by_api_key)
            if len(content) > _LARGE_BYTES:
                body, ask = await anyio.to_thread.run_sync(_understand, *arguments)
            else:
                body, ask = _understand(*arguments)
        return Call(request.method, path, _target(request), tuple(request.headers.items()), content, ask, body)

    async def _content(self, request: Request) -> bytes | None:
        """The body; None when it is too large."""
        limit = self._settings.max_body_bytes
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            return None
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > limit:
                return None
        return bytes(content)

    def _closed(self, request: Request) -> Response | None:
        """Why the admin routes are closed to this request; None when they are open."""
        key = self._settings.admin_key
        if key is None:
            return answer(problem(403, "admin calls are off: the router was started without an admin key"))
        return None if _presents(request, [key]) else _unauthorized()


def _understand(content: bytes, headers: dict[str, str], by_api_key: bool) -> tuple[dict[str, Any] | None, Ask]:
    """The JSON object of a generation and what it says about its place; what is none goes to an engine as it is, to
    be refused there."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None, Ask()
    if not isinstance(body, dict):
        return None, Ask()
    return body, ask_of(headers, body, by_api_key=by_api_key)


def _target(request: Request) -> str:
    """Path and query as they came."""
    raw = request.scope.get("raw_path") or request.url.path.encode()
    query = request.scope.get("query_string", b"")
    return raw.decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")


def _presents(request: Request, keys: Sequence[str]) -> bool:
    presented = (api_key_of(request.headers) or "").encode("utf-8", "surrogatepass")
    return any([hmac.compare_digest(presented, key.encode()) for key in keys])


def _unauthorized() -> Response:
    return answer(problem(401, "the API key is missing or not a valid one"))

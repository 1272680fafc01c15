"""Who may ask: API keys for everything but the open paths, the admin key for the admin routes."""

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from yunque.protocol.http_errors import HttpProblem, problem
from yunque.serve.answers import problem_response
from yunque.serve.settings import ServeSettings

ADMIN_PREFIX = "/admin/"
OPEN_PATHS = ("/health", "/")
OPEN_PREFIXES = ("/web/",)
"""What is answered without a key: probes, and the page (which asks its user for the key)."""


class RequireKey:
    """ASGI middleware. A key comes as ``Authorization: Bearer KEY`` or as ``x-api-key: KEY``; comparing takes the same
    time for every wrong key."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._problem(scope) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        response = problem_response(found, scope["path"])
        if found.status == 401:
            response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _problem(self, scope: Scope) -> HttpProblem | None:
        path, headers = scope["path"], Headers(scope=scope)
        if path.startswith(ADMIN_PREFIX):
            if self._settings.admin_key is None:
                return problem(403, "the admin routes are closed: start the server with an admin key")
            keys: Sequence[str] = (self._settings.admin_key,)
        elif not self._settings.api_keys or path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
            return None
        else:
            keys = self._settings.api_keys
        given = _key(headers)
        if given is None:
            return problem(401, "no API key: send Authorization: Bearer KEY", code="invalid_api_key")
        if not any([hmac.compare_digest(given.encode(), key.encode()) for key in keys]):
            return problem(401, "this API key is not valid here", code="invalid_api_key")
        return None


def _key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None

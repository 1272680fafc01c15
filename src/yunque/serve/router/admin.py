"""What an operator asks of the router: engines in and out, and calls that go to every engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from yunque.core.errors import ConfigError
from yunque.protocol.http_errors import problem
from yunque.serve.router.answers import answer
from yunque.serve.router.exchange import kept_headers
from yunque.serve.router.fleet import Backend, Fleet
from yunque.serve.router.settings import RouterSettings

DRAIN_GRACE_S = 60.0
#: What goes to every engine: all below this prefix, and the names that SGLang and vLLM have for the same.
ADMIN_PREFIX = "/admin/"
ADMIN_PATHS = (
    *("/pause_generation", "/continue_generation", "/update_weights_from_disk", "/flush_cache", "/abort_request"),
    *("/get_weights_by_name", "/weights_checker", "/pause", "/resume", "/update_weights", "/reset_prefix_cache"),
)
_LOADS_WEIGHTS = ("/admin/load_weights", "/update_weights_from_disk", "/update_weights")
_TELLS_HASHES = ("/admin/weight_hashes", "/weights_checker")


def is_admin(path: str) -> bool:
    return path.startswith(ADMIN_PREFIX) or path in ADMIN_PATHS


async def change_backends(request: Request, fleet: Fleet) -> Response:
    """``POST /router/backends {"url"}`` adds, ``DELETE`` removes, ``POST /router/backends/drain {"url", "grace_s"}``
    drains; adding a draining engine takes it back."""
    try:
        body = json.loads(await request.body() or b"{}")
        url = body["url"] if isinstance(body, dict) else None
        grace_s = float(body.get("grace_s", DRAIN_GRACE_S)) if isinstance(body, dict) else 0.0
    except (ValueError, TypeError, KeyError):
        url, grace_s = None, 0.0
    if not isinstance(url, str) or not 0 <= grace_s < float("inf"):
        return _bad('the body is a JSON object with "url", and "grace_s" of at least 0 for a drain')
    try:
        if request.method == "DELETE":
            fleet.remove(url)
        elif request.url.path.endswith("/drain"):
            fleet.drain(url, grace_s=grace_s)
        else:
            await fleet.add(url)
    except ConfigError as error:
        return _bad(str(error))
    except KeyError:
        known = ", ".join(fleet.backends) or "none"
        return answer(problem(404, f"no engine {url!r}; there are: {known}", param="url"))
    return JSONResponse({"engines": fleet.status()})


async def broadcast(
    request: Request, target: str, fleet: Fleet, client: httpx.AsyncClient, settings: RouterSettings
) -> Response:
    """The same call to every engine; what each said, and 200 only when all agreed to it.

    An engine that missed new weights while another took them is not used until it takes some. For hashes, ``agree``
    says whether all engines serve the same bytes.
    """
    content, headers = await request.body(), kept_headers(request.headers.items())
    if settings.engine_admin_key is not None:
        headers = [pair for pair in headers if pair[0].lower() not in ("authorization", "x-api-key")]
        headers.append(("authorization", f"Bearer {settings.engine_admin_key}"))

    async def call(backend: Backend) -> dict[str, Any]:
        try:
            said = await client.request(
                request.method,
                backend.url + target,
                headers=headers,
                content=content,
                timeout=httpx.Timeout(settings.admin_timeout_s, connect=settings.connect_timeout_s),
            )
        except httpx.TransportError as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}
        return {"ok": said.is_success, "status": said.status_code, "body": _read(said)}

    backends = list(fleet.backends.values())
    results = dict(zip([b.url for b in backends], await asyncio.gather(*map(call, backends)), strict=True))
    is_ok = bool(results) and all(result["ok"] for result in results.values())
    if request.url.path in _LOADS_WEIGHTS:
        _mark_stale(backends, results)
    told: dict[str, Any] = {"ok": is_ok, "engines": results}
    if request.url.path in _TELLS_HASHES:
        told["agree"] = is_ok and len({json.dumps(r["body"], sort_keys=True) for r in results.values()}) == 1
    return JSONResponse(told, 200 if is_ok else 502)


def _mark_stale(backends: list[Backend], results: Mapping[str, Mapping[str, Any]]) -> None:
    has_any = any(result["ok"] for result in results.values())
    for backend in backends:
        if results[backend.url]["ok"]:
            backend.is_stale = False
        elif has_any:
            backend.is_stale = True


def _read(said: httpx.Response) -> Any:
    try:
        return said.json()
    except ValueError:
        return said.text


def _bad(message: str) -> Response:
    return answer(problem(400, message))

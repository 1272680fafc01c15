"""The policy's life over HTTP, behind the admin key: pause, resume, exchange weights, hash them, abort, drain."""

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from yunque.protocol.errors import RequestError
from yunque.serve.answers import JsonResponse, StrictJsonRoute
from yunque.serve.auth import ADMIN_PREFIX
from yunque.serve.context import ServeContext


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PauseRequest(_Strict):
    """``keep``: replies in flight wait; ``abort``: they come back as they are."""

    mode: Literal["keep", "abort"] = "keep"


class LoadWeightsRequest(_Strict):
    """The folder ``source``, on the server's machine, becomes the policy ``version``."""

    version: Annotated[int, Field(ge=0, lt=2**31)]
    source: Annotated[str, Field(min_length=1)]
    keep_cache: bool = False


class AbortRequest(_Strict):
    """One request by the id that its reply has (``rid``, ``request_id``, ``id``), or ``all``."""

    request_id: str | None = None
    all: bool = False


class DrainRequest(_Strict):
    """New requests are refused; those in flight have ``timeout_s`` to end."""

    timeout_s: Annotated[float, Field(ge=0, le=86_400)] | None = None


def admin_routes(context: ServeContext) -> APIRouter:
    """The routes, for one server; ``RequireKey`` guards them."""
    router = APIRouter(prefix=ADMIN_PREFIX.rstrip("/"), route_class=StrictJsonRoute, tags=["admin"])
    service = context.service

    @router.post("/pause")
    async def pause(body: PauseRequest) -> JsonResponse:
        await service.pause(body.mode)
        return JsonResponse({"paused": True})

    @router.post("/resume")
    async def resume() -> JsonResponse:
        await service.resume()
        return JsonResponse({"paused": False})

    @router.post("/load_weights")
    async def load_weights(body: LoadWeightsRequest) -> JsonResponse:
        try:
            await service.load_weights(body.version, body.source, keep_cache=body.keep_cache)
        except (OSError, ValueError) as error:
            raise RequestError(f"{body.source}: {error}", param="source") from error
        return JsonResponse({"version": service.info.version})

    @router.get("/weight_hashes")
    async def weight_hashes() -> JsonResponse:
        return JsonResponse({"version": service.info.version, "sha256": dict(await service.weight_hashes())})

    @router.post("/abort")
    async def abort(body: AbortRequest) -> JsonResponse:
        if (body.request_id is None) == (not body.all):
            raise RequestError("give either request_id or all: true", param="request_id")
        found = [
            steps
            for key, steps in list(context.conversations.live.items())
            if steps.is_live and (body.all or body.request_id in (key, key.rpartition("-")[0]))
        ]
        for steps in found:
            steps.abort()
        return JsonResponse({"aborted": len(found)})

    @router.post("/drain")
    async def drain(body: DrainRequest) -> JsonResponse:
        timeout_s = context.settings.drain_timeout_s if body.timeout_s is None else body.timeout_s
        await service.drain(timeout_s)
        return JsonResponse({"drained": True})

    return router

"""The HTTP app in front of an engine: routes, keys, limits, metrics."""

from typing import Any

from fastapi import APIRouter, FastAPI, Response

from yunque import __version__
from yunque.protocol.generation import EngineService
from yunque.serve.admin import admin_routes
from yunque.serve.answers import JsonResponse, install_error_handlers
from yunque.serve.auth import RequireKey
from yunque.serve.chat import chat_routes
from yunque.serve.completions import completion_routes
from yunque.serve.context import ServeContext
from yunque.serve.conversation import Conversations
from yunque.serve.limits import LimitBody, LimitReplies
from yunque.serve.messages import message_routes
from yunque.serve.metrics import CONTENT_TYPE, CountRequests, ServerMetrics
from yunque.serve.page import page_routes
from yunque.serve.responses import response_routes
from yunque.serve.settings import ServeSettings
from yunque.serve.token_routes import token_routes
from yunque.serve.tokenizing import tokenizing_routes
from yunque.text import Renderer


def create_app(service: EngineService, renderer: Renderer, settings: ServeSettings) -> FastAPI:
    """The app of one engine, and the web page that talks to it."""
    metrics = ServerMetrics(service)
    context = ServeContext(service, renderer, settings, metrics, Conversations(service, renderer, metrics))
    errors: dict[int | str, dict[str, Any]] = {
        "4XX": {"description": "The request is at fault: an error in the shape of the route's dialect"},
        "5XX": {"description": "The engine cannot answer: an error in the same shape"},
    }
    app = FastAPI(title="Yunque", version=__version__, docs_url=None, redoc_url=None, responses=errors)
    for build in (
        chat_routes,
        completion_routes,
        message_routes,
        response_routes,
        tokenizing_routes,
        token_routes,
        admin_routes,
        _state_routes,
    ):
        app.include_router(build(context))
    app.include_router(page_routes())
    install_error_handlers(app)
    # The last one added sees a request first.
    app.add_middleware(LimitReplies, settings=settings)
    app.add_middleware(LimitBody, settings=settings)
    app.add_middleware(RequireKey, settings=settings)
    app.add_middleware(CountRequests, metrics=metrics)
    return app


def _state_routes(context: ServeContext) -> APIRouter:
    router = APIRouter(tags=["state"])

    @router.get("/health", summary="Whether a token can be made now")
    async def health() -> JsonResponse:
        found, info = context.service.health(), context.service.info
        body: dict[str, Any] = {
            "status": "ok" if found.ok else "unavailable",
            "model": info.model_name,
            "version": info.version,
            "resumes": True,  # a router may send resume_token_ids
        }
        return JsonResponse(body | ({} if found.ok else {"reason": found.reason}), 200 if found.ok else 503)

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(context.metrics.exposition(), media_type=CONTENT_TYPE)

    return router

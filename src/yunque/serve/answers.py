"""How a server answers: JSON that always can be written, errors in the dialect of the route, strict request bodies."""

import json
import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as StarletteHTTPException

from yunque.core.errors import YunqueError
from yunque.core.records import parse_json
from yunque.protocol.http_errors import HttpProblem, problem, problem_of
from yunque.protocol.openai import dump

logger = logging.getLogger(__name__)

MAX_CONTAINERS = 100_000
"""Arrays and objects that a body may have. Reading millions of them takes seconds in which nothing else goes on."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)

ANTHROPIC_PATHS = ("/v1/messages",)
"""Paths (and all below them) whose errors have Anthropic's shape."""


class JsonResponse(Response):
    """JSON in ASCII: whatever text a client sent, naming it in an answer cannot fail."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dump(content).encode()


def problem_response(found: HttpProblem, path: str) -> JsonResponse:
    """An error in the dialect of the route at ``path``."""
    is_anthropic = any(path == prefix or path.startswith(prefix + "/") for prefix in ANTHROPIC_PATHS)
    body = found.anthropic_body() if is_anthropic else found.openai_body()
    return JsonResponse(body, status_code=found.status, headers=found.headers)


class StrictJsonRoute(APIRoute):
    """A route whose JSON body is UTF-8, holds only what JSON can hold (no NaN), and no half of a surrogate pair."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        has_body = self.body_field is not None

        async def handle(request: Request) -> Response:
            if has_body and not _is_json(request.headers.get("content-type")):
                raise HTTPException(415, "the body must be JSON: send content-type: application/json")
            return await handler(_StrictRequest(request.scope, request.receive))

        return handle


class _StrictRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = strict_json(await self.body())
        return self._json


def _is_json(content_type: str | None) -> bool:
    """Anything else is refused: a page of another site could send it without the browser's asking first."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def strict_json(body: bytes) -> Any:
    """Read a body; what it lacks becomes a 400."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HTTPException(400, f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}") from error
    if _num_openings(text) > MAX_CONTAINERS and _num_openings(_STRING.sub("", text)) > MAX_CONTAINERS:
        raise HTTPException(400, f"the body has more than {MAX_CONTAINERS} arrays and objects")
    try:
        value = parse_json(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise HTTPException(400, "the body has half of a surrogate pair: not Unicode text") from error
    except RecursionError as error:
        raise HTTPException(400, "the body is nested too deeply") from error
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error
    return value


def _num_openings(text: str) -> int:
    return text.count("[") + text.count("{")


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception in the dialect of its route; what is not of ours is logged."""

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem_response(_validation_problem(error), request.url.path)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        found = problem(error.status_code, str(error.detail))
        response = problem_response(found, request.url.path)
        response.headers.update(error.headers or {})
        return response

    async def on_ours(request: Request, error: Exception) -> Response:
        found = problem_of(error)
        if found.status >= 500:
            logger.warning("%s %s: %s", request.method, request.url.path, error)
        return problem_response(found, request.url.path)

    async def on_other(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem_response(problem_of(error), request.url.path)

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(StarletteHTTPException, on_http)
    app.add_exception_handler(YunqueError, on_ours)
    app.add_exception_handler(Exception, on_other)


def _validation_problem(error: RequestValidationError) -> HttpProblem:
    """The first fault, with the place of the field in the body."""
    faults = error.errors()
    first: Mapping[str, Any] = faults[0] if faults else {"loc": (), "msg": "the request is not valid"}
    place = ".".join(str(part) for part in first["loc"] if part != "body")[:200]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    message = f"{place}: {first['msg']}{more}" if place else f"{first['msg']}{more}"
    return problem(400, message, param=place or None)

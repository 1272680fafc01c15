"""What the router itself says to clients: errors in the shape of the API that was spoken."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

from yunque.protocol.http_errors import HttpProblem, problem
from yunque.serve.router import sse

#: Server faults by the names engines give them: the same request may succeed elsewhere.
_ENGINE_FAULTS = frozenset(
    {"server_error", "internal_error", "internal_server_error", "internalservererror", "engine_error", "api_error"}
    | {"unavailable", "service_unavailable", "overloaded_error"}
)


def answer(found: HttpProblem) -> JSONResponse:
    """The problem as a whole answer."""
    return JSONResponse(found.openai_body(), found.status, found.headers)


def no_engine(reason: str) -> HttpProblem:
    """Nobody could answer, and the client has heard nothing yet."""
    return problem(503, f"no engine could answer: {reason}", code="no_engine", retry_after_s=1.0)


def stream_error(path: str, message: str) -> bytes:
    """The event that ends a stream which cannot go on; Anthropic's shape for its own endpoint, OpenAI's elsewhere."""
    found = problem(500, message, code="engine_lost")
    if path == "/v1/messages":
        return sse.encode(found.anthropic_body(), name="error")
    return sse.encode(found.openai_body(), name="error" if path == "/v1/responses" else "")


def is_engine_fault(error: object) -> bool:
    """Whether the error in a stream blames the engine and not the request."""
    if not isinstance(error, Mapping):
        return False
    code = error.get("code")
    if isinstance(code, int):
        return code >= 500
    return {str(code).lower(), str(error.get("type")).lower()} & _ENGINE_FAULTS != set()

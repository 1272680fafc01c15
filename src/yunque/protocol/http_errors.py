"""Errors as HTTP answers: status, the code that clients act on, and the bodies of the OpenAI and Anthropic dialects."""

from dataclasses import dataclass
from typing import Any

from yunque.core.errors import YunqueError
from yunque.protocol.errors import ContextLengthExceeded, EngineUnavailable, Overloaded, RequestError

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    500: "internal_error",
    503: "service_unavailable",
}
"""The usual code of each status."""


@dataclass(frozen=True)
class HttpProblem:
    """What an error says to an HTTP client. ``param`` names the field at fault."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after_s: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        """``Retry-After`` in whole seconds, at least one, where the problem passes by itself."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, -int(-self.retry_after_s // 1)))}

    def openai_body(self) -> dict[str, Any]:
        """``{"error": {"message", "type", "param", "code"}}``."""
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """``{"type": "error", "error": {"type", "message"}}``."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


class HttpError(YunqueError):
    """An error that knows its HTTP answer."""

    def __init__(self, problem: HttpProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def problem(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    retry_after_s: float | None = None,
) -> HttpProblem:
    """A problem whose code, unless given, is the usual one of the status."""
    return HttpProblem(status, message, code or CODES.get(status, "error"), param, retry_after_s)


def problem_of(error: Exception) -> HttpProblem:
    """The HTTP answer to an exception. Ours are about what was given; another is a 500 that tells nothing of the
    inside."""
    match error:
        case HttpError():
            return error.problem
        case ContextLengthExceeded():
            return problem(400, str(error), code=error.code, param=error.param)
        case RequestError():
            return problem(400, str(error), param=error.param)
        case Overloaded():
            return problem(429, str(error), retry_after_s=error.retry_after_s)
        case EngineUnavailable():
            return problem(503, str(error), retry_after_s=5.0)
        case YunqueError():
            return problem(400, str(error))
        case _:
            return problem(500, "the server failed on this request; its log says why")


def engine_failed(reason: str | None) -> HttpProblem:
    """The engine broke while it made a reply."""
    return problem(500, f"the engine failed: {reason or 'no reason given'}", code="engine_error")

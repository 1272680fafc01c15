"""Exceptions as HTTP answers with the codes that clients act on."""

import pytest

from yunque.core.errors import CheckpointError, DataError
from yunque.protocol.errors import ContextLengthExceeded, EngineUnavailable, Overloaded, RequestError
from yunque.protocol.http_errors import problem, problem_of


@pytest.mark.parametrize(
    ("error", "status", "code", "kind"),
    [
        (ContextLengthExceeded("long", param="messages"), 400, "context_length_exceeded", "invalid_request_error"),
        (RequestError("bad", param="top_p"), 400, "invalid_request", "invalid_request_error"),
        (DataError("bad"), 400, "invalid_request", "invalid_request_error"),
        (CheckpointError("bad"), 400, "invalid_request", "invalid_request_error"),
        (Overloaded("full", retry_after_s=2.2), 429, "rate_limit_exceeded", "rate_limit_error"),
        (EngineUnavailable("draining"), 503, "service_unavailable", "server_error"),
        (KeyError("secret"), 500, "internal_error", "server_error"),
    ],
)
def test_openai_bodies(error: Exception, status: int, code: str, kind: str) -> None:
    found = problem_of(error)
    body = found.openai_body()["error"]
    assert (found.status, body["code"], body["type"]) == (status, code, kind)
    assert body["param"] == getattr(error, "param", None)
    assert "secret" not in body["message"]


def test_retry_after_is_a_whole_number_of_at_least_one_second() -> None:
    headers = [problem_of(Overloaded("full", retry_after_s=s)).headers for s in (0.0, 0.2, 1.0, 2.2)]
    assert headers == [{"retry-after": value} for value in ("1", "1", "1", "3")]
    assert problem(400, "bad").headers == {}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_anthropic_bodies(status: int, kind: str) -> None:
    assert problem(status, "x").anthropic_body() == {"type": "error", "error": {"type": kind, "message": "x"}}

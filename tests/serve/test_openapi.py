"""Requests drawn from the OpenAPI document, right and wrong ones: none is answered with a 5xx."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .servers import serve

HEADERS = {"authorization": "Bearer adm"}
UNDRAWN = ("/admin/pause", "/admin/drain")
"""Paths after which the engine answers nobody; ``tests/serve/test_admin.py`` has them."""


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_is_answered_with_a_5xx(renderer: Renderer, mode: GenerationMode) -> None:
    served = serve(renderer, "a</think>b<|user|>", settings=ServeSettings(admin_key="adm"), max_model_len=400)
    schema = schemathesis.openapi.from_asgi("/openapi.json", served.app)
    statuses: dict[str, set[int]] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in UNDRAWN:
            continue

        @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            response = case.call(headers=HEADERS)
            statuses.setdefault(case.path, set()).add(response.status_code)
            case.validate_response(response, checks=[not_a_server_error])

        try:
            ask()
        except Unsatisfiable:  # a route that takes nothing has no wrong requests
            assert mode is GenerationMode.NEGATIVE
    assert {"/v1/chat/completions", "/v1/completions", "/generate", "/inference/v1/generate"} <= set(statuses)
    assert served.engine.pages_used == 0
    assert all(status < 500 for found in statuses.values() for status in found)


def test_the_document_names_every_route_and_its_fields(renderer: Renderer) -> None:
    document = serve(renderer, "x").call("GET", "/openapi.json").json()
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/generate",
        "/inference/v1/generate",
        "/health",
        "/metrics",
        "/admin/load_weights",
    } <= set(document["paths"])
    chat = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "tools", "max_completion_tokens", "return_token_ids", "chat_template_kwargs"} <= set(chat)
    answers = [set(call["responses"]) for path in document["paths"].values() for call in path.values()]
    assert all({"200", "4XX", "5XX"} == found for found in answers)

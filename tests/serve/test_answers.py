"""Bodies that are no requests: each is a 400 in OpenAI's shape, and the server goes on."""

import pytest

from yunque.text import Renderer

from .servers import serve

PATHS = ["/v1/chat/completions", "/v1/completions", "/generate", "/inference/v1/generate", "/tokenize"]
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"{", "not JSON"),
        (b"", ""),
        (b"[1]", ""),
        (b"null", ""),
        (b'{"temperature": NaN}', "not JSON"),
        (b'{"temperature": 1e999}', "not JSON"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"a": ' * 50_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_body_that_is_no_request_is_a_400(renderer: Renderer, path: str, body: bytes, words: str) -> None:
    served = serve(renderer, "x")
    response = served.call("POST", path, content=body, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]
    assert served.engine.requests == []


def test_a_body_of_another_type_is_refused(renderer: Renderer) -> None:
    body = b'{"prompt": "a"}'
    served = serve(renderer, "x")
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        assert served.call("POST", "/v1/completions", content=body, headers=headers).status_code == 415
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        headers = {"content-type": kind}
        assert served.call("POST", "/v1/completions", content=body, headers=headers).status_code == 200


def test_pairs_of_surrogates_are_text(renderer: Renderer) -> None:
    served = serve(renderer, "x")
    response = served.call("POST", "/tokenize", content=b'{"prompt": "\\ud83d\\ude00"}', headers=JSON)
    assert response.json()["tokens"] == served.ids("😀")


def test_unknown_paths_and_methods_have_the_shape_of_errors(renderer: Renderer) -> None:
    served = serve(renderer, "x")
    found = served.call("GET", "/nowhere")
    assert (found.status_code, found.json()["error"]["code"]) == (404, "not_found")
    found = served.call("GET", "/v1/completions")
    assert (found.status_code, found.json()["error"]["code"]) == (405, "method_not_allowed")
    assert found.headers["allow"] == "POST"

"""Keys: who is answered, and who may touch the policy."""

import pytest

from yunque.core.errors import ConfigError
from yunque.serve.settings import ServeSettings, is_loopback
from yunque.text import Renderer

from .servers import serve

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})


def test_without_keys_everybody_is_answered(renderer: Renderer) -> None:
    assert serve(renderer, "x").post(*CHAT).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Basic one"}, 401),
        ({"authorization": "Bearer one"}, 200),
        ({"authorization": "bearer  two"}, 200),
        ({"x-api-key": "two"}, 200),
        ({"x-api-key": "adm"}, 401),
    ],
)
def test_a_key_opens_the_api(renderer: Renderer, headers: dict[str, str], status: int) -> None:
    served = serve(renderer, "x", settings=ServeSettings(api_keys=("one", "two"), admin_key="adm"))
    response = served.post(*CHAT, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert served.engine.requests == []


def test_errors_of_the_anthropic_route_have_its_shape(renderer: Renderer) -> None:
    served = serve(renderer, "x", settings=ServeSettings(api_keys=("one",)))
    assert served.post("/v1/messages", {}).json()["error"]["type"] == "authentication_error"
    assert served.post("/v1/messages", {}).json()["type"] == "error"


def test_only_the_probe_is_open(renderer: Renderer) -> None:
    served = serve(renderer, "x", settings=ServeSettings(api_keys=("one",)))
    statuses = {
        path: served.call("GET", path).status_code for path in ("/health", "/metrics", "/v1/models", "/openapi.json")
    }
    assert statuses == {"/health": 200, "/metrics": 401, "/v1/models": 401, "/openapi.json": 401}


@pytest.mark.parametrize("path", ["pause", "resume", "load_weights", "abort", "drain"])
def test_admin_routes_are_closed_without_an_admin_key(renderer: Renderer, path: str) -> None:
    served = serve(renderer, "x", settings=ServeSettings(api_keys=("one",)))
    response = served.post(f"/admin/{path}", {}, headers={"authorization": "Bearer one"})
    assert (response.status_code, served.engine.calls) == (403, [])


def test_the_api_key_is_not_the_admin_key(renderer: Renderer) -> None:
    served = serve(renderer, "x", settings=ServeSettings(api_keys=("one",), admin_key="adm"))
    assert served.post("/admin/resume", headers={"authorization": "Bearer one"}).status_code == 401
    assert served.post("/admin/resume", headers={"authorization": "Bearer adm"}).status_code == 200
    assert served.engine.calls == [("resume",)]


def test_beyond_loopback_a_key_is_needed() -> None:
    for host in ("127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost"):
        assert is_loopback(host)
        ServeSettings(host=host)
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org", ""):
        assert not is_loopback(host)
        with pytest.raises(ConfigError, match="needs an API key"):
            ServeSettings(host=host)
        assert ServeSettings(host=host, api_keys=("k",)).host == host


def test_settings_that_cannot_be_meant_are_refused() -> None:
    for fields in (
        {"port": 70_000},
        {"max_concurrent": 0},
        {"max_queued": -1},
        {"body_limit_bytes": 0},
        {"api_keys": ("",)},
        {"admin_key": " "},
        {"api_keys": ("k",), "admin_key": "k"},
    ):
        with pytest.raises(ConfigError):
            ServeSettings(**fields)  # type: ignore[arg-type]

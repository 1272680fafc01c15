"""``docs/compatibility.md`` names what the server has: routes, fields, codes."""

from pathlib import Path

from yunque.protocol.http_errors import CODES
from yunque.protocol.openai import IGNORED_FIELDS, REFUSED_FIELDS, ChatCompletionRequest, CompletionRequest
from yunque.protocol.sglang import SglangGenerateRequest, SglangSampling
from yunque.protocol.vllm import VllmGenerateRequest, VllmSampling
from yunque.text import Renderer

from .servers import serve

PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")


def test_every_route_is_named(renderer: Renderer) -> None:
    paths = serve(renderer, "x").call("GET", "/openapi.json").json()["paths"]
    assert [path for path in paths if path not in PAGE] == []
    assert len(paths) >= 19


def test_every_field_is_named() -> None:
    models = (
        ChatCompletionRequest,
        CompletionRequest,
        SglangGenerateRequest,
        SglangSampling,
        VllmGenerateRequest,
        VllmSampling,
    )
    fields = {name for model in models for name in model.model_fields} | {*IGNORED_FIELDS, *REFUSED_FIELDS}
    assert sorted(name for name in fields if f"`{name}`" not in PAGE) == []


def test_every_code_is_named() -> None:
    codes = {*CODES.values(), "context_length_exceeded", "model_not_found", "engine_error"}
    assert sorted(code for code in codes if f"`{code}`" not in PAGE) == []

"""A reply that breaks off, in the dialects of blocks and items."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from yunque.protocol.generation import GenerationRequest, TokenDelta
from yunque.protocol.sse import SseDecoder
from yunque.serve.app import create_app
from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .scripted_engine import ScriptedEngine, ScriptSettings
from .servers import Served

BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
}


class RaisingEngine(ScriptedEngine):
    """Its iterators raise after the reply's first step instead of reporting an error."""

    def submit(self, request: GenerationRequest) -> Any:
        return self._raise(super().submit(request))

    async def _raise(self, reply: AsyncIterator[TokenDelta]) -> AsyncIterator[TokenDelta]:
        try:
            yield await anext(reply)
            raise RuntimeError("/secret/path")
        finally:
            await reply.aclose()  # type: ignore[attr-defined]


def served_by(engine_type: type[ScriptedEngine], renderer: Renderer) -> Served:
    script = ScriptSettings(vocab_size=renderer.tokenizer.vocab_size, chunk=8)
    engine = engine_type([renderer.tokenizer.encode_with_special("x</think>A long answer.<|user|>")], script)
    settings = ServeSettings()
    return Served(renderer, engine, create_app(engine, renderer, settings), settings)


@pytest.mark.parametrize(("path", "last"), [("/v1/messages", "error"), ("/v1/responses", "response.failed")])
def test_an_exception_in_the_middle_is_the_streams_last_event_and_tells_nothing(
    renderer: Renderer, path: str, last: str
) -> None:
    served = served_by(RaisingEngine, renderer)
    reply = served.post(path, BODIES[path] | {"stream": True})
    events = SseDecoder().feed(reply.content)
    assert (reply.status_code, events[-1].event, json.loads(events[-1].data)["type"]) == (200, last, last)
    assert "secret" not in reply.text
    assert served.engine.pages_used == 0


@pytest.mark.parametrize("path", list(BODIES))
def test_an_exception_before_the_whole_reply_is_a_500(renderer: Renderer, path: str) -> None:
    served = served_by(RaisingEngine, renderer)
    reply = served.post(path, BODIES[path])
    assert (reply.status_code, served.engine.pages_used) == (500, 0)
    assert "secret" not in reply.text


@pytest.mark.parametrize("path", list(BODIES))
def test_a_reply_handed_back_by_the_engine_counts_as_cut(renderer: Renderer, path: str) -> None:
    served = served_by(HandingBackEngine, renderer)
    body = served.post(path, BODIES[path]).json()
    reason = body["stop_reason"] if path == "/v1/messages" else body["incomplete_details"]["reason"]
    assert reason == ("max_tokens" if path == "/v1/messages" else "max_output_tokens")


class HandingBackEngine(ScriptedEngine):
    """Gives every reply back at once, as before an exchange of weights."""

    def submit(self, request: GenerationRequest) -> Any:
        reply = super().submit(request)
        reply.is_handed_back = True
        return reply

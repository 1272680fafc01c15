"""What hostile or careless clients do does not stall, fill or stop the server for the others."""

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from yunque.protocol.generation import JsonConstraint
from yunque.serve.answers import MAX_CONTAINERS, strict_json
from yunque.serve.long_texts import ALONE_ABOVE_CHARS, MAX_AT_ONCE, LongTexts
from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .servers import eventually, listening, serve, wait_until

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
ENDLESS: dict[str, Any] = {"rule": lambda _: [65] * 100_000, "max_model_len": 200_000}


def test_a_body_of_millions_of_arrays_is_refused_unread_and_brackets_in_text_are_not_counted(
    renderer: Renderer,
) -> None:
    """``json.loads`` of three million arrays keeps every other thread waiting for seconds."""
    served = serve(renderer, "x")
    body = b'{"messages": [' + b"[[[[[[[[]]]]]]]]," * 400_000 + b"1]}"
    begin_s = time.monotonic()
    response = served.call("POST", CHAT, content=body, headers=JSON)
    assert time.monotonic() - begin_s < 1.0
    assert response.status_code == 400
    assert f"more than {MAX_CONTAINERS} arrays and objects" in response.json()["error"]["message"]
    text = '[{\\"' * MAX_CONTAINERS + "\\"
    assert strict_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    assert strict_json(b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"[]]") is not None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab " * 400_000}),
        ("/generate", {"text": "ab " * 400_000}),
        (CHAT, {"messages": [{"role": "user", "content": "ab " * 400_000}]}),
        ("/v1/responses", {"input": "ab " * 400_000}),
    ],
)
def test_a_text_that_no_tokens_of_the_context_could_hold_is_refused_without_tokenising(
    renderer: Renderer, path: str, body: dict[str, Any]
) -> None:
    """Tokenising 5 MB takes seconds and a gigabyte."""
    served = serve(renderer, "x", max_model_len=1000)
    begin_s = time.monotonic()
    response = served.post(path, body)
    assert time.monotonic() - begin_s < 0.5
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    longest = renderer.tokenizer.longest_token_bytes
    assert longest == max(len(renderer.tokenizer.token_bytes(i)) for i in range(renderer.tokenizer.vocab_size))


def test_few_of_the_longest_texts_are_tokenised_at_once(renderer: Renderer) -> None:
    texts = LongTexts(renderer.tokenizer)
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1

    async def run() -> None:
        await asyncio.gather(*(texts.run(work, ALONE_ABOVE_CHARS + 1) for _ in range(6)))

    asyncio.run(run())
    assert most == MAX_AT_ONCE


def test_bodies_in_progress_share_a_limit_that_answers_429(renderer: Renderer) -> None:
    settings = ServeSettings(body_limit_bytes=10_000, bodies_limit_bytes=15_000, max_concurrent=1)
    served = serve(renderer, "x", settings=settings)
    body = {"prompt": "x", "user": "u" * 6000}

    async def run() -> None:
        await served.engine.pause()
        async with served.client() as client:
            held = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(2)]
            await eventually(lambda: served.engine.live)
            await asyncio.sleep(0.05)
            refused = asyncio.ensure_future(client.post("/v1/completions", json=body))
            await asyncio.sleep(0.05)
            await served.engine.resume()
            assert [(await task).status_code for task in held] == [200, 200]
            assert (await refused).status_code == 429
            assert int((await refused).headers["retry-after"]) >= 1
            assert (await client.post("/v1/completions", json=body)).status_code == 200, "the room is free again"

    asyncio.run(run())


def test_replies_are_sent_without_delay(renderer: Renderer) -> None:
    """Nagle's algorithm and delayed acknowledgements together hold every second packet back for 40 ms."""
    served = serve(renderer, "x")
    with listening(served) as url, httpx.Client(base_url=url) as client:
        client.get("/health")
        begin_s = time.monotonic()
        for _ in range(20):
            client.get("/health")
        assert (time.monotonic() - begin_s) / 20 < 0.02


def _stalled(url: str, body: dict[str, Any]) -> socket.socket:
    """A client that asks for a stream and takes nothing of it."""
    port = int(url.rpartition(":")[2])
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    link.connect(("127.0.0.1", port))
    content = json.dumps({**body, "stream": True}).encode()
    fields = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    link.sendall(f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + content)
    return link


_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"json": _SCHEMA}}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": _SCHEMA}}),
        ("/generate", {"text": "x", "sampling_params": {"json_schema": json.dumps(_SCHEMA)}}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"structured_outputs": {"json": _SCHEMA}}}),
    ],
)
def test_a_schema_is_compiled_before_its_request_is_submitted(
    renderer: Renderer, path: str, body: dict[str, Any]
) -> None:
    """Compiling takes up to 0.3 s, which the event loop would spend in ``submit``."""
    served = serve(renderer, "x")
    assert served.post(path, body).status_code == 200
    (request,) = served.engine.requests
    assert served.engine.prepared == [request.sampling.constraint] == [JsonConstraint(_SCHEMA)]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the time-out is the kernel's, on Linux")
def test_a_client_that_takes_nothing_of_its_reply_gives_its_place_up(renderer: Renderer) -> None:
    settings = ServeSettings(port=0, max_concurrent=1, send_timeout_s=1.0)
    served = serve(renderer, settings=settings, delay_s=0.0, **ENDLESS)
    with listening(served) as url:
        link = _stalled(url, {"prompt": "a", "max_tokens": None, "return_token_ids": True, "logprobs": 5})
        wait_until(lambda: served.engine.live)
        wait_until(lambda: not served.engine.live, timeout_s=15)
        assert served.engine.aborted, "its reply was ended, not finished"
        link.close()


def test_little_is_read_ahead_of_a_client_that_reads_slowly(renderer: Renderer) -> None:
    """A stalled client's reply stays in the engine: a step is taken from there when there is room for it."""
    served = serve(renderer, settings=ServeSettings(port=0), **ENDLESS)
    with listening(served) as url:
        link = _stalled(url, {"prompt": "a", "max_tokens": None, "return_token_ids": True, "logprobs": 5})
        wait_until(lambda: served.engine.live)
        made = [-1, served.engine.stats().generated_tokens]
        while made[-1] > made[-2]:
            time.sleep(0.5)
            made.append(served.engine.stats().generated_tokens)
        assert served.engine.live
        assert made[-1] < 50_000, "the system's buffers are full long before the reply is made"
        link.close()
        wait_until(lambda: not served.engine.live)


def test_a_client_that_leaves_while_it_waits_for_a_place_is_no_error_of_ours(renderer: Renderer) -> None:
    served = serve(renderer, "x", settings=ServeSettings(port=0, max_concurrent=1))

    async def run(url: str) -> None:
        async with httpx.AsyncClient(base_url=url) as client:
            await served.engine.pause()
            first = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
            await eventually(lambda: served.engine.live)
            with pytest.raises(httpx.TimeoutException):
                await client.post("/v1/completions", json={"prompt": "x"}, timeout=0.2)
            await served.engine.resume()
            assert (await first).status_code == 200
            text = (await client.get("/metrics")).text
            assert 'status="5' not in text
            assert 'yunque_http_requests_total{method="POST",route="/v1/completions",status="499"} 1.0' in text

    with listening(served) as url:
        asyncio.run(run(url))

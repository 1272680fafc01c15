"""Clients that leave, read slowly, or wait in silence, against a server that really listens."""

import asyncio
import time

import httpx
import pytest

from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .servers import eventually, listening, serve, wait_until

CHAT = {"messages": [{"role": "user", "content": "x"}]}
ENDLESS = {"rule": lambda _: [65] * 100_000, "max_model_len": 200_000}


ROUTES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "n": 3}),
    ("/v1/completions", {"prompt": "a", "max_tokens": None}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": None}}),
]


@pytest.mark.parametrize(
    ("path", "body", "stream"),
    [
        *((path, body, stream) for path, body in ROUTES for stream in (True, False)),
        ("/inference/v1/generate", {"token_ids": [1]}, False),
    ],
)
def test_a_client_that_leaves_frees_its_pages_at_once(
    renderer: Renderer, path: str, body: dict[str, object], stream: bool
) -> None:
    served = serve(renderer, delay_s=0.002, **ENDLESS)  # type: ignore[arg-type]

    async def leave(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            if stream:
                async with client.stream("POST", path, json={**body, "stream": True}) as response:
                    async for _ in response.aiter_bytes():
                        assert served.engine.pages_used > 0
                        break
                return
            task = asyncio.ensure_future(client.post(path, json=body))
            await eventually(lambda: served.engine.pages_used > 0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with listening(served) as url:
        asyncio.run(leave(url))
        begin_s = time.monotonic()
        wait_until(lambda: served.engine.pages_used == 0)
        assert time.monotonic() - begin_s < 2.0
        assert len(served.engine.aborted) == body.get("n", 1)
        assert "yunque_disconnects_total 1.0" in httpx.get(f"{url}/metrics").text


def test_a_paused_engine_is_left_at_once_too(renderer: Renderer) -> None:
    served = serve(renderer, delay_s=0.001, **ENDLESS)  # type: ignore[arg-type]

    async def leave(url: str) -> None:
        await served.engine.pause()
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            task = asyncio.ensure_future(client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
            await eventually(lambda: served.engine.pages_used > 0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with listening(served) as url:
        asyncio.run(leave(url))
        wait_until(lambda: served.engine.pages_used == 0)


def test_others_keep_their_answers_while_clients_come_and_go(renderer: Renderer) -> None:
    """Forty clients; every third leaves after its first bytes. The others get exactly their own prompt back."""
    served = serve(renderer, rule=lambda request: request.tokens, delay_s=0.001, chunk=2)

    async def ask(client: httpx.AsyncClient, number: int) -> bool:
        prompt = [(number * 7 + i) % 250 for i in range(40)]
        body = {"prompt": prompt, "max_tokens": None, "stream": True, "return_token_ids": True}
        found: list[int] = []
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if number % 3 == 0 and found:
                    return True
                if line.startswith("data: {"):
                    choice = httpx.Response(200, text=line[6:]).json()["choices"][0]
                    found += choice.get("token_ids", [])
        return found == prompt

    async def run(url: str) -> list[bool]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(40)))

    with listening(served) as url:
        assert asyncio.run(run(url)) == [True] * 40
        wait_until(lambda: served.engine.pages_used == 0)


def test_a_silent_stream_is_kept_open_by_comments(renderer: Renderer) -> None:
    served = serve(renderer, "</think>x<|user|>", delay_s=0.1, settings=ServeSettings(ping_interval_s=0.02))
    text = served.post("/v1/chat/completions", {**CHAT, "stream": True}).text
    assert text.count(": ping\n\n") >= 3
    assert text.endswith("data: [DONE]\n\n")


def test_a_slow_reader_does_not_hold_the_others_up(renderer: Renderer) -> None:
    served = serve(renderer, rule=lambda _: [65] * 20_000, max_model_len=30_000, chunk=50)

    async def run(url: str) -> float:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            body = {"prompt": "a", "max_tokens": None, "stream": True, "return_token_ids": True}
            async with client.stream("POST", "/v1/completions", json=body) as slow:
                assert slow.status_code == 200  # and nothing of it is read
                begin_s = time.monotonic()
                response = await client.post("/v1/completions", json={"prompt": "b", "max_tokens": 100})
                assert response.status_code == 200
                return time.monotonic() - begin_s

    with listening(served) as url:
        assert asyncio.run(run(url)) < 5
        wait_until(lambda: served.engine.pages_used == 0)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_a_long_text_is_encoded_beside_the_event_loop(renderer: Renderer, path: str) -> None:
    """The longest silence of the loop is a small part of the time that the request takes."""
    served = serve(renderer, "</think>x<|user|>", max_model_len=10**7)
    text = "The assistant thinks, then answers. " * 40_000
    body = {"prompt": text} if path == "/tokenize" else {"messages": [{"role": "user", "content": text}]}

    async def run() -> tuple[float, float]:
        gaps: list[float] = []

        async def watch() -> None:
            while True:
                begin_s = time.monotonic()
                await asyncio.sleep(0.001)
                gaps.append(time.monotonic() - begin_s)

        watcher = asyncio.ensure_future(watch())
        begin_s = time.monotonic()
        async with served.client() as client:
            assert (await client.post(path, json=body)).status_code == 200
        watcher.cancel()
        return max(gaps), time.monotonic() - begin_s

    longest_s, total_s = asyncio.run(run())
    assert longest_s < total_s / 3

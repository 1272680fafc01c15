"""Limits: bodies, concurrent replies, the queue before them."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .servers import Served, eventually, serve

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "x"}]}


async def chunked(size: int, seen: list[int]) -> AsyncIterator[bytes]:
    yield b'{"prompt": "'
    for _ in range(size // 1000):
        seen.append(1000)
        yield b"a" * 1000
    yield b'"}'


def test_an_oversize_body_is_a_413_by_its_header_or_while_it_comes(renderer: Renderer) -> None:
    served = serve(renderer, "x", settings=ServeSettings(body_limit_bytes=10_000))
    response = served.post("/v1/completions", {"prompt": "a" * 20_000})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    seen: list[int] = []
    headers = {"content-type": "application/json"}
    response = served.call("POST", "/v1/completions", content=chunked(10**6, seen), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert sum(seen) <= 12_000, "it was refused while it came"
    response = served.call("POST", "/v1/completions", content=chunked(5000, seen), headers=headers)
    assert response.status_code == 200
    assert served.post("/v1/messages", {"x": "a" * 20_000}).json()["error"]["type"] == "request_too_large"
    response = served.call("POST", CHAT, content=b"", headers={"content-length": "9" * 30})
    assert response.status_code == 413


def test_a_body_that_does_not_arrive_is_a_408(renderer: Renderer) -> None:
    served = serve(renderer, "x", settings=ServeSettings(body_timeout_s=0.05))
    never = asyncio.Event()

    async def run() -> list[dict[str, object]]:
        sent: list[dict[str, object]] = []

        async def receive() -> dict[str, object]:
            await never.wait()
            return {}

        async def send(message: dict[str, object]) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
        await served.app({"asgi": {}, "scheme": "http", "server": ("t", 1), **scope}, receive, send)  # type: ignore[arg-type]
        return sent

    assert asyncio.run(run())[0]["status"] == 408


async def post(client: httpx.AsyncClient, path: str = CHAT) -> httpx.Response:
    return await client.post(path, json=BODY)


def waiting(renderer: Renderer, **settings: int) -> Served:
    """A server whose engine is paused: what it lets through stays in flight."""
    return serve(renderer, "</think>x<|user|>", settings=ServeSettings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(("concurrent", "queued"), [(1, 0), (2, 0), (2, 3)])
def test_more_than_the_queue_holds_is_a_429_and_the_rest_is_answered(
    renderer: Renderer, concurrent: int, queued: int
) -> None:
    served = waiting(renderer, max_concurrent=concurrent, max_queued=queued)

    async def run() -> list[int]:
        await served.engine.pause()
        async with served.client() as client:
            posts = [asyncio.ensure_future(post(client)) for _ in range(concurrent + queued + 2)]
            await eventually(lambda: sum(task.done() for task in posts) == 2)
            assert len(served.engine.live) == concurrent
            refused = [task.result() for task in posts if task.done()]
            assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
            assert {response.json()["error"]["code"] for response in refused} == {"rate_limit_exceeded"}
            assert (await client.get("/health")).status_code == 503, "probes do not wait"
            await served.engine.resume()
            statuses = [response.status_code for response in await asyncio.gather(*posts)]
            assert (await post(client)).status_code == 200, "every place is free again"
            return statuses

    assert sorted(asyncio.run(run())) == [200] * (concurrent + queued) + [429, 429]


def test_a_waiting_client_that_leaves_gives_its_place_up(renderer: Renderer) -> None:
    served = waiting(renderer, max_concurrent=1, max_queued=1)

    async def run() -> None:
        await served.engine.pause()
        async with served.client() as client:
            first = asyncio.ensure_future(post(client))
            await eventually(lambda: served.engine.live)
            second = asyncio.ensure_future(post(client))
            await asyncio.sleep(0.02)
            assert (await post(client)).status_code == 429
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            third = asyncio.ensure_future(post(client))
            await asyncio.sleep(0.02)
            await served.engine.resume()
            assert (await first).status_code == 200
            assert (await third).status_code == 200

    asyncio.run(run())
    assert len(served.engine.requests) == 2


def test_an_oversize_body_that_waited_is_still_a_413(renderer: Renderer) -> None:
    served = serve(renderer, "x", settings=ServeSettings(max_concurrent=1, max_queued=1, body_limit_bytes=2000))

    async def run() -> int:
        await served.engine.pause()
        async with served.client() as client:
            first = asyncio.ensure_future(post(client))
            await eventually(lambda: served.engine.live)
            headers = {"content-type": "application/json"}
            second = asyncio.ensure_future(client.post(CHAT, content=chunked(9000, []), headers=headers))
            await asyncio.sleep(0.02)
            await served.engine.resume()
            assert (await first).status_code == 200
            return (await second).status_code

    assert asyncio.run(run()) == 413

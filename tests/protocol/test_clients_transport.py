"""What is tried again and what is not, time-outs, and other servers' refusals as our errors."""

import asyncio
import socket
import time
from email.utils import formatdate
from typing import Any

import httpx
import pytest

from yunque.core.errors import ConfigError, YunqueError
from yunque.protocol.clients import HttpSettings, JsonTransport
from yunque.protocol.clients.problems import error_of, retry_after_s
from yunque.protocol.errors import ContextLengthExceeded, EngineUnavailable, Overloaded, RequestError, UnusableReply

from .scripted_server import Answer, ClosingServer, ScriptedServer


class Clock:
    """Keeps the waits instead of waiting."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.waits.append(seconds)


def post(url: str, clock: Clock | None = None, *, is_idempotent: bool = False, **settings: Any) -> bytes:
    async def run() -> bytes:
        transport = JsonTransport(url, HttpSettings(**settings), sleep=clock or Clock())
        try:
            return await transport.post("/x", {"a": 1}, is_idempotent=is_idempotent)
        finally:
            await transport.close()

    return asyncio.run(run())


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_that_passes_is_tried_again_after_the_time_that_the_server_says(
    server: ScriptedServer, status: int
) -> None:
    clock = Clock()
    server.play(Answer("", status, {"retry-after": "7"}), Answer("", status), Answer({"ok": 1}))
    assert post(server.url, clock, backoff_s=0.5) == b'{"ok": 1}'
    assert len(server.asked) == 3
    assert clock.waits[0] == 7
    assert 0.5 <= clock.waits[1] <= 1  # the second wait is twice the first, less at most half


def test_tries_end_with_the_server_s_words_and_its_time(server: ScriptedServer) -> None:
    clock = Clock()
    server.play(Answer({"error": {"message": "queue of 9 is full"}}, 429, {"retry-after": "3"}))
    with pytest.raises(Overloaded, match="queue of 9 is full") as caught:
        post(server.url, clock, attempts=3)
    assert (caught.value.retry_after_s, len(server.asked), clock.waits) == (3, 3, [3, 3])


def test_a_server_that_says_to_come_back_much_later_is_not_waited_for(server: ScriptedServer) -> None:
    server.play(Answer("busy", 429, {"retry-after": "3600"}))
    with pytest.raises(Overloaded) as caught:
        post(server.url, retry_after_max_s=60)
    assert (caught.value.retry_after_s, len(server.asked)) == (3600, 1)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 500, 502, 504])
def test_other_refusals_are_final(server: ScriptedServer, status: int) -> None:
    server.play(Answer("no", status))
    with pytest.raises((RequestError, EngineUnavailable)):
        post(server.url, is_idempotent=True)
    assert len(server.asked) == 1


def test_a_refused_connection_is_tried_again_and_waits_grow_to_their_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    clock = Clock()
    with pytest.raises(EngineUnavailable, match="cannot be reached"):
        post(f"http://127.0.0.1:{port}", clock, attempts=6, backoff_s=1, backoff_max_s=4)
    longest = [1, 2, 4, 4, 4]
    assert all(most / 2 <= wait <= most for wait, most in zip(clock.waits, longest, strict=True))


@pytest.mark.parametrize(("is_idempotent", "asked"), [(True, 3), (False, 1)])
def test_a_connection_that_closes_without_a_word_is_tried_again_only_where_nothing_can_double(
    is_idempotent: bool, asked: int
) -> None:
    async def run() -> int:
        async with ClosingServer(2, {"ok": 1}) as closing:
            transport = JsonTransport(closing.url, sleep=Clock())
            call = transport.post("/x", {}, is_idempotent=is_idempotent)
            if is_idempotent:
                assert await call == b'{"ok": 1}'
            else:
                with pytest.raises(EngineUnavailable, match="broke off"):
                    await call
            await transport.close()
            return closing.asked

    assert asyncio.run(run()) == asked


@pytest.mark.parametrize(("is_idempotent", "asked"), [(True, 2), (False, 1)])
def test_an_answer_that_stops_half_way_is_never_used(server: ScriptedServer, is_idempotent: bool, asked: int) -> None:
    server.play(Answer({"text": "a" * 1000}, breaks_off=True), Answer({"ok": 1}))
    if is_idempotent:
        assert post(server.url, is_idempotent=True) == b'{"ok": 1}'
    else:
        with pytest.raises(EngineUnavailable, match="broke off"):
            post(server.url)
    assert len(server.asked) == asked


def test_a_slow_server_is_given_up_once_and_sees_that_its_client_left(server: ScriptedServer) -> None:
    server.play(Answer({}, delay_s=30))
    begin = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"no answer within 0\.2 s"):
        post(server.url, is_idempotent=True, read_timeout_s=0.2)
    assert time.monotonic() - begin < 5
    assert len(server.asked) == 1
    end = time.monotonic() + 5
    while not server.left:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_cancelled_call_closes_its_connection(server: ScriptedServer) -> None:
    server.play(Answer({}, delay_s=30))

    async def run() -> None:
        transport = JsonTransport(server.url)
        call = asyncio.ensure_future(transport.post("/x", {}, is_idempotent=True))
        while not server.asked:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(5):
            while not server.left:
                await asyncio.sleep(0.01)
        await transport.close()

    asyncio.run(run())


def test_the_key_the_path_and_the_headers_are_sent(server: ScriptedServer) -> None:
    server.play(Answer({}))

    async def run() -> None:
        transport = JsonTransport(server.url + "/engines/3/", HttpSettings(api_key="k1"))
        await transport.post("/generate", {"é": "\ud800"}, headers={"X-Session-ID": "s"}, is_idempotent=False)
        await transport.close()

    asyncio.run(run())
    (asked,) = server.asked
    assert (asked.path, asked.body) == ("/engines/3/generate", {"é": "\ud800"})
    assert (asked.headers["authorization"], asked.headers["x-session-id"]) == ("Bearer k1", "s")


def test_many_requests_share_connections(server: ScriptedServer) -> None:
    server.play(Answer({"ok": 1}, delay_s=0.05))

    async def run() -> int:
        transport = JsonTransport(server.url)
        found = await asyncio.gather(*(transport.post("/x", {}, is_idempotent=False) for _ in range(100)))
        await transport.close()
        return found.count(b'{"ok": 1}')

    assert asyncio.run(run()) == 100


@pytest.mark.parametrize("address", ["ftp://host", "host:8000", "", "http://", "http://[::1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        JsonTransport(address)


@pytest.mark.parametrize("fields", [{"attempts": 0}, {"read_timeout_s": 0}, {"backoff_s": -1}, {"api_key": " "}])
def test_settings_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HttpSettings(**fields)


SGLANG_LONG = "The input (9 tokens) is longer than the model's context length (8 tokens)."
VLLM_LONG = "This model's maximum context length is 8 tokens. However, you requested 9 tokens."


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, ContextLengthExceeded, "too long"),
        (400, {"error": {"message": SGLANG_LONG}}, ContextLengthExceeded, "context length"),
        (400, {"object": "error", "message": VLLM_LONG, "code": 400}, ContextLengthExceeded, "8 tokens"),
        (400, {"error": {"message": "no", "param": "top_p"}}, RequestError, "no"),
        (401, {"detail": "who are you"}, RequestError, "who are you"),
        (422, {"detail": [{"loc": ["body", "x"], "msg": "field required"}]}, RequestError, "body.x: field required"),
        (404, "<html>nothing</html>", RequestError, "nothing"),
        (429, {"error": {"message": "slow down"}}, Overloaded, "slow down"),
        (503, {"error": {"message": "draining"}}, EngineUnavailable, "draining"),
        (500, b"\xff", EngineUnavailable, "500"),
        (502, "", EngineUnavailable, "no reason given"),
        (307, "elsewhere", UnusableReply, "elsewhere"),
    ],
)
def test_refusals_become_our_errors_and_keep_the_server_s_words(
    status: int, body: Any, kind: type[YunqueError], words: str
) -> None:
    content = Answer(body).content
    error = error_of(httpx.Response(status, content=content, request=httpx.Request("POST", "http://h/generate")))
    assert type(error) is kind
    assert words in str(error)
    assert f"http://h/generate answered {status}" in str(error)
    if isinstance(error, RequestError) and b"top_p" in content:
        assert error.param == "top_p"


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after_s({"retry-after": "1.5"}) == 1.5
    assert retry_after_s({"retry-after": "-4"}) == 0
    assert 50 < (retry_after_s({"retry-after": formatdate(time.time() + 60, usegmt=True)}) or 0) <= 60
    assert retry_after_s({"retry-after": "soon"}) is None
    assert retry_after_s({}) is None

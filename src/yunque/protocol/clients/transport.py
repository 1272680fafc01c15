"""JSON over a pool of connections: time-outs, tries that can help, and errors of ours."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.request import getproxies

import httpx

from yunque.core.errors import ConfigError, YunqueError
from yunque.protocol.clients.problems import error_of, retry_after_s
from yunque.protocol.clients.settings import HttpSettings
from yunque.protocol.errors import EngineUnavailable
from yunque.protocol.openai import dump

_RETRIED_STATUS = (429, 503)
_KEEP_ALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


@dataclass(frozen=True)
class _Failure:
    """A try that failed. ``can_repeat``: another one may do better and cannot make a second reply."""

    error: YunqueError
    can_repeat: bool
    wait_s: float | None = None


class JsonTransport:
    """Requests to one server. It may be used from one event loop, by any number of tasks.

    What was refused before anything ran (no connection, 429, 503) is tried again. A connection that broke later is
    tried again only where ``is_idempotent``: tokens may have been made. A read that takes too long is not: the server
    is at work. Loopback addresses are reached without the environment's proxies.
    """

    def __init__(
        self,
        base_url: str,
        settings: HttpSettings | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        random: Random | None = None,
    ) -> None:
        self.settings = settings = settings or HttpSettings()
        self.base_url = _checked(base_url)
        self._sleep = sleep
        self._random = random or Random()
        limits = httpx.Limits(max_connections=settings.max_connections, max_keepalive_connections=None)
        is_direct = self.base_url.host in ("localhost", "127.0.0.1", "::1") or not getproxies()
        key = {} if settings.api_key is None else {"authorization": f"Bearer {settings.api_key}"}
        self._client = httpx.AsyncClient(
            headers={"content-type": "application/json", **key},
            timeout=httpx.Timeout(settings.read_timeout_s, connect=settings.connect_timeout_s, pool=None),
            limits=limits,
            # A given transport leaves the environment's proxies aside.
            transport=httpx.AsyncHTTPTransport(limits=limits, socket_options=_socket_options()) if is_direct else None,
        )

    async def post(
        self, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None, is_idempotent: bool
    ) -> bytes:
        """The body of the answer. Raises ``RequestError``, ``ContextLengthExceeded``, ``Overloaded`` or
        ``EngineUnavailable``. A cancelled call closes its connection, and with that the server's work."""
        request = self._request("POST", path, body, headers)
        response = await self._answer(request, is_idempotent=is_idempotent, is_stream=False)
        return response.content

    async def get(self, path: str) -> bytes:
        """The same for ``GET``."""
        response = await self._answer(self._request("GET", path, None, None), is_idempotent=True, is_stream=False)
        return response.content

    @asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[httpx.Response, None]:
        """An answer whose bytes are read as they come; leaving the block closes the connection. Only what precedes
        the answer's head is tried again; errors of the connection while reading are ``EngineUnavailable``."""
        request = self._request("POST", path, body, headers)
        response = await self._answer(request, is_idempotent=False, is_stream=True)
        try:
            yield response
        except httpx.TransportError as error:
            raise EngineUnavailable(f"{request.url} broke off its answer: {_words(error)}") from error
        finally:
            await response.aclose()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str] | None
    ) -> httpx.Request:
        content = None if body is None else dump(body).encode()
        url = self.base_url.copy_with(path=self.base_url.path.rstrip("/") + path)
        return self._client.build_request(method, url, content=content, headers=headers)

    async def _answer(self, request: httpx.Request, *, is_idempotent: bool, is_stream: bool) -> httpx.Response:
        attempt = 1
        while True:
            found = await self._try(request, is_idempotent=is_idempotent, is_stream=is_stream)
            if isinstance(found, httpx.Response):
                return found
            wait_s = self._wait_s(attempt) if found.wait_s is None else found.wait_s
            is_last = attempt >= self.settings.attempts or wait_s > self.settings.retry_after_max_s
            if is_last or not found.can_repeat:
                raise found.error
            await self._sleep(wait_s)
            attempt += 1

    def _wait_s(self, attempt: int) -> float:
        """Twice as long after every try, and up to half of it less, lest all clients come back together."""
        longest = min(self.settings.backoff_s * 2 ** (attempt - 1), self.settings.backoff_max_s)
        return longest * (1 - self._random.random() / 2)

    async def _try(self, request: httpx.Request, *, is_idempotent: bool, is_stream: bool) -> httpx.Response | _Failure:
        try:
            response = await self._client.send(request, stream=True)
            try:
                if not (is_stream and response.is_success):
                    await response.aread()
            finally:
                if not (is_stream and response.is_success):
                    await response.aclose()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return _Failure(EngineUnavailable(f"{request.url} cannot be reached: {_words(error)}"), can_repeat=True)
        except httpx.TimeoutException:
            waited = f"{self.settings.read_timeout_s:g} s"
            return _Failure(EngineUnavailable(f"{request.url} gave no answer within {waited}"), can_repeat=False)
        except (httpx.TransportError, httpx.DecodingError) as error:
            message = f"{request.url} broke off its answer: {_words(error)}"
            return _Failure(EngineUnavailable(message), can_repeat=is_idempotent)
        if response.is_success:
            return response
        can_repeat = response.status_code in _RETRIED_STATUS
        return _Failure(error_of(response), can_repeat, retry_after_s(response.headers))


def _checked(base_url: str) -> httpx.URL:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{base_url!r} is not an address: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{base_url!r} is not an address; example: http://127.0.0.1:8000")
    return url


def _socket_options() -> list[tuple[int, int, int]]:
    """The system notices a peer that died while we wait: nothing is sent during a long reply."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    known = [(getattr(socket, name), value) for name, value in _KEEP_ALIVE if hasattr(socket, name)]
    return options + [(socket.IPPROTO_TCP, name, value) for name, value in known]


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__

"""Start a server: bind, say where, answer until a signal comes, drain, end."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from yunque.core.errors import ConfigError
from yunque.protocol.generation import EngineService
from yunque.serve.listener import listen, url_of
from yunque.serve.settings import ServeSettings

_CLOSE_MARGIN_S = 2.0


class Server(uvicorn.Server):
    """A server that drains its engine before it closes its connections.

    After SIGTERM or SIGINT no connection is accepted; replies in flight have ``drain_timeout_s`` to end, then the
    engine hands them back as they are. A second signal ends at once. ``url`` is known once ``bind`` was called.
    """

    def __init__(self, app: FastAPI, service: EngineService, settings: ServeSettings) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=max(1, round(settings.keep_alive_s)),
            timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s + _CLOSE_MARGIN_S)),
        )
        super().__init__(config)
        self._service = service
        self._settings = settings
        self._socket: socket.socket | None = None

    def bind(self) -> str:
        """Take the port (0: any free one) and return the URL. Raises ``ConfigError`` where that cannot be done."""
        settings = self._settings
        try:
            self._socket = listen(settings.host, settings.port, send_timeout_s=settings.send_timeout_s)
        except OSError as error:
            host = settings.host.strip("[]")
            raise ConfigError(f"cannot listen on {host} port {settings.port}: {error.strerror}") from error
        return self.url

    @property
    def url(self) -> str:
        """Where the server is, with the port that it really has."""
        assert self._socket is not None, "bind first"
        return url_of(self._socket)

    def close(self) -> None:
        """Give the port back; ``answer`` does it by itself."""
        if self._socket is not None:
            self._socket.close()

    async def answer(self) -> None:
        """Answer until a signal, or until ``should_exit`` is set."""
        assert self._socket is not None, "bind first"
        await self.serve(sockets=[self._socket])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the door, and meanwhile let the engine finish what it has begun."""
        drain = asyncio.ensure_future(self._service.drain(self._settings.drain_timeout_s))
        await super().shutdown(sockets)
        drain.cancel()
        await asyncio.gather(drain, return_exceptions=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end the server, and are spent then: the caller goes on to close what it opened."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def answer_forever(
    app: FastAPI, service: EngineService, settings: ServeSettings, *, announce: Callable[[str], None] = print
) -> None:
    """Serve ``app`` as ``settings`` say, tell ``announce`` the URL, and return after a stop signal and the drain."""
    server = Server(app, service, settings)
    announce(server.bind())
    await server.answer()

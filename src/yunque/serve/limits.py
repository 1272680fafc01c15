"""How much a server takes on: the size and arrival time of bodies, and the replies made and waiting at once."""

import asyncio
import math
from collections import deque

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from yunque.protocol.http_errors import problem
from yunque.serve.answers import problem_response
from yunque.serve.settings import ServeSettings

GENERATION_PATHS = frozenset(
    (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/generate",
        "/inference/v1/generate",
    )
)


class LimitBody:
    """ASGI middleware: a body over the limit is answered 413 when its header says so, or as soon as it has grown over
    it; one that does not arrive in time 408. All bodies of requests in progress, queued ones too, share a limit: what
    exceeds that is answered 429."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._limit = settings.body_limit_bytes
        self._room = settings.bodies_limit_bytes
        self._retry_after_s = settings.retry_after_s
        self._timeout_s = settings.body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > self._limit):
            too_large = problem(413, self._text())
            response = problem_response(too_large, scope["path"])
            response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        size, is_whole = 0, False

        async def limited() -> Message:
            nonlocal size, is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {self._timeout_s:g} s") from None
            part = len(message.get("body", b""))
            size += part
            self._room -= part
            is_whole = not message.get("more_body", False)
            if size > self._limit:
                raise HTTPException(413, self._text(), {"connection": "close"})
            if self._room < 0:
                raise self._crowded()
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._room += size

    def _crowded(self) -> HTTPException:
        retry_after_s = str(max(1, math.ceil(self._retry_after_s)))
        headers = {"connection": "close", "retry-after": retry_after_s}
        return HTTPException(429, "the bodies in progress fill the memory set aside; try again later", headers)

    def _text(self) -> str:
        return f"the body is larger than {self._limit} bytes"


class LimitReplies:
    """ASGI middleware: ``max_concurrent`` generation requests are let through, ``max_queued`` more wait in order, and
    the next is answered 429 at once. One whose client leaves gives its place up."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._free = settings.max_concurrent
        self._max_queued = settings.max_queued
        self._retry_after_s = settings.retry_after_s
        self._queue: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not _generates(scope["path"]):
            await self._app(scope, receive, send)
            return
        if self._free:
            self._free -= 1
        elif len(self._queue) >= self._max_queued:
            busy = problem(
                429,
                f"{self._max_queued} requests are waiting already; try again later",
                retry_after_s=self._retry_after_s,
            )
            await problem_response(busy, scope["path"])(scope, receive, send)
            return
        else:
            replay = await self._wait(receive)
            if replay is None:
                return
            receive = replay
        try:
            await self._app(scope, receive, send)
        finally:
            self._release()

    async def _wait(self, receive: Receive) -> Receive | None:
        """Wait for a place; what the client sent meanwhile is handed on afterwards. None: the client left."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        early: deque[Message | Exception] = deque()
        reader = asyncio.ensure_future(_read_until_left(receive, early))
        has_place = False
        try:
            await asyncio.wait({place, reader}, return_when=asyncio.FIRST_COMPLETED)
            if early and isinstance(early[-1], Exception):
                await place  # the error of the body is answered in turn
            has_place = place.done()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            if not has_place:
                self._leave(place)
        if not has_place:
            return None

        async def replay() -> Message:
            message = early.popleft() if early else await receive()
            if isinstance(message, Exception):
                raise message
            return message

        return replay

    def _leave(self, place: "asyncio.Future[None]") -> None:
        if place.done():
            self._release()
        else:
            self._queue.remove(place)

    def _release(self) -> None:
        if self._queue:
            self._queue.popleft().set_result(None)
        else:
            self._free += 1


async def _read_until_left(receive: Receive, early: "deque[Message | Exception]") -> None:
    while True:
        try:
            message = await receive()
        except HTTPException as error:  # the body is too large or too slow
            early.append(error)
            return
        early.append(message)
        if message["type"] == "http.disconnect":
            return


def _generates(path: str) -> bool:
    return path in GENERATION_PATHS

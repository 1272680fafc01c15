"""One request on its way to engines and back: tried again, continued, given up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
from starlette.types import Receive, Scope, Send

from yunque.core.logging import get_logger
from yunque.serve.router import answers, sse
from yunque.serve.router.continuation import CannotContinue, TokenReply, token_reply
from yunque.serve.router.exchange import ClientSide, Failure, Headers, finish, follow, kept_headers, pass_on
from yunque.serve.router.fleet import Backend, Fleet
from yunque.serve.router.health import Sign
from yunque.serve.router.meters import Meters
from yunque.serve.router.placement import Ask
from yunque.serve.router.replay import TextReply, text_reply
from yunque.serve.router.settings import RouterSettings

_log = get_logger(__name__)

GENERATION_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate", "/inference/v1/generate"}
)
#: Statuses by which an engine says "not me, not now": nothing of the request ran.
_REFUSALS = (429, 502, 503, 504)
_BUSY = 429
#: An engine that repeats the whole reply in every event is asked for events no longer, after this many tokens.
_REPEATS_AFTER = 64


@dataclass(frozen=True)
class Call:
    """A client's request. ``target`` is path and query as they came; ``body`` the JSON object of a generation."""

    method: str
    path: str
    target: str
    headers: Headers
    content: bytes
    ask: Ask = field(default_factory=Ask)
    body: Mapping[str, Any] | None = None

    @property
    def label(self) -> str:
        return self.path if self.path in GENERATION_PATHS else "other"

    @property
    def is_repeatable(self) -> bool:
        """Whether an engine may do it again: generations and reads."""
        return self.body is not None or self.method in ("GET", "HEAD", "OPTIONS")

    def reply(self) -> TokenReply | TextReply | None:
        """A reply that can be followed over engines, where this is a request for one."""
        if self.body is None:
            return None
        return token_reply(self.path, self.body) or text_reply(self.path, self.body)


@dataclass(frozen=True)
class Refusal:
    """An engine's answer that is passed on if no other engine does better."""

    status: int
    headers: Headers
    content: bytes

    @property
    def wait_s(self) -> float:
        value = next((value for name, value in self.headers if name.lower() == "retry-after"), "")
        return float(value) if value.isdigit() else 1.0


class Relay:
    """The answer to ``call`` as an ASGI application: the client going away ends it, upstream as well."""

    def __init__(
        self, call: Call, fleet: Fleet, client: httpx.AsyncClient, meters: Meters, settings: RouterSettings
    ) -> None:
        self._call = call
        self._fleet = fleet
        self._engines = client
        self._meters = meters
        self._settings = settings
        self._reply = call.reply()
        self._refusals: list[Refusal] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        outcome, client = "disconnected", ClientSide(send)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_leave_with_client, receive, client, group.cancel_scope)
                outcome = await self._serve(client)
                group.cancel_scope.cancel()
        finally:
            self._meters.requests.labels(self._call.label, outcome).inc()

    async def _serve(self, client: ClientSide) -> str:
        """Ask engines until one has answered; returns what became of the request."""
        tried: set[str] = set()
        reason = "no engine is usable"
        for _ in range(self._settings.max_attempts):
            found = self._fleet.acquire(self._call.ask, exclude=tried)
            if found is None:
                break
            backend, placed = found
            self._meters.placements.labels(str(placed.why)).inc()
            made = self._tokens
            try:
                outcome = await self._attempt(backend, client)
            finally:
                self._fleet.release(backend, self._call.ask)
            name = "ok" if outcome is None else "refused" if isinstance(outcome, Refusal) else "failed"
            self._meters.attempts.labels(backend.url, name).inc()
            if outcome is None:
                return "ok"
            tried = {backend.url} if self._tokens > made else tried | {backend.url}
            if isinstance(outcome, Failure) and outcome.may_return:
                tried -= {backend.url}
            if isinstance(outcome, Refusal):
                self._refusals.append(outcome)
                if sum(refusal.status == _BUSY for refusal in self._refusals) > 1:
                    break
                continue
            reason = outcome.reason
            _log.warning("%s at %s failed after %d tokens: %s", self._call.path, backend.url, self._tokens, reason)
            if outcome.sign is not None:
                self._fleet.blame(backend, outcome.sign, reason)
            if await self._has_ended(client):
                return "ok"
            if outcome.is_final or (client.is_started and self._reply is None):
                break
        return await self._give_up(client, reason)

    @property
    def _tokens(self) -> int:
        return self._reply.tokens if self._reply is not None else 0

    async def _attempt(self, backend: Backend, client: ClientSide) -> Refusal | Failure | None:
        """One engine's try. None: the client has its answer."""
        is_safe = self._call.is_repeatable
        with anyio.CancelScope() as scope:
            backend.scopes.add(scope)
            try:
                return await self._exchange(backend, client)
            except CannotContinue as error:
                if not client.is_started:
                    self._reply = self._call.reply()  # the client has heard nothing: from the beginning
                return Failure(str(error), is_final=client.is_started)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                return Failure(f"{type(error).__name__}: {error}", Sign.SILENT)
            except httpx.TimeoutException as error:
                return Failure(type(error).__name__, is_final=not is_safe)
            except httpx.TransportError as error:
                return Failure(f"{type(error).__name__}: {error}", Sign.SILENT, is_final=not is_safe)
            except sse.EventTooLong as error:
                return Failure(str(error), is_final=True)
            finally:
                backend.scopes.discard(scope)
        return Failure("its heartbeats stopped", is_final=not is_safe)

    async def _exchange(self, backend: Backend, client: ClientSide) -> Refusal | Failure | None:
        path = self._call.path
        content, is_upgraded = self._content(backend, client, streams=path not in backend.declines)
        is_continuation = self._tokens > 0 or client.is_started
        if is_continuation:
            self._meters.continuations.labels(self._call.label).inc()
            self._meters.continued_tokens.labels(self._call.label).inc(self._tokens)
        response = await self._ask(backend, content)
        try:
            if is_upgraded and 400 <= response.status_code < 500 and response.status_code != _BUSY:
                await response.aclose()
                response = await self._ask(backend, self._content(backend, client, streams=False)[0])
                if response.is_success:  # it was the stream that it did not want
                    backend.declines.add(path)
            if response.status_code in _REFUSALS:
                headers = kept_headers(response.headers.multi_items())
                return Refusal(response.status_code, tuple(headers), await response.aread())
            if is_continuation and not response.is_success:
                return Failure(f"the next engine answers {response.status_code}")
            is_followed = self._reply is not None and response.is_success
            if self._reply is None or not is_followed or (_is_whole(response) and not is_continuation):
                await pass_on(response, client)
                return None
            return await follow(
                response,
                self._reply,
                client,
                is_leaving=lambda: self._fleet.is_leaving(backend),
                on_event=lambda: self._note_repeats(backend),
            )
        finally:
            await response.aclose()

    def _content(self, backend: Backend, client: ClientSide, *, streams: bool) -> tuple[bytes, bool]:
        """What to send, and whether it asks for a stream that the client did not ask for (only with ``streams``)."""
        if self._reply is None:
            return self._call.content, False
        try:
            body = self._reply.next_body(streams=streams, resumes=backend.resumes)
        except CannotContinue as error:
            begun_anew = self._call.reply()
            if client.is_started or begun_anew is None:
                raise
            _log.warning("%s begins anew: %s", self._call.path, error)
            self._reply, body = begun_anew, begun_anew.next_body(streams=streams)
        if body == self._call.body:
            return self._call.content, False
        return json.dumps(body).encode(), streams and not self._reply.wants_stream

    def _note_repeats(self, backend: Backend) -> None:
        """Ask an engine no more for streams that clients do not want, if it repeats the reply in every event."""
        reply = self._reply
        if isinstance(reply, TokenReply) and reply.is_incremental is False and reply.tokens > _REPEATS_AFTER:
            backend.declines.add(self._call.path)

    async def _ask(self, backend: Backend, content: bytes) -> httpx.Response:
        headers = kept_headers(self._call.headers)
        if self._reply is not None or not any(name.lower() == "accept-encoding" for name, _ in headers):
            headers = [pair for pair in headers if pair[0].lower() != "accept-encoding"]
            headers.append(("accept-encoding", "identity"))
        if self._settings.engine_key is not None:
            headers = [pair for pair in headers if pair[0].lower() not in ("authorization", "x-api-key")]
            headers.append(("authorization", f"Bearer {self._settings.engine_key}"))
        url = backend.url + self._call.target
        request = self._engines.build_request(self._call.method, url, headers=headers, content=content)
        return await self._engines.send(request, stream=True)

    async def _has_ended(self, client: ClientSide) -> bool:
        """Whether the lost engine had sampled the last token and only the word about it was missing: say it."""
        reply = self._reply
        if reply is None:
            return False
        ending = None if reply.is_finished else reply.closing()
        if not reply.is_finished:
            return False
        if ending is not None and reply.wants_stream:
            await client.start(200, [("content-type", "text/event-stream; charset=utf-8")])
            await client.write(sse.encode(ending))
        await finish(reply, client)
        return True

    async def _give_up(self, client: ClientSide, reason: str) -> str:
        if client.is_started:
            message = f"the engine was lost and the reply cannot go on: {reason}"
            if client.is_events:
                await client.end(answers.stream_error(self._call.path, message))
            return "cut"  # without events nothing can be said: the connection closes in the middle
        if self._refusals:
            refusal = min(self._refusals, key=lambda one: (one.status != _BUSY, one.wait_s))
            await client.start(refusal.status, [*refusal.headers, ("content-length", str(len(refusal.content)))])
            await client.end(refusal.content)
            return "refused"
        found = answers.no_engine(reason)
        await client.json(found.status, json.dumps(found.openai_body()).encode(), tuple(found.headers.items()))
        return "failed"


def _is_whole(response: httpx.Response) -> bool:
    return not response.headers.get("content-type", "").startswith("text/event-stream")


async def _leave_with_client(receive: Receive, client: ClientSide, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not client.is_ended:  # else what is left of the engine's answer is still read out
        scope.cancel()

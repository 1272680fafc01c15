"""What a request says about where it belongs: its session, and hashes of the prefixes of its prompt."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from yunque.serve.router.placement import Ask

TOKENS_PER_BLOCK = 64
BYTES_PER_BLOCK = 512
MAX_BLOCKS = 1024

#: Headers that name a session: our own and vLLM's, SGLang's router's.
SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")
#: Fields of a body that name one: OpenAI's.
SESSION_FIELDS = ("prompt_cache_key", "user")


def ask_of(headers: Mapping[str, str], body: Mapping[str, Any], *, by_api_key: bool = False) -> Ask:
    """Session and prefix hashes of a generation request; ``headers`` has lower-case names.

    The session is the first of X-Session-ID, X-SMG-Routing-Key, ``prompt_cache_key``, ``user``, and with
    ``by_api_key`` the client's API key.
    """
    return Ask(session=session_of(headers, body, by_api_key=by_api_key), blocks=prefix_hashes(body))


def session_of(headers: Mapping[str, str], body: Mapping[str, Any], *, by_api_key: bool = False) -> str | None:
    for name in SESSION_HEADERS:
        if headers.get(name):
            return headers[name]
    for name in SESSION_FIELDS:
        if isinstance(body.get(name), str) and body[name]:
            return body[name]
    return api_key_of(headers) if by_api_key else None


def api_key_of(headers: Mapping[str, str]) -> str | None:
    """The key in ``Authorization: Bearer`` or ``x-api-key``."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (key.strip() if scheme.lower() == "bearer" else "") or headers.get("x-api-key") or None


def prefix_hashes(body: Mapping[str, Any]) -> tuple[bytes, ...]:
    """A hash for every prefix of whole blocks (64 tokens, or 512 bytes of text) of the prompt, at most 1024.

    Two prompts share as many leading hashes as they share whole blocks; requests with different ``cache_salt`` share
    none. A prompt in a shape that is not known has none.
    """
    salt = str(body.get("cache_salt") or "")
    ids = _token_ids(body)
    if ids is not None:
        size = TOKENS_PER_BLOCK * 8
        data: Iterable[bytes] = (array("q", ids).tobytes(),)
        kind = "ids"
    else:
        size, data, kind = BYTES_PER_BLOCK, _text_parts(body), "text"
    return tuple(_chained(f"{kind}:{salt}".encode("utf-8", "surrogatepass"), data, size))


def _token_ids(body: Mapping[str, Any]) -> Sequence[int] | None:
    for name in ("input_ids", "token_ids", "prompt"):
        ids = body.get(name)
        ids = ids[: TOKENS_PER_BLOCK * MAX_BLOCKS] if isinstance(ids, list) else None
        if ids and all(type(token) is int and 0 <= token < 2**63 for token in ids):
            return ids
    return None


def _text_parts(body: Mapping[str, Any]) -> Iterator[bytes]:
    """The prompt as bytes, in the order in which templates write it: tools, system, messages."""
    for name in ("prompt", "text"):
        if isinstance(body.get(name), str):
            yield body[name].encode("utf-8", "surrogatepass")
            return
    for name in ("tools", "system", "instructions"):
        if body.get(name):
            yield _canonical(body[name])
    for name in ("messages", "input"):
        turns = body.get(name)
        if isinstance(turns, str):
            yield turns.encode("utf-8", "surrogatepass")
        elif isinstance(turns, list):
            for turn in turns:
                yield _canonical(turn)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _chained(salt: bytes, parts: Iterable[bytes], size: int) -> Iterator[bytes]:
    state, pending, count = blake2b(salt, digest_size=16), b"", 0
    for part in parts:
        pending += part
        whole = len(pending) - len(pending) % size
        for start in range(0, whole, size):
            state.update(pending[start : start + size])
            yield state.copy().digest()
            count += 1
            if count == MAX_BLOCKS:
                return
        pending = pending[whole:]

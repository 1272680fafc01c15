"""A server's refusal as one of our errors, with the server's own words."""

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from yunque.core.errors import YunqueError
from yunque.core.records import parse_json
from yunque.protocol.errors import ContextLengthExceeded, EngineUnavailable, Overloaded, RequestError, UnusableReply

RETRY_AFTER_S = 1.0
"""When an overloaded server may be asked again, where it does not say."""
_MESSAGE_CHARS = 1000
_TOO_LONG = re.compile(r"context length|longer than the (maximum )?model|max(imum)?[ _]model[ _]len", re.IGNORECASE)


def error_of(response: httpx.Response) -> YunqueError:
    """What an answer without success says. The body must have been read.

    4xx is the request's fault (``ContextLengthExceeded`` by its code, or by the words of vLLM and SGLang), 429
    ``Overloaded``, 5xx ``EngineUnavailable``.
    """
    fields = _fields(response)
    where = f"{response.request.url} answered {response.status_code}"
    return error_from(fields, response.status_code, retry_after_s=retry_after_s(response.headers), where=where)


def error_from(
    fields: Mapping[str, Any], status: int, *, where: str, retry_after_s: float | None = None
) -> YunqueError:
    """The error of an OpenAI-shaped error object (of an answer, or of an event in a stream)."""
    words, code = str(fields.get("message") or "no reason given"), fields.get("code")
    message = f"{words[:_MESSAGE_CHARS]} ({where})"
    param = fields.get("param") if isinstance(fields.get("param"), str) else None
    if code == ContextLengthExceeded.code or (status == 400 and _TOO_LONG.search(words)):
        return ContextLengthExceeded(message, param=param)
    if status == 429:
        return Overloaded(message, retry_after_s=RETRY_AFTER_S if retry_after_s is None else retry_after_s)
    if status >= 500 or status == 408:
        return EngineUnavailable(message)
    if status >= 400:
        return RequestError(message, param=param)
    return UnusableReply(message)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds of ``Retry-After``, which is a number or a date."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _fields(response: httpx.Response) -> Mapping[str, Any]:
    """The error object of the dialects: OpenAI's, vLLM's flat one, FastAPI's ``detail``, or plain text."""
    text = response.text
    try:
        body = parse_json(text)
    except (ValueError, RecursionError):
        return {"message": text.strip()}
    match body:
        case {"error": dict() as fields}:
            return fields
        case {"error": str() as message} | {"detail": str() as message}:
            return {"message": message}
        case {"message": str()}:
            return body
        case {"detail": [{"msg": str() as message, "loc": list() as place}, *_]}:
            return {"message": f"{'.'.join(map(str, place))}: {message}"}
    return {"message": text.strip()}

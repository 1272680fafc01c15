"""The web page at ``/``: files of the package, under a content policy that lets nothing in from elsewhere."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath

from fastapi import APIRouter, Request, Response

from yunque.protocol.http_errors import HttpError, problem

CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Files and requests of this server only; no inline script or style; text cannot become markup (trusted types)."""

HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": CONTENT_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class PageFile:
    """One file as it is sent; ``etag`` is a strong validator, with its quotes."""

    body: bytes
    media_type: str
    etag: str


def page_files() -> Mapping[str, PageFile]:
    """The files of the page by name, read once. Only names in here are ever served."""
    found = {}
    for entry in (files("yunque.serve") / "web").iterdir():
        media_type = MEDIA_TYPES.get(PurePosixPath(entry.name).suffix)
        if media_type is not None:
            body = entry.read_bytes()
            found[entry.name] = PageFile(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found


def page_routes() -> APIRouter:
    """``/`` and ``/web/NAME``, for ``GET`` and ``HEAD``."""
    served = page_files()
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return _answer(served["index.html"], request)

    @router.api_route("/web/{name}", methods=["GET", "HEAD"])
    async def file(name: str, request: Request) -> Response:
        if name not in served:
            raise HttpError(problem(404, f"the page has no file {name[:100]!r}"))
        return _answer(served[name], request)

    return router


def _answer(file: PageFile, request: Request) -> Response:
    headers = {**HEADERS, "etag": file.etag}
    if _matches(request.headers.get("if-none-match"), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)


def _matches(given: str | None, etag: str) -> bool:
    """Whether ``If-None-Match`` names this file; a proxy may have made the validator weak."""
    names = [name.strip().removeprefix("W/") for name in (given or "").split(",")]
    return etag in names or names == ["*"]

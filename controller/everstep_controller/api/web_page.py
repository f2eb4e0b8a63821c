"""Serve the operators' page, the API page and the OpenAPI document: fixed bytes with entity tags, encoded once."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import xxhash
from fastapi import FastAPI, Request, Response

from everstep_controller.api import endpoints, openapi
from everstep_controller.server import responses

FOLDER = Path(__file__).parent.parent / "web"
PAGES = {"/": "index.html", "/docs": "docs.html"}
"""Files with a path of their own: the operators' page and the interactive API page."""
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
JSON = "application/json"
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.suffix[1:] in MEDIA_TYPES)
"""Files that are served, each by a route of its own, so no request can reach another file."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # revalidated by entity tag, so that an upgrade is seen at once
    "vary": "accept-encoding",
}


class StaticFile(NamedTuple):
    """Bytes that are served, in both encodings."""

    etag: str
    plain: bytes
    gzipped: bytes


def static_file(plain: bytes) -> StaticFile:
    """Return bytes as they are served."""
    return StaticFile(f'"{xxhash.xxh3_64_hexdigest(plain)}"', plain, gzip.compress(plain, 9, mtime=0))


@functools.cache
def load(name: str) -> StaticFile:
    """Return one of ``FILES``. Each file is read once."""
    return static_file((FOLDER / name).read_bytes())


@functools.cache
def openapi_file() -> StaticFile:
    """Return the OpenAPI document as it is served. Strangers may request it, so it is not encoded for each of them."""
    return static_file(responses.encode(openapi_document()))


openapi_document = functools.cache(openapi.document)
"""The OpenAPI document of all routes. Building it takes 70 ms, so a standby builds it before requests arrive."""


def _endpoint(media_type: str, load_file: Callable[[], StaticFile]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        file = load_file()
        headers = {**HEADERS, "etag": file.etag}
        if file.etag in endpoints.tags(request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=headers)
        body = file.plain
        if "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["content-encoding"] = file.gzipped, "gzip"
        return Response(body, media_type=media_type, headers=headers)

    return endpoint


def install(app: FastAPI) -> None:
    """Add the pages, each of their files below ``/web/``, and the OpenAPI document. None of them needs a token."""
    files = [*PAGES.items(), *((f"/web/{name}", name) for name in FILES)]
    endpoints_by_path = {
        path: _endpoint(MEDIA_TYPES[name.rpartition(".")[2]], functools.partial(load, name)) for path, name in files
    }
    endpoints_by_path["/openapi.json"] = _endpoint(JSON, openapi_file)
    for path, endpoint in endpoints_by_path.items():
        app.add_api_route(path, endpoint, methods=endpoints.READING, include_in_schema=False)

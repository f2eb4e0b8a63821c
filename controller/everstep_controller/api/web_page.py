"""Serve the operators' page and the interactive API page: static files with entity tags and security headers."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import xxhash
from fastapi import FastAPI, Request, Response

from everstep_controller.api import endpoints

FOLDER = Path(__file__).parent.parent / "web"
PAGES = {"/": "index.html", "/docs": "docs.html"}
"""Files with a path of their own: the operators' page and the interactive API page."""
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
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
    """One file of the page, in both encodings."""

    etag: str
    plain: bytes
    gzipped: bytes


@functools.cache
def load(name: str) -> StaticFile:
    """Return one of ``FILES``. Each file is read once."""
    plain = (FOLDER / name).read_bytes()
    return StaticFile(f'"{xxhash.xxh3_64_hexdigest(plain)}"', plain, gzip.compress(plain, 9, mtime=0))


def _endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        file = load(name)
        headers = {**HEADERS, "etag": file.etag}
        if file.etag in endpoints.tags(request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=headers)
        body = file.plain
        if "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["content-encoding"] = file.gzipped, "gzip"
        return Response(body, media_type=MEDIA_TYPES[name.rpartition(".")[2]], headers=headers)

    return endpoint


def install(app: FastAPI) -> None:
    """Add the pages, and each of their files below ``/web/``. They need no token, like the health checks."""
    for path, name in [*PAGES.items(), *((f"/web/{name}", name) for name in FILES)]:
        app.add_api_route(path, _endpoint(name), methods=endpoints.READING, include_in_schema=False)

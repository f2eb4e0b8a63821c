"""Every error of the operator routes, said in one way and counted."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from controller.api import asgi, endpoints, problems
from controller.api.peers import REST_KEY
from controller.metrics import Metrics
from everstep.errors import EverstepError, RateLimited

log = logging.getLogger(__name__)

_SAID = {404: ("not_found", "no such path: /openapi.json lists them")}


def _route(request: Request) -> str:
    """The route's template: a metric's label must not grow with what clients ask for."""
    path: str = getattr(request.scope.get("route"), "path", "unknown")
    return path


def _methods(request: Request) -> set[str]:
    """Those that the path has: Starlette itself names only those of the first route that it meets."""
    found: set[str] = set()
    for route in request.app.router.routes:
        match, scope = route.matches(request.scope)
        if match is not Match.NONE and endpoints.misfit(scope.get("path_params", {})) is None:
            found |= route.methods or set()
    return found


def install(app: FastAPI, metrics: Metrics) -> None:
    """Adds the handlers."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, EverstepError)
        metrics.refused(_route(request), error.code)
        if isinstance(error, RateLimited):
            request.scope.get(REST_KEY, lambda seconds: None)(error.retry_after_s)
        headers = {name.decode(): value.decode() for name, value in asgi.error_headers(error)}
        return _answer(error.status, error.code, str(error), headers)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code, message = _SAID.get(error.status_code, ("http", str(error.detail)))
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(sorted(_methods(request)))
            code, message = "method", f"this path takes {headers['Allow']}, not {request.method}"
        metrics.refused(_route(request), code)
        return _answer(error.status_code, code, message, headers)

    async def gone(request: Request, _error: Exception) -> Response:
        metrics.refused(_route(request), "client_gone")
        return Response(status_code=499)

    async def internal(request: Request, error: Exception) -> Response:
        metrics.refused(_route(request), "internal")
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _answer(500, "internal", "an error of the controller's own: its log has the details", {})

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        EverstepError: refused,
        HTTPException: http,
        asgi.ClientGone: gone,
        Exception: internal,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _answer(status: int, code: str, message: str, headers: dict[str, str]) -> Response:
    body = problems.problem(status, code, message)
    return Response(body, status_code=status, media_type=problems.MEDIA_TYPE, headers=headers)

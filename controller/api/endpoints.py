"""From a table of routes to FastAPI's: admission, body and answer are the same for all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from controller.api import asgi
from controller.api.auth import Gate
from controller.api.peers import SCOPE_KEY
from controller.api.routes import Access, Route
from everstep.tokens import Identity
from everstep.wire.v1.agent import MAX_BODY_BYTES

Answer = Callable[[Request, Identity], Awaitable[Any]]


def install(app: FastAPI, gate: Gate, routes: Mapping[str, Route], handlers: object) -> None:
    """Adds every route of the table; the method of ``handlers`` that has its name answers it."""
    for name, route in routes.items():
        app.add_api_route(
            route.path,
            _endpoint(gate, route, getattr(handlers, name)),
            methods=[route.method],
            name=name,
            include_in_schema=False,
        )


def admit(gate: Gate, access: Access, request: Request) -> Identity:
    """Who asks. Raises AuthenticationError, PermissionDenied or RateLimited."""
    job = ""
    if access is Access.JOB:
        job = request.path_params.get("job") or asgi.query(request.scope).get("job", "")
    return gate.admit(access, request.scope["headers"], request.scope.get(SCOPE_KEY), job=job)


async def body(request: Request, kind: Any) -> Any:
    """The request's body as a message of this kind. Raises MalformedMessage."""
    return asgi.decode(_decoder(kind), await asgi.read_body(request.scope, request.receive, MAX_BODY_BYTES))


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _endpoint(gate: Gate, route: Route, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        identity = admit(gate, route.access, request)
        return Response(asgi.encode(await answer(request, identity)), media_type="application/json")

    return endpoint

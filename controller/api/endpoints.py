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
from controller.api.routes import PATH, QUERY, Access, Route
from everstep.errors import MalformedMessage, NotFound
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


def _check_parameters(route: Route, request: Request) -> None:
    """Raises NotFound for a path that names nothing there can be, MalformedMessage for a query that does not fit."""
    for name, value in request.path_params.items():
        try:
            msgspec.convert(value, PATH[name])
        except msgspec.ValidationError as error:
            raise NotFound(f"there is no {name} {value[:100]!r}: {error}") from error
    asked = asgi.query(request.scope)
    for name in route.query:
        try:
            if name in asked:
                msgspec.convert(asked[name], QUERY[name], strict=False)
        except msgspec.ValidationError as error:
            raise MalformedMessage(f"query parameter {name} is wrong: {error}") from error


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
        _check_parameters(route, request)
        return Response(asgi.encode(await answer(request, identity)), media_type="application/json")

    return endpoint

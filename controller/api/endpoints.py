"""From a table of routes to FastAPI's: admission, body and answer are the same for all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from controller.api import asgi
from controller.api.admission import Admission, Place
from controller.api.auth import Gate
from controller.api.peers import SCOPE_KEY
from controller.api.routes import PATH, QUERY, WORDS, Access, Route
from everstep.errors import MalformedMessage, NotFound, Outdated
from everstep.tokens import Identity
from everstep.wire.v1.agent import MAX_BODY_BYTES

PIECE_BYTES = 64 << 10
"""Of an answer, written at a time: as much as a transport holds before it asks its writer to wait."""
_PLACE_KEY = "everstep.place"


class Tagged(msgspec.Struct, frozen=True):
    """An answer with its entity tag. ``tag``: of what an order rests on. ``shown``: of what is shown beside that; an
    order does not heed it, and the answer is sent again when it has changed."""

    answer: Any
    tag: str
    shown: str = ""

    @property
    def etag(self) -> str:
        """Both, as they are sent."""
        return f"{self.tag[:-1]}.{self.shown[1:]}" if self.shown else self.tag


def check_tag(request: Request, tag: Callable[[], str]) -> None:
    """Raises Outdated where the request names, by If-Match, another state than the one of this tag.

    To be asked inside the change's own stimulus: nothing comes between the look and the change.
    """
    wanted = request.headers.get("if-match", "*")
    if wanted != "*" and tag() not in map(_ordered, _tags(wanted)):
        raise Outdated("it has changed since you looked: look again, and decide anew")


def _tags(header: str) -> list[str]:
    return [tag.strip().removeprefix("W/") for tag in header.split(",")]


def _ordered(tag: str) -> str:
    """The part of a tag that orders heed."""
    before, dot, _ = tag.partition(".")
    return f'{before}"' if dot else tag


Answer = Callable[[Request, Identity], Awaitable[Any]]


def install(app: FastAPI, gate: Gate, admission: Admission, routes: Mapping[str, Route], handlers: object) -> None:
    """Adds every route of the table; the method of ``handlers`` that has its name answers it."""
    for name, route in routes.items():
        app.add_api_route(
            route.path,
            _endpoint(gate, admission, route, getattr(handlers, name)),
            methods=methods(route.method),
            name=name,
            include_in_schema=False,
        )


def methods(method: str) -> list[str]:
    """Whoever may GET may ask for the HEAD of it, as health checks and caches do."""
    return ["GET", "HEAD"] if method == "GET" else [method]


def install_elsewhere(app: FastAPI, routes: Mapping[str, Route]) -> None:
    """Makes routes known that are answered in front of FastAPI, so that another method is told which one there is."""

    async def unreachable(request: Request) -> Response:
        raise NotFound(f"{request.url.path} is not answered here")

    for name, route in routes.items():
        app.add_api_route(route.path, unreachable, methods=[route.method], name=name, include_in_schema=False)


def misfit(path_params: Mapping[str, str]) -> str | None:
    """Why a path names nothing that there can be; None where it fits."""
    for name, value in path_params.items():
        try:
            msgspec.convert(value, PATH[name])
        except msgspec.ValidationError as error:
            why = f"it is one of {', '.join(WORDS[name])}" if name in WORDS else str(error)
            return f"there is no {name} {value[:100]!r}: {why}"
    return None


def check_parameters(route: Route, request: Request) -> None:
    """Raises NotFound for a path that names nothing there can be, MalformedMessage for a query that does not fit.

    A parameter that the route does not have is refused: an answer without the filter that was meant looks right, and
    orders may follow from it.
    """
    if (why := misfit(request.path_params)) is not None:
        raise NotFound(why)
    for name, value in asgi.query(request.scope).items():
        if name not in route.query:
            known = f"there are {', '.join(route.query)}" if route.query else "there are none"
            raise MalformedMessage(f"{route.path} has no query parameter {name[:100]!r}: {known}")
        try:
            msgspec.convert(value, QUERY[name], strict=False)
        except msgspec.ValidationError as error:
            raise MalformedMessage(_misfit_query(name, value, error)) from error


def _misfit_query(name: str, value: str, error: msgspec.ValidationError) -> str:
    if name not in WORDS:
        return f"query parameter {name} is wrong: {error}"
    several = ", or several with commas between" if name == "state" else ""
    return f"query parameter {name} is one of {', '.join(WORDS[name])}{several}, not {value[:100]!r}"


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


def _endpoint(
    gate: Gate, admission: Admission, route: Route, answer: Answer
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        identity = admit(gate, route.access, request)
        check_parameters(route, request)

        async def respond() -> Response:
            found = await answer(request, identity)
            await turn(request)
            return _response(request, found)

        return await placed(admission, identity, request, respond)

    return endpoint


async def placed(
    admission: Admission, identity: Identity, request: Request, respond: Callable[[], Awaitable[Response]]
) -> Response:
    """The response of ``respond``, which runs in a place and a turn of the identity's (``controller.api.admission``).
    The place is left once the response is sent. Raises RateLimited where there is none.
    """
    place = request.scope[_PLACE_KEY] = admission.enter(identity)
    try:
        await place.turn()
        response = await respond()
        place.hold(len(response.body))
    except BaseException:
        place.leave()
        raise
    return _Sent(response, place)


async def turn(request: Request) -> None:
    """Ends the slice that the request's handler is in; when this returns, the next one may run.

    To be called every few milliseconds of work.
    """
    place: Place = request.scope[_PLACE_KEY]
    await place.turn()


class _Sent(Response):
    """Sends a response in pieces, the next once the client has taken most of those before, and leaves its place."""

    def __init__(self, response: Response, place: Place) -> None:
        self.status_code, self.body, self.background = response.status_code, response.body, None
        self.raw_headers = response.raw_headers
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, len(self.body), PIECE_BYTES):
                more = start + PIECE_BYTES < len(self.body)
                piece = self.body[start : start + PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": more})
            if not self.body:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._place.leave()


def _response(request: Request, answer: Any) -> Response:
    if not isinstance(answer, Tagged):
        return Response(asgi.encode(answer), media_type="application/json")
    headers = {"etag": answer.etag, "cache-control": "no-cache"}
    known = _tags(request.headers.get("if-none-match", ""))
    if answer.etag in known or known == ["*"]:
        return Response(status_code=304, headers=headers)
    return Response(asgi.encode(answer.answer), media_type="application/json", headers=headers)

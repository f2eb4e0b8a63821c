"""Build FastAPI routes from the route table, with common admission, bodies, responses, errors and entity tags."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import xxhash
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from everstep.bearer_tokens import Identity
from everstep.errors import EverstepError, MalformedMessage, NotFound, Outdated, RateLimited
from everstep.log_lines import shortened
from everstep.wire.v1 import operator as op
from everstep.wire.v1.agent import MAX_BODY_BYTES
from everstep_controller.api.admission import STRANGER, AdmissionControl, RequestReservation, SliceScheduler
from everstep_controller.api.routes import PARAMETER_CHOICES, PATH_PARAMETERS, QUERY_PARAMETERS, Route
from everstep_controller.auth.authenticator import Authenticator, Headers, RouteAccess, network_of
from everstep_controller.auth.peers import UNKNOWN_PEER, ConnectionPeer
from everstep_controller.core import events as ev
from everstep_controller.core.maintenance import planned_windows
from everstep_controller.core.records import JobRecord, NodeRecord
from everstep_controller.read_models import fleet_views
from everstep_controller.read_models.prometheus import Metrics
from everstep_controller.server import responses
from everstep_controller.server.connections import READ_PAUSE_KEY, SCOPE_KEY

READING = ["GET", "HEAD"]
"""Methods of a route that reads: health checks and caches use HEAD."""
PIECE_BYTES = 64 << 10
"""Bytes of a response written at a time: as much as a transport holds before it makes its writer wait."""
_RESERVATION_KEY = "everstep.place"


class TaggedAnswer(msgspec.Struct, frozen=True):
    """An answer with its entity tag."""

    answer: Any
    precondition_tag: str  # tag of the facts that an order depends on
    display_tag: str = ""  # tag of facts that are only shown; a change resends the answer but invalidates no order

    @property
    def etag(self) -> str:
        """The combined tag, as sent to clients."""
        return f"{self.precondition_tag[:-1]}.{self.display_tag[1:]}" if self.display_tag else self.precondition_tag


def check_tag(request: Request, tag: Callable[[], str]) -> None:
    """Raise Outdated if If-Match names another state than ``tag``; call this inside the change's stimulus."""
    wanted = request.headers.get("if-match", "*")
    # Of a combined tag, only the part before the dot matters for orders.
    if wanted != "*" and tag() not in [re.sub(r"\..*", '"', known_tag) for known_tag in tags(wanted)]:
        raise Outdated(
            "the resource has changed since you read it (If-Match): read it again, and repeat the request if it "
            "still applies"
        )


def is_known(request: Request, etag: str) -> bool:
    """Return whether the client has the answer with this tag already, so that its content is not needed."""
    known = tags(request.headers.get("if-none-match", ""))
    return etag in known or known == ["*"]


def tags(header: str) -> list[str]:
    return [tag.strip().removeprefix("W/") for tag in header.split(",")]


Handler = Callable[[Request, Identity], Awaitable[Any]]


def install_routes(
    app: FastAPI, gate: Authenticator, admission: AdmissionControl, routes: Mapping[str, Route], handlers: object
) -> None:
    """Add every route of the table; it is answered by the method of ``handlers`` with the same name."""
    for name, route in routes.items():
        endpoint = _endpoint(gate, admission, route, getattr(handlers, name))
        methods = READING if route.method == "GET" else [route.method]
        app.add_api_route(route.path, endpoint, methods=methods, name=name, include_in_schema=False)


def invalid_path_reason(path_params: Mapping[str, str]) -> str | None:
    """Return the reason why a path parameter is invalid, or None."""
    for name, value in path_params.items():
        try:
            msgspec.convert(value, PATH_PARAMETERS[name])
        except msgspec.ValidationError as error:
            why = f"it must be one of {', '.join(PARAMETER_CHOICES[name])}" if name in PARAMETER_CHOICES else str(error)
            return f"there is no {name} {value[:100]!r}: {why}"
    return None


def check_parameters(route: Route, request: Request) -> None:
    """Raise NotFound for an invalid path parameter, MalformedMessage for an invalid or unknown query parameter."""
    if (why := invalid_path_reason(request.path_params)) is not None:
        raise NotFound(why)
    for name, value in responses.parse_query(request.scope).items():
        if name not in route.query:
            known = f"it has {', '.join(route.query)}" if route.query else "it has none"
            raise MalformedMessage(f"{route.path} has no query parameter {name[:100]!r}: {known}")
        try:
            msgspec.convert(value, QUERY_PARAMETERS[name], strict=False)
        except msgspec.ValidationError as error:
            reason = f"is invalid: {error}"
            if name in PARAMETER_CHOICES:
                several = ", or several separated by commas" if name == "state" else ""
                reason = f"must be one of {', '.join(PARAMETER_CHOICES[name])}{several}, not {value[:100]!r}"
            raise MalformedMessage(f"query parameter {name} {reason}") from error


async def authorize(authenticator: Authenticator, access: RouteAccess, request: Request) -> Identity:
    """Return the sender. Raises AuthenticationError, PermissionDenied, RateLimited, or Unavailable."""
    await authenticator.prepare(request.scope["headers"])
    job = ""
    if access is RouteAccess.JOB:
        job = request.path_params.get("job") or responses.parse_query(request.scope).get("job", "")
    return authenticator.authorize(access, request.scope["headers"], request.scope.get(SCOPE_KEY), job=job)


async def read_message(request: Request, kind: Any) -> Any:
    """Return the request's body as a message of this kind. Raises MalformedMessage."""
    return responses.decode(_decoder(kind), await responses.read_body(request.scope, request.receive, MAX_BODY_BYTES))


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _endpoint(
    gate: Authenticator, admission: AdmissionControl, route: Route, answer: Handler
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        identity = await authorize(gate, route.access, request)
        check_parameters(route, request)

        async def respond() -> Response:
            found = await answer(request, identity)
            await yield_to_agents(request)
            return _response(request, found)

        return await run_admitted(admission, identity, request, respond)

    return endpoint


async def run_admitted(
    admission: AdmissionControl, identity: Identity, request: Request, respond: Callable[[], Awaitable[Response]]
) -> Response:
    """Run ``respond`` in the identity's reservation and slice (``admission``). Raises RateLimited if there is none."""
    place = request.scope[_RESERVATION_KEY] = admission.reserve(identity)
    try:
        await place.wait_for_slice()
        response = await respond()
        place.add_bytes(len(response.body))
    except BaseException:
        place.release()
        raise
    return _AdmittedResponse(response, place)


async def yield_to_agents(request: Request) -> None:
    """End the handler's current slice, and return when the next may run. Call this every few milliseconds of work."""
    await request.scope[_RESERVATION_KEY].wait_for_slice()


class _AdmittedResponse(Response):
    """Sends a response in pieces as the client takes them, then releases the reservation."""

    def __init__(self, response: Response, reservation: RequestReservation) -> None:
        self.status_code, self.body, self.background = response.status_code, response.body, None
        self.raw_headers = response.raw_headers
        self._place = reservation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, max(len(self.body), 1), PIECE_BYTES):  # once for an empty body
                more = start + PIECE_BYTES < len(self.body)
                piece = self.body[start : start + PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": more})
        finally:
            self._place.release()


@dataclass(eq=False)
class StrangerSlices:
    """ASGI middleware: requests without a known token run in slices, too.

    Anybody can send them, and each costs half a millisecond of the event loop. Addresses alternate, so that the health
    checks of one machine do not wait for all requests of another.
    """

    app: ASGIApp
    slices: SliceScheduler
    is_known: Callable[[Headers, ConnectionPeer], bool]  # whether headers or peer show an identity that was verified

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer = scope.get(SCOPE_KEY, UNKNOWN_PEER)
        if scope["type"] == "http" and not self.is_known(scope["headers"], peer):
            await self.slices.take((STRANGER, network_of(peer.address)))
        await self.app(scope, receive, send)


def _response(request: Request, answer: Any) -> Response:
    if not isinstance(answer, TaggedAnswer):
        return Response(responses.encode(answer), media_type="application/json")
    headers = {"etag": answer.etag, "cache-control": "no-cache"}
    if is_known(request, answer.etag):
        return Response(status_code=304, headers=headers)
    return Response(responses.encode(answer.answer), media_type="application/json", headers=headers)


log = logging.getLogger(__name__)


def _route(request: Request) -> str:
    """Return the route's template: a metric's label must not grow with clients' input."""
    path: str = getattr(request.scope.get("route"), "path", "unknown")
    return path


def _methods(request: Request) -> set[str]:
    """Return the path's methods: Starlette reports only those of the first matching route."""
    found: set[str] = set()
    for route in request.app.router.routes:
        match, scope = route.matches(request.scope)
        if match is not Match.NONE and invalid_path_reason(scope.get("path_params", {})) is None:
            found |= route.methods or set()
    return found


def install_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    """Add handlers that answer and count every error of the operators' routes."""

    @app.exception_handler(EverstepError)
    async def refused(request: Request, error: EverstepError) -> Response:
        metrics.count_refused(_route(request), error.code)
        if isinstance(error, RateLimited):
            request.scope.get(READ_PAUSE_KEY, lambda seconds: None)(error.retry_after_s)
        headers = {name.decode(): value.decode() for name, value in responses.error_headers(error)}
        return _answer(error.status, error.code, str(error), headers)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        code, message, headers = "http", str(error.detail), dict(error.headers or {})
        if error.status_code == 404:
            code, message = "not_found", "there is no such path: /openapi.json lists all paths"
        elif error.status_code == 405:
            headers["Allow"] = ", ".join(sorted(_methods(request)))
            code, message = "method", f"this path allows {headers['Allow']}, not {request.method}"
        metrics.count_refused(_route(request), code)
        return _answer(error.status_code, code, message, headers)

    @app.exception_handler(responses.ClientGone)
    async def client_gone(request: Request, _error: Exception) -> Response:
        metrics.count_refused(_route(request), "client_gone")
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> Response:
        metrics.count_refused(_route(request), "internal")
        log.error("%s %s failed", request.method, shortened(request.url.path), exc_info=error)
        return _answer(500, "internal", "internal error of the controller: its log has the details", {})


def _answer(status: int, code: str, message: str, headers: dict[str, str]) -> Response:
    body = responses.problem(status, code, message)
    return Response(body, status_code=status, media_type=responses.MEDIA_TYPE, headers=headers)


# ---- entity tags
# An order's If-Match is compared with a tag. A tag changes with every fact that a decision could depend on, and not
# with each heartbeat. It hashes contents rather than counting changes, because a count would restart with every
# controller.


def tag_of(document: Any) -> str:
    """Return the tag of a document."""
    return f'"{xxhash.xxh3_64_hexdigest(responses.encode(document))}"'


def node_tag(context: fleet_views.ViewContext, record: NodeRecord) -> str:
    return tag_of((record, planned_windows(context.state, record)))


def job_tag(job: JobRecord) -> str:
    status, progress, members = job.status, job.progress, job.membership
    outgoing = job.outgoing_generation.number if job.outgoing_generation else 0
    lasting = (job.job, progress.created_at, members.node_limit, progress.last_number, outgoing)
    return tag_of((lasting, status.state, status.since, status.sentence, list(members.launchers)))


def job_display_tag(job: op.JobDetail) -> str:
    """Return the tag of facts that are only shown: a commit, twice per second, must not invalidate an order."""
    summary = job.summary
    return tag_of((summary.committed, summary.verified, summary.spares, job.recoveries, job.ineligible_nodes))


def node_tag_parts(context: fleet_views.ViewContext, summaries: Iterable[op.NodeSummary]) -> list[Any]:
    """Return the parts of a page's tag: findings by their keys, no GPUs. Read the summaries in the same slice."""
    parts: list[Any] = []
    for summary in summaries:
        record = context.state.nodes[summary.node]
        scheduling, health = record.scheduling, record.health
        parts += (
            summary.node,
            summary.state,
            summary.since,
            summary.reason,
            summary.job,
            summary.domain,
            summary.labels,
            summary.hold_reason,
        )
        parts += (scheduling.external_cordon_by, scheduling.maintenance_until, planned_windows(context.state, record))
        parts += (health.eviction_deferred_by, list(health.agent_findings), list(health.controller_findings))
        parts.append(record.identity.incarnation)
    return parts


def node_page_tag(parts: list[Any], total: int, following: str) -> str:
    """Return the tag of a page of nodes; ``following`` is the next page's cursor."""
    return tag_of((parts, total, following))


def rack_tag(context: fleet_views.ViewContext, rack: str) -> str:
    """Return the tag of ``GET /v1/nodes?rack=``."""
    found = fleet_views.find_nodes(context, fleet_views.NodeFilter(rack=rack))
    page, following = fleet_views.take_page(found, "", fleet_views.MAX_PAGE_SIZE)
    return node_page_tag(node_tag_parts(context, fleet_views.node_summaries(context, page)), len(found), following)


def subject_tag(context: fleet_views.ViewContext, order: ev.OperatorCommand) -> str:
    """Return the tag of an order's subject. A missing subject has none; the order itself will be refused."""
    state = context.state
    if order.action is ev.OperatorAction.RESET_BREAKER:
        return tag_of(fleet_views.budget_status(context))
    if order.rack is not None:
        return rack_tag(context, order.rack)
    if order.node in state.nodes:
        return node_tag(context, state.nodes[order.node])
    return job_tag(state.jobs[order.job]) if order.job in state.jobs else ""

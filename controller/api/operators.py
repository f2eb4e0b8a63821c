"""What people and programs ask and order: FastAPI routes over the fleet's state and its history."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from controller import views
from controller.api import asgi, endpoints
from controller.api.auth import Gate
from controller.api.routes import OPERATOR, PLAIN
from controller.api.stream import AuditFeed, event_of, server_sent
from controller.core import effects as fx
from controller.core import events as ev
from controller.loop import FleetLoop
from controller.store.reader import Reader
from controller.store.threads import Store
from controller.transaction import Transaction, new_trace
from everstep.errors import Conflict, NotFound
from everstep.tokens import Identity
from everstep.vocabulary import Verdict
from everstep.wire.v1 import operator as op
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import GenerationSpec

EVENTS_LIMIT = 1000
RECOVERIES_SHOWN = 200
VERDICTS_SHOWN = 20


_NODE_ORDERS = {
    "drain": ev.OperatorAction.DRAIN,
    "hold": ev.OperatorAction.HOLD,
    "readmit": ev.OperatorAction.READMIT,
    "evict": ev.OperatorAction.EVICT,
    "repair": ev.OperatorAction.REPAIR,
}


class OperatorRoutes:
    """The handlers of ``controller.api.routes.OPERATOR``, by name."""

    def __init__(self, *, desk: views.Desk, loop: FleetLoop, store: Store, feed: AuditFeed, gate: Gate) -> None:
        self._desk = desk
        self._loop = loop
        self._store = store
        self._feed = feed
        self._gate = gate

    def install(self, app: FastAPI) -> None:
        """Adds every route to ``app``. The event stream comes first, it would read as an event's id otherwise."""
        app.add_api_route("/v1/events/stream", self.stream, methods=["GET"], include_in_schema=False)
        endpoints.install(app, self._gate, OPERATOR, self)

    # --- reading -------------------------------------------------------------------------------------------------

    async def status(self, _request: Request, _who: Identity) -> op.FleetStatus:
        return views.fleet_status(self._desk)

    async def nodes(self, _request: Request, _who: Identity) -> op.NodeList:
        return views.node_list(self._desk)

    async def node(self, request: Request, _who: Identity) -> op.NodeDetail:
        node = request.path_params["node"]
        detail = views.node_detail(self._desk, node)
        docs = await self._store.read(lambda reader: reader.verdicts(node, limit=VERDICTS_SHOWN))
        verdicts = tuple(msgspec.json.decode(doc, type=Verdict) for doc in docs)
        return msgspec.structs.replace(detail, verdicts=verdicts)

    async def jobs(self, _request: Request, _who: Identity) -> op.JobList:
        return views.job_list(self._desk)

    async def job(self, request: Request, _who: Identity) -> op.JobDetail:
        job = request.path_params["job"]
        detail = views.job_detail(self._desk, job)
        docs = await self._store.read(lambda reader: reader.recoveries(job, limit=RECOVERIES_SHOWN))
        recoveries = [msgspec.json.decode(doc, type=op.Recovery) for doc in docs]
        current = self._loop.boards.recoveries.current(self._desk.job(job))
        if current is not None and current.seconds is None:
            recoveries.append(current)
        return msgspec.structs.replace(detail, recoveries=tuple(recoveries))

    async def generations(self, request: Request, _who: Identity) -> op.GenerationList:
        asked = asgi.query(request.scope)
        job, limit = asked.get("job", ""), min(asgi.integer(asked, "limit", 100), EVENTS_LIMIT)
        rows = await self._store.read(lambda reader: reader.generations(job=job, limit=limit))
        specs = (msgspec.json.decode(row.doc, type=GenerationSpec) for row in rows)
        return op.GenerationList(generations=tuple(msgspec.structs.replace(spec, secret="") for spec in specs))

    async def events(self, request: Request, _who: Identity) -> op.EventList:
        asked = asgi.query(request.scope)
        after, limit = asgi.integer(asked, "after", 0), min(asgi.integer(asked, "limit", 100), EVENTS_LIMIT)
        newest = asked.get("newest", "") in ("1", "true")

        def read(reader: Reader) -> list[op.Event]:
            rows = reader.events(
                after=after,
                limit=limit,
                trace=asked.get("trace", ""),
                node=asked.get("node", ""),
                job=asked.get("job", ""),
                newest=newest,
            )
            return [event_of(row) for row in rows]

        events = await self._store.read(read)
        return op.EventList(events=tuple(events), next_after=events[-1].id if events else after)

    async def stream(self, request: Request) -> Response:
        """Server-sent events from ``Last-Event-ID`` (or ``?after=``) on; without either, from now on."""
        endpoints.admit(self._gate, PLAIN["stream"].access, request)
        asked = asgi.query(request.scope)
        if "last-event-id" in request.headers:
            asked["after"] = request.headers["last-event-id"]
        after = asgi.integer(asked, "after", self._feed.newest)
        return StreamingResponse(
            server_sent(
                self._feed,
                after,
                lambda seen: self._store.read(lambda reader: reader.events(after=seen, limit=EVENTS_LIMIT)),
            ),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )

    async def verdict(self, request: Request, _who: Identity) -> Verdict:
        verdict = request.path_params["verdict"]
        doc = await self._store.read(lambda reader: reader.verdict(verdict))
        if doc is None:
            raise NotFound(f"no verdict {verdict!r}: `everstep events` names them")
        return msgspec.json.decode(doc, type=Verdict)

    async def probe(self, request: Request, _who: Identity) -> op.ProbeStatus:
        return self._loop.boards.probes.get(request.path_params["probe"])

    # --- ordering ------------------------------------------------------------------------------------------------

    async def order(self, request: Request, who: Identity) -> op.Changed:
        order = request.path_params["order"]
        if order not in _NODE_ORDERS:
            raise NotFound(f"a node cannot be told to {order!r}: there is {', '.join(_NODE_ORDERS)}")
        because = await endpoints.body(request, op.Because)
        node = request.path_params["node"]
        return await self._command(_NODE_ORDERS[order], who, because.reason, node=node)

    async def stop(self, request: Request, who: Identity) -> op.Changed:
        because = await endpoints.body(request, op.Because)
        return await self._command(ev.OperatorAction.STOP_JOB, who, because.reason, job=request.path_params["job"])

    async def resize(self, request: Request, who: Identity) -> op.Changed:
        resize = await endpoints.body(request, op.Resize)
        job = request.path_params["job"]
        return await self._command(ev.OperatorAction.RESIZE_JOB, who, resize.reason, job=job, size=resize.size)

    async def reset_breaker(self, request: Request, who: Identity) -> op.Changed:
        because = await endpoints.body(request, op.Because)
        return await self._command(ev.OperatorAction.RESET_BREAKER, who, because.reason)

    async def _command(
        self,
        kind: ev.OperatorAction,
        who: Identity,
        reason: str,
        *,
        node: str | None = None,
        job: str | None = None,
        size: int | None = None,
    ) -> op.Changed:
        trace = new_trace()
        command = ev.OperatorCommand(
            kind=kind, actor=who.subject, reason=reason, node=node, job=job, size=size, trace=trace
        )
        return await self._loop.submit(lambda tx, now: _changed(command, tx, now))

    async def start_probe(self, request: Request, who: Identity) -> op.ProbeStatus:
        wanted = await endpoints.body(request, op.StartProbe)
        event = ev.ProbeRequested(
            nodes=wanted.nodes, backend=wanted.backend, actor=who.subject, reason=wanted.reason, trace=new_trace()
        )
        probe = await self._loop.submit(lambda tx, now: _started_probe(event, tx, now))
        return self._loop.boards.probes.get(probe)


def _changed(command: ev.OperatorCommand, tx: Transaction, now: float) -> op.Changed:
    told = len(tx.audit)
    tx.handle(command, now)
    sentences = _without_echoes([row.sentence for row in tx.audit[told:]])
    return op.Changed(trace=command.trace, sentence="; ".join(sentences)[:4096])


def _without_echoes(sentences: list[str]) -> list[str]:
    """Those that another one does not say already: an order's own words come again in what followed from it."""
    different = list(dict.fromkeys(sentences))
    return [one for one in different if not any(one != other and one in other for other in different)]


def _started_probe(event: ev.ProbeRequested, tx: Transaction, now: float) -> str:
    """The id of the probe that the event began."""
    for effect in tx.handle(event, now):
        if isinstance(effect, fx.Send) and isinstance(effect.body, RunProbe):
            return effect.body.probe
    raise Conflict(f"no probe of {', '.join(event.nodes)} was begun")

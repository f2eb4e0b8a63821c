"""What people and programs ask and order: FastAPI routes over the fleet's state and its history."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import Request

from controller import views
from controller.api import asgi, endpoints, tags
from controller.api.history import page_size
from controller.core import effects as fx
from controller.core import events as ev
from controller.core.kept import kept_of
from controller.core.restorability import restorability_of
from controller.loop import FleetLoop
from controller.store.threads import Store
from controller.transaction import Transaction, new_trace
from everstep.errors import Conflict, MalformedMessage
from everstep.tokens import Identity
from everstep.vocabulary import Verdict
from everstep.wire.v1 import history as past
from everstep.wire.v1 import operator as op
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.kept import JobCheckpoints

NODES_IN_A_SLICE = 100
"""About a millisecond's work."""
RECOVERIES_SHOWN = 200
VERDICTS_SHOWN = 20
LONGEST_WINDOW_S = 366 * 86400.0
"""From now to the end of a maintenance window. Times in milliseconds are beyond it."""


class OperatorRoutes:
    """The handlers of ``controller.api.routes.OPERATOR``, by name."""

    def __init__(self, *, desk: views.Desk, loop: FleetLoop, store: Store) -> None:
        self._desk = desk
        self._loop = loop
        self._store = store

    # --- reading -------------------------------------------------------------------------------------------------

    async def status(self, request: Request, _who: Identity) -> op.FleetStatus:
        jobs = self._desk.state.jobs
        running = [name for name, job in jobs.items() if job.state not in views.OVER]
        return views.fleet_status(self._desk, await self._summaries(request, running))

    async def nodes(self, request: Request, _who: Identity) -> endpoints.Tagged:
        asked = asgi.query(request.scope)
        wanted = views.NodeFilter(**{name: asked[name] for name in views.NodeFilter.__struct_fields__ if name in asked})
        found = views.nodes_found(self._desk, wanted)
        page, following = views.page_of(found, asked.get("cursor", ""), page_size(asked, views.LONGEST_PAGE))
        shown: list[op.NodeSummary] = []
        lines: list[Any] = []
        for begin in range(0, len(page), NODES_IN_A_SLICE):
            await endpoints.turn(request)
            summaries = views.node_summaries(self._desk, page[begin : begin + NODES_IN_A_SLICE])
            shown += summaries
            lines += tags.node_lines(self._desk, summaries)
        await endpoints.turn(request)
        answer = op.NodeList(nodes=tuple(shown), total=len(found), next=following)
        return endpoints.Tagged(answer, tags.of_nodes(lines, len(found), following))

    async def node(self, request: Request, _who: Identity) -> endpoints.Tagged:
        node = request.path_params["node"]
        detail = views.node_detail(self._desk, node)
        tag = tags.of_node(
            self._desk, self._desk.node(node)
        )  # of what is shown, not of what comes while the store is read
        verdicts = await self._store.read(
            lambda reader: [
                msgspec.json.decode(doc, type=Verdict) for doc in reader.verdicts(node, limit=VERDICTS_SHOWN)
            ]
        )
        return endpoints.Tagged(msgspec.structs.replace(detail, verdicts=tuple(verdicts)), tag)

    async def jobs(self, request: Request, _who: Identity) -> op.JobList:
        asked = asgi.query(request.scope)
        found = views.jobs_found(self._desk, asked.get("job_state", ""))
        page, following = views.page_of(found, asked.get("cursor", ""), page_size(asked, views.LONGEST_PAGE))
        summaries = await self._summaries(request, page)
        return op.JobList(jobs=tuple(summaries), total=len(found), next=following)

    async def _summaries(self, request: Request, names: Iterable[str]) -> list[op.JobSummary]:
        """Of the jobs that there are still, one in a slice: each is linear in its ranks."""
        state, found = self._desk.state, []
        for name in names:
            await endpoints.turn(request)
            if name in state.jobs:
                found.append(views.job_summary(state, state.jobs[name]))
        return found

    async def job(self, request: Request, _who: Identity) -> endpoints.Tagged:
        job = request.path_params["job"]
        detail, tag = views.job_detail(self._desk, job), tags.of_job(self._desk.job(job))
        recoveries = await self._store.read(
            lambda reader: [
                msgspec.json.decode(doc, type=op.Recovery) for doc in reader.recoveries(job, limit=RECOVERIES_SHOWN)
            ]
        )
        current = self._loop.boards.recoveries.current(self._desk.job(job))
        if current is not None and current.seconds is None:
            recoveries.append(current)
        answer = msgspec.structs.replace(detail, recoveries=tuple(recoveries))
        return endpoints.Tagged(answer, tag, tags.of_shown(answer))

    async def restorability(self, request: Request, _who: Identity) -> op.Restorability:
        return restorability_of(self._desk.state, self._desk.job(request.path_params["job"]))

    async def kept(self, request: Request, _who: Identity) -> JobCheckpoints:
        return kept_of(self._desk.state, self._desk.job(request.path_params["job"]))

    async def probes(self, request: Request, _who: Identity) -> endpoints.Tagged:
        asked, board = asgi.query(request.scope), self._loop.boards.probes
        found, more = board.page(asked.get("node", ""), asked.get("cursor", ""), page_size(asked))
        return endpoints.Tagged(op.ProbeList(probes=found, next=more), tags.of_probes(board.newest()))

    async def probe(self, request: Request, _who: Identity) -> op.ProbeStatus:
        return self._loop.boards.probes.get(request.path_params["probe"])

    # --- ordering ------------------------------------------------------------------------------------------------

    async def order(self, request: Request, who: Identity) -> op.Changed:
        because = await endpoints.body(request, op.Because)
        kind, node = ev.OperatorAction(request.path_params["order"]), request.path_params["node"]
        return await self._command(request, _order(kind, who, because.reason, node=node))

    async def maintenance(self, request: Request, who: Identity) -> op.Changed:
        window = await endpoints.body(request, past.Maintenance)
        if (window.node is None) == (window.rack is None):
            raise MalformedMessage("maintenance is of a node or of a rack: name one of them")
        if window.until > self._desk.now() + LONGEST_WINDOW_S:
            raise MalformedMessage(
                "`until` is more than a year from now: give seconds since the epoch, not milliseconds; `hold` keeps a "
                "node out for as long as it takes"
            )
        kind = ev.OperatorAction.MAINTENANCE
        order = _order(kind, who, window.reason, node=window.node, rack=window.rack, until=window.until)
        return await self._command(request, msgspec.structs.replace(order, starts_at=window.starts_at))

    async def cancel_maintenance(self, request: Request, who: Identity) -> op.Changed:
        plan = await endpoints.body(request, past.CancelMaintenance)
        if (plan.node is None) == (plan.rack is None):
            raise MalformedMessage("what is planned is for a node or for a rack: name one of them")
        kind = ev.OperatorAction.CANCEL_MAINTENANCE
        return await self._command(request, _order(kind, who, plan.reason, node=plan.node, rack=plan.rack))

    async def stop(self, request: Request, who: Identity) -> op.Changed:
        because = await endpoints.body(request, op.Because)
        job = request.path_params["job"]
        return await self._command(request, _order(ev.OperatorAction.STOP_JOB, who, because.reason, job=job))

    async def resize(self, request: Request, who: Identity) -> op.Changed:
        resize = await endpoints.body(request, op.Resize)
        job, kind = request.path_params["job"], ev.OperatorAction.RESIZE_JOB
        return await self._command(request, _order(kind, who, resize.reason, job=job, size=resize.size))

    async def reset_breaker(self, request: Request, who: Identity) -> op.Changed:
        because = await endpoints.body(request, op.Because)
        return await self._command(request, _order(ev.OperatorAction.RESET_BREAKER, who, because.reason))

    async def _command(self, request: Request, command: ev.OperatorCommand) -> op.Changed:
        def stimulus(tx: Transaction, now: float) -> op.Changed:
            endpoints.check_tag(request, lambda: tags.of_subject(self._desk, command))
            return _changed(command, tx, now)

        return await self._loop.submit(stimulus)

    async def start_probe(self, request: Request, who: Identity) -> op.ProbeStatus:
        wanted = await endpoints.body(request, op.StartProbe)
        event = ev.ProbeRequested(
            nodes=wanted.nodes, backend=wanted.backend, actor=who.subject, reason=wanted.reason, trace=new_trace()
        )
        board = self._loop.boards.probes

        def stimulus(tx: Transaction, now: float) -> str:
            endpoints.check_tag(request, lambda: tags.of_probes(board.newest()))
            return _started_probe(event, tx, now)

        return board.get(await self._loop.submit(stimulus))


def _order(kind: ev.OperatorAction, who: Identity, reason: str, **subject: Any) -> ev.OperatorCommand:
    return ev.OperatorCommand(kind=kind, actor=who.subject, reason=reason, trace=new_trace(), **subject)


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

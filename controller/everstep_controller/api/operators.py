"""Handle operators' queries and orders: FastAPI handlers over the fleet's state and its history."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from everstep.bearer_tokens import Identity
from everstep.errors import Conflict, MalformedMessage, Unavailable
from everstep.vocabulary import Verdict
from everstep.wire.v1 import enrolment as wire
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.operator_history import JobCheckpoints
from everstep_controller import rulebook
from everstep_controller.api import endpoints
from everstep_controller.api.credentials import ChangeContext, CredentialStore, public_credential
from everstep_controller.api.endpoints import tag_of
from everstep_controller.api.history import page_size
from everstep_controller.core import effects as fx
from everstep_controller.core import events as ev
from everstep_controller.core.checkpoints.restore_points import compute_restorability, list_checkpoints
from everstep_controller.journal.trials import Flush, PolicyTrialRunner
from everstep_controller.read_models import fleet_views
from everstep_controller.read_models.fleet_views import MAX_PAGE_SIZE
from everstep_controller.runtime.loop import FleetLoop
from everstep_controller.runtime.transaction import Transaction, new_trace
from everstep_controller.server import responses
from everstep_controller.store.threads import DatabaseStore

# ---- credentials

log = logging.getLogger(__name__)
T = TypeVar("T")


class CredentialRoutes:
    """Handlers of ``CREDENTIAL_ROUTES``. Each change is one stimulus, together with its audit entry."""

    def __init__(self, *, loop: FleetLoop, credentials: CredentialStore) -> None:
        self._loop = loop
        self._credentials = credentials

    async def enrol(self, request: Request, identity: Identity) -> wire.Enrolled:
        asked = await endpoints.read_message(request, wire.Enrol)
        trace = new_trace()
        enrolled = await self._submit(lambda tx, now: self._credentials.enrol(asked, identity, trace, tx, now))
        log.info("enrolled by join token %s", identity.credential, extra={"node": asked.node, "trace": trace})
        return enrolled

    async def credentials(self, request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        asked = responses.parse_query(request.scope)
        wanted = (asked.get("role", ""), asked.get("subject", ""), asked.get("cursor", ""))
        rows, more = self._credentials.page(*wanted, page_size(asked, MAX_PAGE_SIZE))
        page = wire.CredentialList(credentials=tuple(map(public_credential, rows)), next=more)
        return endpoints.TaggedAnswer(page, self._tag_of_all())

    async def credential(self, request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        credential = public_credential(self._credentials.get(request.path_params["id"]))
        return endpoints.TaggedAnswer(credential, tag_of(credential))

    async def issue_credential(self, request: Request, identity: Identity) -> wire.Issued:
        wanted = await endpoints.read_message(request, wire.IssueRequest)
        order = ChangeContext(identity, wanted.reason, new_trace())

        def issue(tx: Transaction, now: float) -> wire.Issued:
            endpoints.check_tag(request, self._tag_of_all)
            return self._credentials.issue(wanted, order, tx, now)

        return await self._submit(issue)

    async def revoke_credential(self, request: Request, identity: Identity) -> op.ChangeResult:
        because = await endpoints.read_message(request, op.ReasonOnlyRequest)
        id, order = request.path_params["id"], ChangeContext(identity, because.reason, new_trace())

        def revoke(tx: Transaction, now: float) -> str:
            self._check_tag(request, id)
            return self._credentials.revoke(id, order, tx, now)

        return op.ChangeResult(trace=order.trace, sentence=await self._submit(revoke))

    async def rotate_credential(self, request: Request, identity: Identity) -> wire.Issued:
        wanted = await endpoints.read_message(request, wire.Rotate)
        id, order = request.path_params["id"], ChangeContext(identity, wanted.reason, new_trace())

        def rotate(tx: Transaction, now: float) -> wire.Issued:
            self._check_tag(request, id)
            return self._credentials.rotate(id, wanted.grace_s, order, tx, now)

        return await self._submit(rotate)

    def _tag_of_all(self) -> str:
        return f'"{self._credentials.digest()}"'

    def _check_tag(self, request: Request, id: str) -> None:
        endpoints.check_tag(request, lambda: tag_of(public_credential(self._credentials.get(id))))

    async def _submit(self, change: Callable[[Transaction, float], T]) -> T:
        """Run a change in the loop. Raises Unavailable during a database outage, when it could not be made durable."""

        def stimulus(tx: Transaction, now: float) -> T:
            if away := tx.state.database_outage:
                raise Unavailable(f"credentials cannot be changed while the database is away: {away}")
            return change(tx, now)

        return await self._loop.submit(stimulus)


# ---- policies


class PolicyRoutes:
    """Handlers of ``POLICY_ROUTES``, by name.

    Args:
        journal: the journal's directory; empty for none.
        flush: writes pending journal data to the disk.
    """

    def __init__(self, context: fleet_views.ViewContext, journal: str, flush: Flush) -> None:
        self._desk = context
        self._trials = PolicyTrialRunner(journal, flush)

    async def policy(self, _request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        policy = self._desk.state.policy
        return endpoints.TaggedAnswer(rulebook.policy_document(policy), endpoints.policy_tag(policy))

    async def check_policy(self, request: Request, _who: Identity) -> operator_history.PolicyCheckResult:
        change = await endpoints.read_message(request, operator_history.PolicyChange)
        self._check_tag(request)
        return rulebook.check_change(self._desk.state.policy, change)

    async def try_policy(self, request: Request, _who: Identity) -> operator_history.PolicyTrialResult:
        wanted = await endpoints.read_message(request, operator_history.PolicyTrialRequest)
        self._check_tag(request)
        return await self._trials.run(self._desk.state.policy, wanted, self._desk.now())

    def _check_tag(self, request: Request) -> None:
        endpoints.check_tag(request, lambda: endpoints.policy_tag(self._desk.state.policy))

    async def budget(self, _request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        status = fleet_views.budget_status(self._desk)
        return endpoints.TaggedAnswer(status, endpoints.tag_of(status))


NODES_PER_SLICE = 100
"""Nodes per slice: about a millisecond of work."""
MAX_RECOVERIES_IN_DETAIL = 200
MAX_VERDICTS_IN_DETAIL = 20
MAX_WINDOW_S = 366 * 86400.0
"""Maximum seconds from now to the end of a maintenance window. It catches times given in milliseconds."""


class OperatorRoutes:
    """Handlers of ``OPERATOR_ROUTES``, by name."""

    def __init__(self, *, context: fleet_views.ViewContext, loop: FleetLoop, store: DatabaseStore) -> None:
        self._desk = context
        self._loop = loop
        self._store = store

    # --- queries

    async def status(self, request: Request, _who: Identity) -> op.FleetStatus:
        jobs = self._desk.state.jobs
        running = [name for name, job in jobs.items() if job.state not in fleet_views.ENDED_JOB_STATES]
        return fleet_views.fleet_status(self._desk, await self._summaries(request, running))

    async def nodes(self, request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        asked = responses.parse_query(request.scope)
        wanted = fleet_views.NodeFilter(
            **{name: asked[name] for name in fleet_views.NodeFilter.__struct_fields__ if name in asked}
        )
        found = fleet_views.find_nodes(self._desk, wanted)
        page, following = fleet_views.take_page(
            found, asked.get("cursor", ""), page_size(asked, fleet_views.MAX_PAGE_SIZE)
        )
        shown: list[op.NodeSummary] = []
        lines: list[Any] = []
        for begin in range(0, len(page), NODES_PER_SLICE):
            await endpoints.yield_to_agents(request)
            summaries = fleet_views.node_summaries(self._desk, page[begin : begin + NODES_PER_SLICE])
            shown += summaries
            lines += endpoints.node_tag_parts(self._desk, summaries)
        await endpoints.yield_to_agents(request)
        answer = op.NodeList(nodes=tuple(shown), total=len(found), next=following)
        return endpoints.TaggedAnswer(answer, endpoints.node_page_tag(lines, len(found), following))

    async def node(self, request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        node = request.path_params["node"]
        detail = fleet_views.node_detail(self._desk, node)
        # Before the store is read, so that the tag fits the detail shown.
        tag = endpoints.node_tag(self._desk, self._desk.node(node))
        verdicts = await self._store.read(
            lambda reader: [
                msgspec.json.decode(doc, type=Verdict) for doc in reader.verdicts(node, limit=MAX_VERDICTS_IN_DETAIL)
            ]
        )
        return endpoints.TaggedAnswer(msgspec.structs.replace(detail, verdicts=tuple(verdicts)), tag)

    async def jobs(self, request: Request, _who: Identity) -> op.JobList:
        asked = responses.parse_query(request.scope)
        found = fleet_views.find_jobs(self._desk, asked.get("job_state", ""))
        page, following = fleet_views.take_page(
            found, asked.get("cursor", ""), page_size(asked, fleet_views.MAX_PAGE_SIZE)
        )
        summaries = await self._summaries(request, page)
        return op.JobList(jobs=tuple(summaries), total=len(found), next=following)

    async def _summaries(self, request: Request, names: Iterable[str]) -> list[op.JobSummary]:
        """Return summaries of the jobs that still exist, one per slice: each is linear in its ranks."""
        state, found = self._desk.state, []
        for name in names:
            await endpoints.yield_to_agents(request)
            if name in state.jobs:
                found.append(fleet_views.job_summary(state, state.jobs[name]))
        return found

    async def job(self, request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        job = request.path_params["job"]
        detail, tag = fleet_views.job_detail(self._desk, job), endpoints.job_tag(self._desk.job(job))
        recoveries = await self._store.read(
            lambda reader: [
                msgspec.json.decode(doc, type=op.GenerationRecovery)
                for doc in reader.recoveries(job, limit=MAX_RECOVERIES_IN_DETAIL)
            ]
        )
        current = self._loop.read_models.recoveries.current(self._desk.job(job))
        if current is not None and current.duration_s is None:
            recoveries.append(current)
        answer = msgspec.structs.replace(detail, recoveries=tuple(recoveries))
        return endpoints.TaggedAnswer(answer, tag, endpoints.job_display_tag(answer))

    async def restorability(self, request: Request, _who: Identity) -> op.Restorability:
        return compute_restorability(self._desk.state, self._desk.job(request.path_params["job"]))

    async def job_checkpoints(self, request: Request, _who: Identity) -> JobCheckpoints:
        return list_checkpoints(self._desk.state, self._desk.job(request.path_params["job"]))

    async def probes(self, request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        asked, board = responses.parse_query(request.scope), self._loop.read_models.probes
        found, more = board.page(asked.get("node", ""), asked.get("cursor", ""), page_size(asked))
        return endpoints.TaggedAnswer(op.ProbeList(probes=found, next=more), endpoints.probes_tag(board.newest()))

    async def probe(self, request: Request, _who: Identity) -> op.ProbeStatus:
        return self._loop.read_models.probes.get(request.path_params["probe"])

    # --- orders

    async def order(self, request: Request, identity: Identity) -> op.ChangeResult:
        because = await endpoints.read_message(request, op.ReasonOnlyRequest)
        kind, node = ev.OperatorAction(request.path_params["order"]), request.path_params["node"]
        return await self._command(request, _order(kind, identity, because.reason, node=node))

    async def maintenance(self, request: Request, who: Identity) -> op.ChangeResult:
        window = await endpoints.read_message(request, operator_history.MaintenanceRequest)
        if (window.node is None) == (window.rack is None):
            raise MalformedMessage("maintenance is of a node or of a rack: name one of them")
        if window.until > self._desk.now() + MAX_WINDOW_S:
            raise MalformedMessage(
                "`until` is more than a year from now: give seconds since the epoch, not milliseconds; `hold` keeps a "
                "node out for as long as it takes"
            )
        kind = ev.OperatorAction.MAINTENANCE
        order = _order(kind, who, window.reason, node=window.node, rack=window.rack, until=window.until)
        return await self._command(request, msgspec.structs.replace(order, starts_at=window.starts_at))

    async def cancel_maintenance(self, request: Request, who: Identity) -> op.ChangeResult:
        plan = await endpoints.read_message(request, operator_history.CancelMaintenance)
        if (plan.node is None) == (plan.rack is None):
            raise MalformedMessage("what is planned is for a node or for a rack: name one of them")
        kind = ev.OperatorAction.CANCEL_MAINTENANCE
        return await self._command(request, _order(kind, who, plan.reason, node=plan.node, rack=plan.rack))

    async def stop(self, request: Request, who: Identity) -> op.ChangeResult:
        because = await endpoints.read_message(request, op.ReasonOnlyRequest)
        job = request.path_params["job"]
        return await self._command(request, _order(ev.OperatorAction.STOP_JOB, who, because.reason, job=job))

    async def resize(self, request: Request, who: Identity) -> op.ChangeResult:
        resize = await endpoints.read_message(request, op.Resize)
        job, kind = request.path_params["job"], ev.OperatorAction.RESIZE_JOB
        return await self._command(request, _order(kind, who, resize.reason, job=job, node_limit=resize.size))

    async def reset_breaker(self, request: Request, who: Identity) -> op.ChangeResult:
        because = await endpoints.read_message(request, op.ReasonOnlyRequest)
        return await self._command(request, _order(ev.OperatorAction.RESET_BREAKER, who, because.reason))

    async def _command(self, request: Request, command: ev.OperatorCommand) -> op.ChangeResult:
        def stimulus(tx: Transaction, now: float) -> op.ChangeResult:
            endpoints.check_tag(request, lambda: endpoints.subject_tag(self._desk, command))
            return _changed(command, tx, now)

        return await self._loop.submit(stimulus)

    async def start_probe(self, request: Request, who: Identity) -> op.ProbeStatus:
        wanted = await endpoints.read_message(request, op.StartProbe)
        event = ev.ProbeRequested(
            nodes=wanted.nodes, backend=wanted.backend, actor=who.subject, reason=wanted.reason, trace=new_trace()
        )
        board = self._loop.read_models.probes

        def stimulus(tx: Transaction, now: float) -> str:
            endpoints.check_tag(request, lambda: endpoints.probes_tag(board.newest()))
            return _started_probe(event, tx, now)

        return board.get(await self._loop.submit(stimulus))


def _order(kind: ev.OperatorAction, identity: Identity, reason: str, **subject: Any) -> ev.OperatorCommand:
    return ev.OperatorCommand(action=kind, actor=identity.subject, reason=reason, trace=new_trace(), **subject)


def _changed(command: ev.OperatorCommand, tx: Transaction, now: float) -> op.ChangeResult:
    told = len(tx.audit)
    tx.handle(command, now)
    sentences = _without_repeats([row.sentence for row in tx.audit[told:]])
    return op.ChangeResult(trace=command.trace, sentence="; ".join(sentences)[:4096])


def _without_repeats(sentences: list[str]) -> list[str]:
    """Drop sentences contained in others: an order's own text recurs in what followed from it."""
    different = list(dict.fromkeys(sentences))
    return [one for one in different if not any(one != other and one in other for other in different)]


def _started_probe(event: ev.ProbeRequested, tx: Transaction, now: float) -> str:
    """Return the id of the probe that the event started."""
    for effect in tx.handle(event, now):
        if isinstance(effect, fx.Send) and isinstance(effect.body, RunProbe):
            return effect.body.probe
    raise Conflict(f"no probe of {', '.join(event.nodes)} was begun")

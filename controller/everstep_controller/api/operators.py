"""Handle operators' queries and orders: FastAPI handlers over the fleet's state and its history."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from everstep.bearer_tokens import Identity
from everstep.errors import Conflict, MalformedMessage, NotFound, Unavailable
from everstep.vocabulary import Decision, Verdict
from everstep.wire.v1 import enrolment as wire
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.operator_history import JobCheckpoints
from everstep.wire.v1.receipts import JobReceipt
from everstep_controller.api import endpoints
from everstep_controller.api.endpoints import tag_of
from everstep_controller.api.history import page_size
from everstep_controller.api.job_output import DEFAULT_LINES, OutputReader
from everstep_controller.auth.credentials import ChangeContext, CredentialStore, public_credential
from everstep_controller.core import effects as fx
from everstep_controller.core import events as ev
from everstep_controller.core.checkpoints.restore_points import compute_restorability, list_checkpoints
from everstep_controller.journal.policy_replay import PolicyTrialRunner
from everstep_controller.policy import rulebook
from everstep_controller.read_models import fleet_views
from everstep_controller.read_models.fleet_views import MAX_PAGE_SIZE, ProgressRecorder
from everstep_controller.read_models.hardware_drift import DriftTable
from everstep_controller.read_models.receipts import EVICTIONS, RestartModel, make_receipt, mistaken_traces
from everstep_controller.runtime.loop import FleetLoop
from everstep_controller.runtime.transaction import Transaction, new_trace
from everstep_controller.server import responses
from everstep_controller.store import reader
from everstep_controller.store.threads import DatabaseStore

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(eq=False)
class CredentialRoutes:
    """Handlers of ``CREDENTIAL_ROUTES``. Each change is one stimulus, together with its entry in the event log."""

    loop: FleetLoop
    store: CredentialStore

    async def enrol(self, request: Request, identity: Identity) -> wire.Enrolled:
        wanted = await endpoints.read_message(request, wire.Enrol)
        trace = new_trace()
        enrolled = await self._submit(lambda tx, now: self.store.enrol(wanted, identity, trace, tx, now))
        log.info("enrolled by join token %s", identity.credential, extra={"node": wanted.node, "trace": trace})
        return enrolled

    async def credentials(self, request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        query = responses.parse_query(request.scope)
        wanted = (query.get("role", ""), query.get("subject", ""), query.get("cursor", ""))
        rows, more = self.store.page(*wanted, page_size(query, MAX_PAGE_SIZE))
        page = wire.CredentialList(credentials=tuple(map(public_credential, rows)), next=more)
        return endpoints.TaggedAnswer(page, self._tag_of_all())

    async def credential(self, request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        credential = public_credential(self.store.get(request.path_params["id"]))
        return endpoints.TaggedAnswer(credential, tag_of(credential))

    async def issue_credential(self, request: Request, identity: Identity) -> wire.Issued:
        wanted = await endpoints.read_message(request, wire.IssueRequest)
        order = ChangeContext(identity, wanted.reason, new_trace())

        def issue(tx: Transaction, now: float) -> wire.Issued:
            endpoints.check_tag(request, self._tag_of_all)
            return self.store.issue(wanted, order, tx, now)

        return await self._submit(issue)

    async def revoke_credential(self, request: Request, identity: Identity) -> op.ChangeResult:
        because = await endpoints.read_message(request, op.ReasonOnlyRequest)
        id, order = request.path_params["id"], ChangeContext(identity, because.reason, new_trace())

        def revoke(tx: Transaction, now: float) -> str:
            self._check_tag(request, id)
            return self.store.revoke(id, order, tx, now)

        return op.ChangeResult(trace=order.trace, sentence=await self._submit(revoke))

    async def rotate_credential(self, request: Request, identity: Identity) -> wire.Issued:
        wanted = await endpoints.read_message(request, wire.Rotate)
        id, order = request.path_params["id"], ChangeContext(identity, wanted.reason, new_trace())

        def rotate(tx: Transaction, now: float) -> wire.Issued:
            self._check_tag(request, id)
            return self.store.rotate(id, wanted.grace_s, order, tx, now)

        return await self._submit(rotate)

    def _tag_of_all(self) -> str:
        return f'"{self.store.digest()}"'

    def _check_tag(self, request: Request, id: str) -> None:
        endpoints.check_tag(request, lambda: tag_of(public_credential(self.store.get(id))))

    async def _submit(self, change: Callable[[Transaction, float], T]) -> T:
        """Run a change in the loop. Raises Unavailable during a database outage, when it could not be made durable."""

        def stimulus(tx: Transaction, now: float) -> T:
            if outage := tx.state.database.outage:
                raise Unavailable(f"credentials cannot be changed while the database is unavailable: {outage}")
            return change(tx, now)

        return await self.loop.submit(stimulus)


@dataclass(eq=False)
class PolicyRoutes:
    """Handlers of ``POLICY_ROUTES``, by name."""

    context: fleet_views.ViewContext
    trials: PolicyTrialRunner
    origins: Mapping[str, str]  # sources of the policy's values that differ from the defaults

    def _document(self) -> operator_history.PolicyDocument:
        return rulebook.policy_document(self.context.state.policy, self.origins)

    async def policy(self, _request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        document = self._document()
        return endpoints.TaggedAnswer(document, tag_of(document))

    async def check_policy(self, request: Request, _who: Identity) -> operator_history.PolicyCheckResult:
        change = await endpoints.read_message(request, operator_history.PolicyChange)
        self._check_tag(request)
        return rulebook.check_change(self.context.state.policy, change)

    async def try_policy(self, request: Request, _who: Identity) -> operator_history.PolicyTrialResult:
        wanted = await endpoints.read_message(request, operator_history.PolicyTrialRequest)
        self._check_tag(request)
        return await self.trials.run(self.context.state.policy, wanted, self.context.now())

    def _check_tag(self, request: Request) -> None:
        endpoints.check_tag(request, lambda: tag_of(self._document()))

    async def budget(self, _request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        status = fleet_views.budget_status(self.context)
        return endpoints.TaggedAnswer(status, tag_of(status))


NODES_PER_SLICE = 100
"""Nodes per slice: about a millisecond of work."""
MAX_RECOVERIES_IN_DETAIL = 200
MAX_RECOVERIES_IN_RECEIPT = 1000
"""Recoveries whose costs a receipt adds up: the newest."""
MAX_VERDICTS_IN_DETAIL = 20
MAX_WINDOW_S = 366 * 86400.0
"""Maximum seconds from now to the end of a maintenance window. It catches times given in milliseconds."""


@dataclass(eq=False)
class OperatorRoutes:
    """Handlers of ``OPERATOR_ROUTES``, by name."""

    context: fleet_views.ViewContext
    loop: FleetLoop
    store: DatabaseStore
    recorder: ProgressRecorder
    output: OutputReader

    # --- queries

    async def status(self, request: Request, _who: Identity) -> op.FleetStatus:
        jobs = self.context.state.jobs
        running = [name for name, job in jobs.items() if not job.is_ended]
        return fleet_views.fleet_status(self.context, await self._summaries(request, running))

    async def identity(self, _request: Request, who: Identity) -> op.CallerIdentity:
        expires_at = who.ends_at if math.isfinite(who.ends_at) else None
        return op.CallerIdentity(role=str(who.role), subject=who.subject, expires_at=expires_at)

    async def nodes(self, request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        query = responses.parse_query(request.scope)
        fields = fleet_views.NodeFilter.__struct_fields__
        node_filter = fleet_views.NodeFilter(**{name: query[name] for name in fields if name in query})
        found = fleet_views.find_nodes(self.context, node_filter)
        page, following = fleet_views.take_page(found, query.get("cursor", ""), page_size(query, MAX_PAGE_SIZE))
        shown: list[op.NodeSummary] = []
        lines: list[Any] = []
        for begin in range(0, len(page), NODES_PER_SLICE):
            await endpoints.yield_to_agents(request)
            summaries = fleet_views.node_summaries(self.context, page[begin : begin + NODES_PER_SLICE])
            shown += summaries
            lines += endpoints.node_tag_parts(self.context, summaries)
        await endpoints.yield_to_agents(request)
        answer = op.NodeList(nodes=tuple(shown), total=len(found), next=following)
        return endpoints.TaggedAnswer(answer, endpoints.node_page_tag(lines, len(found), following))

    async def node(self, request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        node = request.path_params["node"]
        drift = await self._current_drift(request)
        detail = fleet_views.node_detail(self.context, node)
        # Before the store is read, so that the tag fits the detail shown.
        record = self.context.node(node)
        detail = msgspec.structs.replace(detail, drifts=drift.of_node(record))
        tag, drift_tag = endpoints.node_tag(self.context, record), tag_of(detail.drifts) if detail.drifts else ""
        answer = endpoints.TaggedAnswer(detail, tag, drift_tag)
        if endpoints.is_known(request, answer.etag):
            return answer
        docs = await self.store.query(lambda held: reader.newest_verdicts(held, node, MAX_VERDICTS_IN_DETAIL))
        verdicts = tuple(msgspec.json.decode(doc, type=Verdict) for doc in docs)
        return endpoints.TaggedAnswer(msgspec.structs.replace(detail, verdicts=verdicts), tag, drift_tag)

    async def node_gpus(self, request: Request, _who: Identity) -> op.NodeGpus:
        return self.loop.read_models.gpu_gauges.of_node(self.context.node(request.path_params["node"]))

    async def drift(self, request: Request, _who: Identity) -> op.DriftList:
        query, drift = responses.parse_query(request.scope), await self._current_drift(request)
        return drift.page(self.context.state.nodes, query.get("cursor", ""), page_size(query, MAX_PAGE_SIZE))

    async def _current_drift(self, request: Request) -> DriftTable:
        """Return the comparison of like nodes, with all registrations until now."""
        drift = self.loop.read_models.drift
        await drift.refresh(self.context.state.nodes, lambda: endpoints.yield_to_agents(request))
        return drift

    async def jobs(self, request: Request, _who: Identity) -> op.JobList:
        query = responses.parse_query(request.scope)
        wanted, jobs = query.get("job_state"), self.context.state.jobs.items()
        found = sorted(name for name, job in jobs if not wanted or job.status.state == wanted)
        page, following = fleet_views.take_page(found, query.get("cursor", ""), page_size(query, MAX_PAGE_SIZE))
        summaries = await self._summaries(request, page)
        return op.JobList(jobs=tuple(summaries), total=len(found), next=following)

    async def _summaries(self, request: Request, names: Iterable[str]) -> list[op.JobSummary]:
        """Return summaries of the jobs that still exist, one per slice: each is linear in its ranks."""
        state, found = self.context.state, []
        for name in names:
            await endpoints.yield_to_agents(request)
            if name in state.jobs:
                found.append(fleet_views.job_summary(state, state.jobs[name]))
        return found

    async def job(self, request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        job = request.path_params["job"]
        tag = endpoints.job_tag(self.context.job(job))
        answer = await self._job_detail(job, MAX_RECOVERIES_IN_DETAIL)
        return endpoints.TaggedAnswer(answer, tag, endpoints.job_display_tag(answer))

    async def _job_detail(self, job: str, max_recoveries: int) -> op.JobDetail:
        """Return the job with its newest recoveries, the last of which may not be complete."""
        detail = fleet_views.job_detail(self.context, job)
        docs = await self.store.query(lambda held: reader.newest_recoveries(held, job, max_recoveries))
        recoveries = [msgspec.json.decode(doc, type=op.GenerationRecovery) for doc in docs]
        current = self.loop.read_models.recoveries.current(self.context.job(job))
        if current is not None and current.duration_s is None:
            recoveries.append(current)
        return msgspec.structs.replace(detail, recoveries=tuple(recoveries))

    async def receipt(self, request: Request, _who: Identity) -> JobReceipt:
        job, query = request.path_params["job"], responses.parse_query(request.scope)
        if self.context.job(job).spec.restarts_script:
            raise NotFound(
                f"job {job} has no receipt: it runs a script for torchrun, which continues from its own checkpoint, so "
                "Everstep does not know what a loss cost"
            )
        until = float(query.get("until", self.context.now()))
        names = RestartModel.__struct_fields__
        model = RestartModel(**{name: float(query[name]) for name in names if name in query})
        detail = await self._job_detail(job, MAX_RECOVERIES_IN_RECEIPT)
        traces = {recovery.trace for recovery in detail.recoveries if recovery.decided_at <= until}
        decisions = [str(decision) for decision in EVICTIONS]
        docs, later = await self.store.query(
            lambda held: (
                reader.verdicts_of_traces(held, traces, decisions, since=detail.created_at, until=until),
                reader.verdicts_of_decision(held, Decision.CORRELATED, since=detail.created_at, until=until),
            )
        )
        verdicts = [msgspec.json.decode(doc, type=Verdict) for doc in docs]
        rolled_back = [msgspec.json.decode(doc, type=Verdict) for doc in later]
        await endpoints.yield_to_agents(request)
        record, nodes = self.context.job(job), self.context.state.nodes
        return make_receipt(
            detail,
            [sample for sample in self.recorder.history(job).samples if sample.at <= until],
            verdicts,
            list_checkpoints(self.context.state, record).versions,
            until=until,
            gpus=sum(len(nodes[name].identity.gpus) for name in record.seats if name in nodes),
            model=model,
            mistaken=mistaken_traces(verdicts, rolled_back),
        )

    async def progress(self, request: Request, _who: Identity) -> op.ProgressHistory:
        job = self.context.job(request.path_params["job"]).job
        return self.recorder.history(job, float(responses.parse_query(request.scope).get("since", 0.0)))

    async def restorability(self, request: Request, _who: Identity) -> op.Restorability:
        return compute_restorability(self.context.state, self.context.job(request.path_params["job"]))

    async def job_checkpoints(self, request: Request, _who: Identity) -> JobCheckpoints:
        return list_checkpoints(self.context.state, self.context.job(request.path_params["job"]))

    async def job_output(self, request: Request, _who: Identity) -> op.JobOutput:
        query, job = responses.parse_query(request.scope), self.context.job(request.path_params["job"])
        rank = responses.int_parameter(query, "rank", 0) if "rank" in query else None
        lines = responses.int_parameter(query, "lines", DEFAULT_LINES)
        return await self.output.read(job.job, job.generation, rank, lines)

    async def probes(self, request: Request, _who: Identity) -> endpoints.TaggedAnswer:
        query, probes = responses.parse_query(request.scope), self.loop.read_models.probes
        found, more = probes.page(query.get("node", ""), query.get("cursor", ""), page_size(query))
        return endpoints.TaggedAnswer(op.ProbeList(probes=found, next=more), tag_of(probes.newest()))

    async def probe(self, request: Request, _who: Identity) -> op.ProbeStatus:
        return self.loop.read_models.probes.get(request.path_params["probe"])

    # --- orders

    async def order(self, request: Request, who: Identity) -> op.ChangeResult:
        return await self._reasoned(request, who, ev.OperatorAction(request.path_params["order"]))

    async def stop(self, request: Request, who: Identity) -> op.ChangeResult:
        return await self._reasoned(request, who, ev.OperatorAction.STOP_JOB)

    async def reset_breaker(self, request: Request, who: Identity) -> op.ChangeResult:
        return await self._reasoned(request, who, ev.OperatorAction.RESET_BREAKER)

    async def _reasoned(self, request: Request, who: Identity, action: ev.OperatorAction) -> op.ChangeResult:
        """Carry out an order that only has a reason, about the node or job in the path."""
        wanted = await endpoints.read_message(request, op.ReasonOnlyRequest)
        subject = {name: request.path_params[name] for name in ("node", "job") if name in request.path_params}
        return await self._command(request, who, action, wanted.reason, **subject)

    async def resize(self, request: Request, who: Identity) -> op.ChangeResult:
        wanted = await endpoints.read_message(request, op.Resize)
        job, action = request.path_params["job"], ev.OperatorAction.RESIZE_JOB
        return await self._command(request, who, action, wanted.reason, job=job, node_limit=wanted.size)

    async def maintenance(self, request: Request, who: Identity) -> op.ChangeResult:
        window = await endpoints.read_message(request, operator_history.MaintenanceRequest)
        _check_one_subject(window.node, window.rack)
        if window.until > self.context.now() + MAX_WINDOW_S:
            raise MalformedMessage(
                "`until` is more than a year from now: give seconds since the epoch, not milliseconds; `hold` keeps a "
                "node out of service without a time limit"
            )
        subject = {"node": window.node, "rack": window.rack, "until": window.until, "starts_at": window.starts_at}
        return await self._command(request, who, ev.OperatorAction.MAINTENANCE, window.reason, **subject)

    async def cancel_maintenance(self, request: Request, who: Identity) -> op.ChangeResult:
        plan = await endpoints.read_message(request, operator_history.CancelMaintenance)
        _check_one_subject(plan.node, plan.rack)
        action = ev.OperatorAction.CANCEL_MAINTENANCE
        return await self._command(request, who, action, plan.reason, node=plan.node, rack=plan.rack)

    async def _command(
        self, request: Request, who: Identity, action: ev.OperatorAction, reason: str, **subject: Any
    ) -> op.ChangeResult:
        command = ev.OperatorCommand(action=action, actor=who.subject, reason=reason, trace=new_trace(), **subject)

        def stimulus(tx: Transaction, now: float) -> op.ChangeResult:
            endpoints.check_tag(request, lambda: endpoints.subject_tag(self.context, command))
            before = len(tx.event_log)
            tx.handle(command, now)
            sentences = list(dict.fromkeys(row.sentence for row in tx.event_log[before:]))
            # An order's own text recurs in what followed from it.
            different = [
                sentence
                for sentence in sentences
                if not any(sentence != other and sentence in other for other in sentences)
            ]
            return op.ChangeResult(trace=command.trace, sentence="; ".join(different)[:4096])

        return await self.loop.submit(stimulus)

    async def start_probe(self, request: Request, who: Identity) -> op.ProbeStatus:
        wanted = await endpoints.read_message(request, op.StartProbe)
        author = {"actor": who.subject, "reason": wanted.reason, "trace": new_trace()}
        event = ev.ProbeRequested(nodes=wanted.nodes, backend=wanted.backend, **author)
        probes = self.loop.read_models.probes

        def stimulus(tx: Transaction, now: float) -> str:
            endpoints.check_tag(request, lambda: tag_of(probes.newest()))
            for effect in tx.handle(event, now):
                if isinstance(effect, fx.Send) and isinstance(effect.body, RunProbe):
                    return effect.body.probe
            raise Conflict(f"no probe of {', '.join(event.nodes)} was started")

        return probes.get(await self.loop.submit(stimulus))


def _check_one_subject(node: str | None, rack: str | None) -> None:
    if (node is None) == (rack is None):
        raise MalformedMessage("maintenance needs a node or a rack: give exactly one of them")

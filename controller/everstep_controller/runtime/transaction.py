"""Collect the effects of one transaction's events: rows to write, and actions to take once they are durable."""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from everstep.errors import EverstepError
from everstep.ids import NodeId
from everstep.vocabulary import Finding, GenerationReason, Verdict
from everstep.wire.v1.directives import NewGeneration, ProtectVersion, RunProbe, SpillVersion, StopJob, VersionNotice
from everstep_controller.core import effects as fx
from everstep_controller.core import engine
from everstep_controller.core import events as ev
from everstep_controller.core.records import JobRecord, NodeRecord
from everstep_controller.core.state import FleetState
from everstep_controller.read_models.fleet_views import ReadModels
from everstep_controller.read_models.prometheus import Metrics
from everstep_controller.runtime.push import EncodedBody, Outbox, OutgoingDirective, generation_topic
from everstep_controller.runtime.rate_limits import EventQuota, causing_node
from everstep_controller.store import rows

# ---- finding changes
# Findings are written one by one, not with their node's record: a faulty kernel log raises hundreds on one node, and
# each new line would rewrite them all.


class FindingDelta:
    """Findings last written of each node. Findings are frozen, so an identical object has not changed."""

    def __init__(self, nodes: Iterable[NodeRecord]) -> None:
        self._written: dict[NodeId, dict[str, Finding]] = {}
        for record in nodes:
            self._note(record)

    def changes(self, record: NodeRecord) -> Iterator[tuple[str, Finding | None]]:
        """Yield the changed findings of a node by key, None for cleared ones. They count as written from now on."""
        written, current = self._written.get(record.node, {}), record.health.agent_findings
        yield from ((key, None) for key in written if key not in current)
        yield from ((key, finding) for key, finding in current.items() if written.get(key) is not finding)
        self._note(record)

    def forget(self, node: NodeId) -> None:
        """Forget a node whose findings were deleted from the database."""
        self._written.pop(node, None)

    def _note(self, record: NodeRecord) -> None:
        if record.health.agent_findings:
            self._written[record.node] = dict(record.health.agent_findings)
        else:
            self._written.pop(record.node, None)


def without_findings(record: NodeRecord) -> NodeRecord:
    """Return the record as stored in its document."""
    return msgspec.structs.replace(record, health=msgspec.structs.replace(record.health, agent_findings={}))


T = TypeVar("T")
_encode = msgspec.json.Encoder().encode

DecideFunction = Callable[[FleetState, ev.Event, float], list[fx.Effect]]
"""``core.engine.handle``, or a wrapper around it."""


_trace_numbers = random.Random(secrets.randbits(256))
"""Seeded once: a system call per trace would release the interpreter's lock for up to 5 ms."""


def new_trace() -> str:
    """Return a new stimulus id of 16 hex digits. It is not secret."""
    return f"{_trace_numbers.getrandbits(64):016x}"


def json_text(value: Any) -> str:
    return _encode(value).decode()


_HINT_TOPICS: dict[type, str] = {VersionNotice: "versions", SpillVersion: "spill", ProtectVersion: "parity"}
"""Topics of directives that are repeated until answered, and so not stored."""


class EventNumbers:
    """The event log's next number. It is counted in memory because a database has one writer."""

    def __init__(self, newest: int) -> None:
        self.newest = newest

    def take(self) -> int:
        self.newest += 1
        return self.newest


@dataclass(eq=False)
class Transaction:
    """Runs events through the core and collects their effects. Build one per commit; never reuse it.

    ``handling`` is the current event. If the core raised on it, nothing here may be written. ``is_ephemeral`` is set by
    a stimulus whose answer promises nothing durable, because its sender repeats it to the next controller. Such a
    stimulus is answered during an outage too.
    """

    state: FleetState
    outbox: Outbox
    event_numbers: EventNumbers
    metrics: Metrics
    read_models: ReadModels
    finding_delta: FindingDelta
    decide: DecideFunction = engine.handle
    quota: EventQuota | None = None

    def __post_init__(self) -> None:
        self.handling: ev.Event | None = None
        self.is_ephemeral = False
        self.outgoing: list[OutgoingDirective] = []
        self.event_log: list[rows.EventLogRow] = []
        self.verdicts: list[Verdict] = []
        self.remediations: list[rows.RemediationRow] = []
        self._cause = ""
        self._documents: dict[tuple[str, str], Any] = {}
        self._batch = rows.Batch()
        self._bodies: dict[int, tuple[Any, EncodedBody]] = {}

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Apply one event. Raises what the core raises, with nothing changed."""
        kind = type(event).__name__
        started = time.perf_counter()
        self.handling = event
        try:
            effects = self.decide(self.state, event, now)
        except EverstepError:
            self.handling = None
            raise
        self.metrics.observe_event(kind, time.perf_counter() - started)
        if isinstance(event, ev.ReportArrived):
            self.read_models.record_report(event.node, event.body)
        self._cause = causing_node(event)
        for effect in effects:
            self._collect(effect, now)
        self.handling = None
        return effects

    def handle_ephemeral(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Apply an event that promises nothing durable: another controller would receive it again."""
        self.is_ephemeral = True
        return self.handle(event, now)

    def acknowledge_reports(self, node: str, incarnation: int, through: int) -> None:
        """Record that the node's reports up to ``through`` were taken."""
        self._batch.acknowledged_reports[node, incarnation] = through

    def add_event_log_entry(self, entry: fx.EventLogEntry) -> None:
        """Add an entry to the event log for a change made outside the core."""
        self.event_log.append(_event_log_row(self.event_numbers.take(), entry))

    def put_credential(self, row: rows.CredentialRow) -> None:
        """Write a new or changed credential."""
        self._batch.credentials[row.id] = row

    def put_remediation(self, row: rows.RemediationRow) -> None:
        """Write a new or changed remediation."""
        self._batch.remediations[row.id] = row

    def resend(self, outgoing: Iterable[OutgoingDirective]) -> None:
        """Send held-back directives under new numbers, because later directives have overtaken them."""
        for directive in outgoing:
            if directive.is_durable:
                self.outgoing.append(msgspec.structs.replace(directive, seq=self.outbox.take_seq(directive.node)))

    def take_final(self) -> list[OutgoingDirective]:
        """Remove and return the final directives, which are not pushed before they are durable."""
        final = [directive for directive in self.outgoing if directive.is_final]
        if final:
            self.outgoing = [directive for directive in self.outgoing if not directive.is_final]
        return final

    def encode(self, budget_s: float = math.inf) -> bool:
        """Encode changed documents for ``budget_s`` seconds. Return whether any is left; ``batch`` encodes the rest."""
        until = time.perf_counter() + budget_s
        while self._documents and time.perf_counter() < until:
            (table, key), doc = self._documents.popitem()
            if table == "fleet":
                self._batch.fleet = json_text(doc)
            elif table == "jobs":
                self._batch.jobs[key] = json_text(doc)
            else:
                self._batch.nodes[key] = json_text(without_findings(doc))
                for finding_key, finding in self.finding_delta.changes(doc):
                    self._batch.active_findings[key, finding_key] = json_text(finding) if finding is not None else ""
        return bool(self._documents)

    def batch(self) -> rows.Batch:
        """Return everything to write."""
        self.encode()
        self._batch.event_log = self.event_log
        self._batch.outbox = [
            rows.OutboxRow(node=out.node, seq=out.seq, body=out.body.stored) for out in self.outgoing if out.is_durable
        ]
        if self._batch:
            self._batch.acknowledged = self.outbox.take_acknowledged()
            self._batch.superseded = self.outbox.take_superseded()
        return self._batch

    def _collect(self, effect: fx.Effect, now: float) -> None:
        match effect:
            case fx.Send(node=node, body=body):  # first: a generation is sent to thousands
                if isinstance(body, RunProbe):
                    self.read_models.probes.record_started(body, now)
                self._send(node, body)
            case fx.PutFleet(doc=fleet_doc):
                self._documents["fleet", ""] = fleet_doc
            case fx.PutNode(node=node, doc=node_doc):
                self._documents["nodes", node] = node_doc
            case fx.PutJob(job=job, doc=job_doc):
                self._documents["jobs", job] = job_doc
                self.read_models.totals.record_state(job_doc, now)
                self._job_changed(job_doc)
            case fx.DeleteNode(node=node):
                self._documents.pop(("nodes", node), None)
                self.outgoing = [directive for directive in self.outgoing if directive.node != node]
                self._batch.forget_node(node)
                self.finding_delta.forget(node)
                self.outbox.forget(node)
                self.read_models.gpu_gauges.forget(node)
            case fx.DeleteJob(job=job):
                self._documents.pop(("jobs", job), None)
                self._batch.forget_job(job)
                self.read_models.recoveries.forget(job)
                self.read_models.totals.forget(job)
            case fx.PutGeneration(spec=spec, opened_at=opened_at):
                row = _documented(rows.GenerationRow, spec, "job number reason trace", issued_at=opened_at)
                self._batch.generations.append(row)
            case fx.PutVersion(doc=record):
                if record.audited_at is None:  # else it was counted at its commit
                    self.read_models.totals.record_version(record)
                key = (record.job, record.version.generation, record.version.step)
                self._batch.versions[key] = rows.VersionRow(
                    job=key[0],
                    generation=key[1],
                    step=key[2],
                    committed_at=record.committed_at,
                    verified_at=record.verified_at,
                    audited_at=record.audited_at,
                    bytes=record.bytes,
                    ranks=record.rank_count,
                )
            case fx.PutVerdict(verdict=verdict):
                self.verdicts.append(verdict)
                self._batch.verdicts.append(_documented(rows.VerdictRow, verdict, "id node decision at trace"))
            case fx.RecordFindingRaised(node=node, finding=finding, at=at):
                self._batch.findings.append(_documented(rows.FindingRow, finding, "key kind", node=node, at=at))
            case fx.RecordFindingCleared(node=node, key=key, at=at):
                self._batch.findings.append(rows.FindingRow(node=node, key=key, kind="", at=at))
            case fx.RequestRemediation(remediation=remediation):
                state, at = rows.RemediationState.REQUESTED, remediation.at
                requested = _documented(rows.RemediationRow, remediation, "id node kind", state=state, requested_at=at)
                self.remediations.append(requested)
                self.put_remediation(requested)
            case fx.AppendToEventLog(entry=entry):
                if self._cause and self.quota is not None and not self.quota.is_allowed(self._cause, entry.kind, now):
                    return
                self.event_log.append(_event_log_row(self.event_numbers.take(), entry))

    def _job_changed(self, job: JobRecord) -> None:
        recovery = self.read_models.recoveries.take_finished(job)
        if recovery is None:
            return
        self._batch.recoveries.append(_documented(rows.RecoveryRow, recovery, "generation", job=job.job))
        if recovery.duration_s is not None and recovery.reason is not GenerationReason.FORMED:
            self.metrics.observe_recovery(job.job, recovery.reason, recovery.duration_s)

    def _send(self, node: str, body: Any) -> None:
        """Send a directive. A generation replaces its job's older ones, unless they must reach its boundary first."""
        spec = body.spec if isinstance(body, NewGeneration) else None
        encoded = self._bodies.get(id(body), (None, None))[1]
        if encoded is None:
            encoded = EncodedBody(
                json_text(body), rows.generation_reference(spec.job, spec.number) if spec is not None else ""
            )
            self._bodies[id(body)] = (body, encoded)  # the body too, because an id is unique only while it lives
        hint = _HINT_TOPICS.get(type(body), "")
        topic = generation_topic(spec.job) if spec is not None else f"{hint}/{body.job}" if hint else ""
        self.outgoing.append(
            OutgoingDirective(
                node=node,
                seq=self.outbox.take_seq(node),
                body=encoded,
                is_durable=not hint,
                topic=topic,
                replaces_older=spec is None or spec.after_step is None,
                is_final=isinstance(body, StopJob),
            )
        )


def _documented(kind: Callable[..., T], record: msgspec.Struct, names: str, **values: Any) -> T:
    """Return a row of this kind, with a record's JSON and some of its fields."""
    return kind(**{name: getattr(record, name) for name in names.split()}, **values, doc=json_text(record))


def _event_log_row(number: int, entry: fx.EventLogEntry) -> rows.EventLogRow:
    return rows.EventLogRow(
        id=number,
        at=entry.at,
        kind=entry.kind,
        sentence=entry.sentence,
        node=entry.node or "",
        job=entry.job or "",
        generation=entry.generation,
        trace=entry.trace,
        detail=json_text(entry.data),
    )

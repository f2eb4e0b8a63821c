"""What the events of one transaction add up to: rows to write, and what to do once they are durable."""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from everstep.errors import EverstepError
from everstep.ids import NodeId
from everstep.vocabulary import Finding, GenerationReason, Verdict
from everstep.wire.v1.directives import NewGeneration, ProtectVersion, RunProbe, SpillVersion, StopJob, VersionNotice
from everstep_controller.core import effects as fx
from everstep_controller.core import engine
from everstep_controller.core import events as ev
from everstep_controller.core.records import JobRecord, NodeRecord, VersionRecord
from everstep_controller.core.state import FleetState
from everstep_controller.read_models.fleet_views import Boards
from everstep_controller.read_models.prometheus import Metrics
from everstep_controller.runtime.event_quota import EventQuota, cause_of
from everstep_controller.runtime.push import Body, Outbox, Outgoing, generation_topic
from everstep_controller.store.rows import (
    AuditRow,
    Batch,
    CredentialRow,
    FindingRow,
    GenerationRow,
    OutboxRow,
    RecoveryRow,
    RemedyRow,
    RemedyState,
    VerdictRow,
    VersionRow,
    generation_reference,
)

# ---- standing
# Which findings the database has of each node.
#
# They are written one by one, as they come and go, and not with their node's record: of a node whose kernel log has
# gone
# mad hundreds stand, and every line of it would write them all again.


class StandingFindings:
    """What was written last, or is about to be. Findings are frozen: one that is the same object has not changed."""

    def __init__(self, nodes: Iterable[NodeRecord]) -> None:
        self._written: dict[NodeId, dict[str, Finding]] = {}
        for record in nodes:
            self._note(record)

    def changes(self, record: NodeRecord) -> Iterator[tuple[str, Finding | None]]:
        """The findings of a node by key that are to be written, None for those that stand no more; they count as
        written from now on."""
        written = self._written.get(record.node, {})
        if not written and not record.findings:
            return
        for key in written:
            if key not in record.findings:
                yield key, None
        for key, finding in record.findings.items():
            if written.get(key) is not finding:
                yield key, finding
        self._note(record)

    def forget(self, node: NodeId) -> None:
        """The database has nothing of the node any more."""
        self._written.pop(node, None)

    def _note(self, record: NodeRecord) -> None:
        if record.findings:
            self._written[record.node] = dict(record.findings)
        else:
            self._written.pop(record.node, None)


def without_findings(record: NodeRecord) -> NodeRecord:
    """The record as its document has it."""
    return msgspec.structs.replace(record, findings={})


_encode = msgspec.json.Encoder().encode

Decide = Callable[[FleetState, ev.Event, float], list[fx.Effect]]
"""``core.fleet.handle``, or what wraps it."""


_trace_numbers = random.Random(secrets.randbits(256))
"""Seeded once: drawing from the system gives the interpreter's lock to another thread, which may keep it for 5 ms."""


def new_trace() -> str:
    """A fresh stimulus id: 16 hex digits. It is no secret."""
    return f"{_trace_numbers.getrandbits(64):016x}"


def _text(value: Any) -> str:
    return _encode(value).decode()


class AuditNumbers:
    """The audit log's next number. One writer per database, so it is counted here, not there."""

    def __init__(self, newest: int) -> None:
        self.newest = newest

    def take(self) -> int:
        self.newest += 1
        return self.newest


class Transaction:
    """Runs events through the core and collects their effects. Build one per commit; never reuse it.

    ``handling`` is the event that the core is at, or that it could not survive: then nothing here may be written.
    Documents are encoded by ``batch``, when the core has finished with them: nothing else changes them.
    ``forgettable``: set by a stimulus whose answer promises nothing that must survive this controller (whoever is
    answered says it again to the next one); it is answered while the database is away too.
    ``quota``: bounds the lines of the audit log that each node causes; None: as many as it likes.
    """

    def __init__(
        self,
        state: FleetState,
        outbox: Outbox,
        numbers: AuditNumbers,
        metrics: Metrics,
        boards: Boards,
        standing: StandingFindings,
        decide: Decide = engine.handle,
        quota: EventQuota | None = None,
    ) -> None:
        self.state = state
        self.handling: ev.Event | None = None
        self.forgettable = False
        self.outgoing: list[Outgoing] = []
        self.audit: list[AuditRow] = []
        self.verdicts: list[Verdict] = []
        self.remedies: list[RemedyRow] = []
        self._outbox = outbox
        self._numbers = numbers
        self._metrics = metrics
        self._boards = boards
        self._standing = standing
        self._decide = decide
        self._quota = quota
        self._cause = ""
        self._documents: dict[tuple[str, str], Any] = {}
        self._batch = Batch()
        self._bodies: dict[int, tuple[Any, Body]] = {}

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Applies one event. Raises what ``core.fleet.handle`` raises, with nothing changed."""
        kind = type(event).__name__
        started = time.perf_counter()
        self.handling = event
        try:
            effects = self._decide(self.state, event, now)
        except EverstepError:
            self.handling = None
            raise
        self._metrics.handled(kind, time.perf_counter() - started)
        if isinstance(event, ev.ReportArrived):
            self._boards.report(event.node, event.body)
        self._cause = cause_of(event)
        for effect in effects:
            self._collect(effect, now)
        self.handling = None
        return effects

    def hear(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """``handle`` for what promises nothing: another controller would hear of it anew."""
        self.forgettable = True
        return self.handle(event, now)

    def mark(self, node: str, incarnation: int, through: int) -> None:
        """Remembers that the node's reports up to ``through`` were taken."""
        self._batch.marks[node, incarnation] = through

    def note(self, entry: fx.AuditEntry) -> None:
        """Puts a line in the audit log that is not the core's: what the shell itself has changed."""
        self.audit.append(_audit_row(self._numbers.take(), entry))

    def credential(self, row: CredentialRow) -> None:
        """Writes a credential, new or changed."""
        self._batch.credentials[row.id] = row

    def remedy(self, row: RemedyRow) -> None:
        """Writes a remedy, new or further on its way."""
        self._batch.remedies[row.id] = row

    def send_again(self, outgoing: Iterable[Outgoing]) -> None:
        """Directives that were held back, under new numbers: later ones have overtaken them."""
        for one in outgoing:
            if one.durable:
                self.outgoing.append(msgspec.structs.replace(one, seq=self._outbox.number(one.node)))

    def take_final(self) -> list[Outgoing]:
        """Takes out the directives that nobody comes back from: these are not pushed before they are durable."""
        final = [one for one in self.outgoing if one.final]
        if final:
            self.outgoing = [one for one in self.outgoing if not one.final]
        return final

    def encode(self, stretch_s: float = math.inf) -> bool:
        """Encodes changed documents for so many seconds; False when none is left. ``batch`` encodes the rest."""
        until = time.perf_counter() + stretch_s
        while self._documents and time.perf_counter() < until:
            (table, key), doc = self._documents.popitem()
            if table == "fleet":
                self._batch.fleet = _text(doc)
            elif table == "jobs":
                self._batch.jobs[key] = _text(doc)
            else:
                self._batch.nodes[key] = _text(without_findings(doc))
                for of, finding in self._standing.changes(doc):
                    self._batch.standing[key, of] = _text(finding) if finding is not None else ""
        return bool(self._documents)

    def batch(self) -> Batch:
        """Everything to write."""
        self.encode()
        self._batch.audit = self.audit
        self._batch.outbox = [
            OutboxRow(node=out.node, seq=out.seq, body=out.body.stored) for out in self.outgoing if out.durable
        ]
        if self._batch:
            self._batch.pruned = self._outbox.take_pruned()
            self._batch.dropped = self._outbox.take_dropped()
        return self._batch

    def _collect(self, effect: fx.Effect, now: float) -> None:
        match effect:
            case fx.Send(node=node, body=body):  # first: a generation is sent to thousands
                if isinstance(body, RunProbe):
                    self._boards.probes.started(body, now)
                self._send(node, body)
            case fx.PutFleet(doc=fleet_doc):
                self._documents["fleet", ""] = fleet_doc
            case fx.PutNode(node=node, doc=node_doc):
                self._documents["nodes", node] = node_doc
            case fx.PutJob(job=job, doc=job_doc):
                self._documents["jobs", job] = job_doc
                self._job_changed(job_doc)
            case fx.DropNode(node=node):
                self._documents.pop(("nodes", node), None)
                self.outgoing = [one for one in self.outgoing if one.node != node]
                self._batch.forget_node(node)
                self._standing.forget(node)
                self._outbox.forget(node)
            case fx.DropJob(job=job):
                self._documents.pop(("jobs", job), None)
                self._batch.forget_job(job)
                self._boards.recoveries.forget(job)
            case fx.PutGeneration():
                self._batch.generations.append(_generation_row(effect))
            case fx.PutVersion(doc=version):
                row = _version_row(version)
                self._batch.versions[row.job, row.generation, row.step] = row
            case fx.PutVerdict(verdict=verdict):
                self.verdicts.append(verdict)
                self._batch.verdicts.append(_verdict_row(verdict))
            case fx.NoteFinding(node=node, finding=finding, at=at):
                row_found = FindingRow(node=node, key=finding.key, kind=finding.kind, at=at, doc=_text(finding))
                self._batch.findings.append(row_found)
            case fx.NoteCleared(node=node, key=key, at=at):
                self._batch.findings.append(FindingRow(node=node, key=key, kind="", at=at))
            case fx.RequestRemedy(remedy=remedy):
                row_wanted = _remedy_row(remedy)
                self.remedies.append(row_wanted)
                self.remedy(row_wanted)
            case fx.Audit(entry=entry):
                if self._cause and self._quota is not None and not self._quota.admits(self._cause, entry.kind, now):
                    return
                self.audit.append(_audit_row(self._numbers.take(), entry))

    def _job_changed(self, job: JobRecord) -> None:
        recovery = self._boards.recoveries.finished(job)
        if recovery is None:
            return
        self._batch.recoveries.append(RecoveryRow(job=job.job, generation=recovery.generation, doc=_text(recovery)))
        if recovery.seconds is not None and recovery.reason is not GenerationReason.FORMED:
            self._metrics.recovered(job.job, recovery.reason, recovery.seconds)

    def _send(self, node: str, body: Any) -> None:
        """What is said again until it is answered, or with the next one, is pushed but not stored. A generation
        makes older ones of its job pointless, unless it begins at a boundary that these have to reach first."""
        kept = self._bodies.get(id(body))  # the object is kept too: its id is its own only while it lives
        encoded = kept[1] if kept else Body(_text(body), _reference(body))
        self._bodies[id(body)] = (body, encoded)
        durable, topic, replaces = True, "", True
        if isinstance(body, VersionNotice):
            durable, topic = False, f"versions/{body.job}"
        elif isinstance(body, SpillVersion):
            durable, topic = False, f"spill/{body.job}"
        elif isinstance(body, ProtectVersion):
            durable, topic = False, f"parity/{body.job}"
        elif isinstance(body, NewGeneration):
            topic, replaces = generation_topic(body.spec.job), body.spec.after_step is None
        seq = self._outbox.number(node)
        final = isinstance(body, StopJob)
        self.outgoing.append(
            Outgoing(node=node, seq=seq, body=encoded, durable=durable, topic=topic, replaces=replaces, final=final)
        )


def _reference(body: Any) -> str:
    """What the outbox table says instead of the body; empty where it is the body itself."""
    return generation_reference(body.spec.job, body.spec.number) if isinstance(body, NewGeneration) else ""


def _generation_row(effect: fx.PutGeneration) -> GenerationRow:
    spec = effect.spec
    return GenerationRow(
        job=spec.job,
        number=spec.number,
        reason=spec.reason,
        trace=spec.trace,
        issued_at=effect.opened_at,
        doc=_text(spec),
    )


def _version_row(record: VersionRecord) -> VersionRow:
    return VersionRow(
        job=record.job,
        generation=record.version.generation,
        step=record.version.step,
        committed_at=record.committed_at,
        verified_at=record.verified_at,
        bytes=record.bytes,
        ranks=record.ranks,
    )


def _verdict_row(verdict: Verdict) -> VerdictRow:
    return VerdictRow(
        id=verdict.id,
        node=verdict.node,
        decision=verdict.decision,
        at=verdict.at,
        trace=verdict.trace,
        doc=_text(verdict),
    )


def _remedy_row(remedy: fx.Remedy) -> RemedyRow:
    return RemedyRow(
        id=remedy.id,
        node=remedy.node,
        kind=remedy.kind,
        state=RemedyState.WANTED,
        requested_at=remedy.at,
        doc=_text(remedy),
    )


def _audit_row(number: int, entry: fx.AuditEntry) -> AuditRow:
    return AuditRow(
        id=number,
        at=entry.at,
        kind=entry.kind,
        sentence=entry.sentence,
        node=entry.node or "",
        job=entry.job or "",
        generation=entry.generation,
        trace=entry.trace,
        detail=_text(entry.data),
    )

"""Check that acknowledged reports are durable and handled once, and that no directive is lost or sent unwritten."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from everstep.wire.v1.directives import (
    AnyDirective,
    KillRank,
    NewGeneration,
    PauseNvml,
    RunProbe,
    StopJob,
    VersionNotice,
)
from everstep_controller.core.events import AgentRegistered, Event, HeartbeatChanged, ReportArrived
from everstep_controller.core.jobs.generations import NUMBERS_PER_EPOCH
from everstep_controller.core.records import NodeIdentity
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.cluster.observations import (
    BatchWritten,
    DirectiveDelivered,
    EventHandled,
    LeaderStarted,
    ReportsAcknowledged,
    SealsDropped,
)


class Durability(Checker):
    """Track reports and directives by their numbers.

    While the database is unavailable, a leader sends unwritten generations under numbers that no other controller uses.
    """

    name = "durability"

    def __init__(self) -> None:
        self._acknowledged: dict[tuple[str, int], int] = {}
        self._incarnations: dict[str, int] = {}
        self._epoch = 0
        self._newest_incarnations: dict[str, int] = {}
        self._newest_reports: dict[tuple[str, int], int] = {}
        self._dropped_seals: dict[tuple[str, int], set[int]] = defaultdict(set)
        self._recorded_incarnations: dict[str, int] = {}
        self._delivered_seqs: dict[str, set[int]] = defaultdict(set)
        self._stored_directives: dict[str, dict[int, tuple[str, int]]] = defaultdict(dict)
        self._delivered_subjects: dict[str, set[str]] = defaultdict(set)
        self._undelivered: dict[tuple[str, str], int] = {}
        self._generations: set[tuple[str, int]] = set()
        self._restarted_jobs: set[str] = set()

    def handlers(self) -> Handlers:
        return {
            BatchWritten: self._on_write,
            ReportsAcknowledged: self._on_acknowledgement,
            SealsDropped: self._on_dropped_seals,
            LeaderStarted: self._on_leader,
            EventHandled: self._on_event,
            DirectiveDelivered: self._on_delivery,
        }

    def remaining_problem(self) -> str:
        """Return a directive whose row was deleted although the agent's incarnation did not receive it."""
        for (node, name), seq in self._undelivered.items():
            if not self._is_void(name):
                return f"directive {seq} for {node} ({name}) is deleted, and {node} did not receive it"
        return ""

    def _is_void(self, name: str) -> bool:
        """Return whether a directive is void: its generation is over, or its job was started again after the stop."""
        kind, job, number = name.split("/")
        if kind == "stop":
            return job in self._restarted_jobs
        newer = any(name == job and newest > int(number) for name, newest in self._generations)
        return kind in ("generation", "kill") and newer

    def _on_acknowledgement(self, acknowledgement: ReportsAcknowledged) -> None:
        node, through = acknowledgement.node, acknowledgement.through
        written = self._acknowledged.get((node, acknowledgement.incarnation), 0)
        if through > written:
            raise Violation(self.name, f"reports of {node} are acknowledged through {through}, written are {written}")

    def _on_dropped_seals(self, dropped: SealsDropped) -> None:
        self._dropped_seals[dropped.node, dropped.incarnation] |= dropped.numbers

    def _on_leader(self, start: LeaderStarted) -> None:
        self._epoch, self._newest_incarnations, self._newest_reports = start.epoch, {}, {}
        for (node, incarnation), through in self._acknowledged.items():
            is_newest = incarnation == self._incarnations.get(node)
            if is_newest and start.acknowledged_reports.get((node, incarnation), 0) < through:
                raise Violation(self.name, f"{start.controller} does not know reports of {node} through {through}")

    def _on_event(self, handled: EventHandled) -> None:
        event = handled.event
        if handled.epoch == self._epoch:
            self._check_incarnation(event)
        if isinstance(event, ReportArrived):
            written = self._acknowledged.get((event.node, event.incarnation), 0)
            if event.number <= written:
                raise Violation(self.name, f"report {event.number} of {event.node} is handled twice")
            if handled.epoch == self._epoch:
                self._check_gap(event, written)
        elif isinstance(event, AgentRegistered):
            node, incarnation = event.register.node, event.register.incarnation
            if incarnation != self._incarnations.get(node):
                self._undelivered = {key: seq for key, seq in self._undelivered.items() if key[0] != node}
            self._incarnations[node] = incarnation

    def _check_gap(self, event: ReportArrived, written: int) -> None:
        """Check that an incarnation's reports have no gaps, since an agent drops only acknowledged ones and seals."""
        key = (event.node, event.incarnation)
        before = max(written, self._newest_reports.get(key, 0))
        missing = set(range(before + 1, event.number)) - self._dropped_seals[key]
        if before and missing:
            raise Violation(
                self.name, f"of {event.node} report {event.number} follows {before}: reports between them are lost"
            )
        self._newest_reports[key] = event.number

    def _check_incarnation(self, event: Event) -> None:
        """Check that reports of an earlier incarnation of a node are refused."""
        if isinstance(event, AgentRegistered):
            node, incarnation = event.register.node, event.register.incarnation
        elif isinstance(event, ReportArrived | HeartbeatChanged):
            node, incarnation = event.node, event.incarnation
        else:
            return
        if incarnation < self._newest_incarnations.get(node, 0):
            raise Violation(self.name, f"a {type(event).__name__} of an earlier incarnation of {node} is handled")
        self._newest_incarnations[node] = incarnation

    def _on_write(self, write: BatchWritten) -> None:
        for node in write.batch.forgotten_nodes:
            self._acknowledged = {key: through for key, through in self._acknowledged.items() if key[0] != node}
            self._stored_directives.pop(node, None)
        for (node, incarnation), through in write.batch.acknowledged_reports.items():
            self._acknowledged[node, incarnation] = max(through, self._acknowledged.get((node, incarnation), 0))
        for row in write.batch.generations:
            self._generations.add((row.job, row.number))
        self._restarted_jobs.update(row.job for row in write.batch.event_log if "once more" in row.sentence)
        for node, doc in write.batch.nodes.items():
            self._recorded_incarnations[node] = msgspec.json.decode(doc, type=_NodeDocument).identity.incarnation
        for directive in write.batch.outbox:
            incarnation = self._recorded_incarnations.get(directive.node, 0)
            self._stored_directives[directive.node][directive.seq] = directive.body, incarnation
        for node, through in write.batch.acknowledged.items():
            self._note_deletion(node, through)

    def _note_deletion(self, node: str, through: int) -> None:
        """Note the deletion of directives' rows.

        A row may be deleted if its node received the directive, under any number, or if another incarnation of its
        agent has begun. A new leader may not know the newest incarnation yet.
        """
        for seq in [seq for seq in self._stored_directives[node] if seq <= through]:
            body, incarnation = self._stored_directives[node].pop(seq)
            subject, is_current = _stored_subject(body), incarnation == self._recorded_incarnations.get(node, 0)
            is_delivered = seq in self._delivered_seqs[node] or subject in self._delivered_subjects[node]
            if is_current and not is_delivered:
                self._undelivered[node, subject] = seq

    def _on_delivery(self, delivery: DirectiveDelivered) -> None:
        self._delivered_seqs[delivery.node].add(delivery.seq)
        body = delivery.body
        self._delivered_subjects[delivery.node].add(_subject(body))
        self._undelivered.pop((delivery.node, _subject(body)), None)
        if isinstance(body, VersionNotice):
            return
        written = not isinstance(body, NewGeneration) or (body.spec.job, body.spec.number) in self._generations
        if not written and body.spec.number < NUMBERS_PER_EPOCH:
            raise Violation(self.name, f"{delivery.node} receives generation {body.spec.number}, which is not written")


class _NodeDocument(msgspec.Struct):
    """The part of a node's record that the checker reads."""

    identity: NodeIdentity


def _stored_subject(stored: str) -> str:
    """Return the subject of a directive from its stored body."""
    if stored.startswith("@"):
        return f"generation/{stored[1:]}"
    body: AnyDirective = msgspec.json.decode(stored, type=AnyDirective)
    return _subject(body)


def _subject(body: AnyDirective) -> str:
    """Return the subject of a directive, as kind, job or probe, and generation."""
    match body:
        case NewGeneration(spec=spec):
            return f"generation/{spec.job}/{spec.number}"
        case KillRank():
            return f"kill/{body.job}/{body.generation}"
        case StopJob():
            return f"stop/{body.job}/0"
        case RunProbe():
            return f"probe/{body.probe}/0"
        case PauseNvml():
            return f"release/{body.seconds}/0"
        case _:
            return "versions//0"

"""Simulate the database that all controllers share: atomic batches, a fencing epoch, a lease, and outages."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from everstep_controller.store.leases import CONTACTS_VALID_S, RESIGNATION_SERIES_S, SUCCESSOR_WAIT_S
from everstep_controller.store.rows import (
    Batch,
    EventLogRow,
    GenerationRow,
    LoadedState,
    OutboxRow,
    RemediationRow,
    StandbyReport,
    VersionRow,
)
from everstep_controller.store.table_access import OPEN_STATES
from tests.sim.cluster.timeline import Timeline

LEASE_S = 2.0
"""Seconds for which a lease holds without a renewal."""
DEFAULT_LATENCY_S = 0.002
"""Mean seconds that a write takes without a fault."""


class WriteFailed(Exception):
    """A write failed, or its answer was lost. The writer does not know which."""


class Fenced(Exception):
    """The writer's epoch is over, because another controller leads."""


class DuplicateRow(AssertionError):
    """A row that must be new exists already: a second roster under one number, or a verdict twice."""


class Database:
    """The tables, as dictionaries.

    Attributes:
        epoch: The epoch of the newest leader. Writes of earlier ones are refused.
        is_unavailable: Whether no call is answered.
        latency_s: Mean seconds that a write takes.
        next_write_fault: ``before`` if the next write fails before it is applied, ``after`` if its answer is lost.

    ``on_applied`` gets every batch that became durable, with its writer's epoch.
    """

    def __init__(self, timeline: Timeline, rng: random.Random, on_applied: Callable[[int, Batch], None]) -> None:
        self.epoch = 0
        self.is_unavailable = False
        self.latency_s = DEFAULT_LATENCY_S
        self.next_write_fault: str = ""
        self._timeline = timeline
        self._rng = rng
        self._on_applied = on_applied
        self._holder = ""
        self._expires_at = 0.0
        self._successor = ""
        self._resigned_at = -RESIGNATION_SERIES_S
        self._resignations = 0
        self._standby_contacts: dict[str, tuple[int, float]] = {}
        self._fleet: str | None = None
        self._nodes: dict[str, str] = {}
        self._active_findings: dict[tuple[str, str], str] = {}
        self._jobs: dict[str, str] = {}
        self.generations: dict[tuple[str, int], GenerationRow] = {}
        self._versions: dict[tuple[str, int, int], VersionRow] = {}
        self._verdicts: set[str] = set()
        self._remediations: dict[str, RemediationRow] = {}
        self._outbox: dict[str, dict[int, str]] = {}
        self.acknowledged_reports: dict[tuple[str, int], int] = {}
        self._batch = 0
        self._newest_event = 0
        self._newest_at = 0.0

    def acquire_lease(self, holder: str) -> bool:
        """Take or renew the lease. Return False if another controller holds it or the database is unavailable."""
        now = self._timeline.now
        if self.is_unavailable or (self._holder != holder and now < self._expires_at):
            return False
        if self._successor not in ("", holder) and now < self._resigned_at + SUCCESSOR_WAIT_S:
            return False
        self._holder, self._expires_at, self._successor = holder, now + LEASE_S, ""
        return True

    def store_standby_contacts(self, controller: str, nodes: int) -> None:
        """Store how many nodes contact a standby controller persistently."""
        if not self.is_unavailable:
            self._standby_contacts[controller] = nodes, self._timeline.now

    def standby_report(self) -> StandbyReport:
        """Return the standbys' contacts, which the leader reads when it renews its lease."""
        now = self._timeline.now
        contacts = {
            name: nodes
            for name, (nodes, at) in self._standby_contacts.items()
            if name != self._holder and at > now - CONTACTS_VALID_S
        }
        return StandbyReport(
            contacts=contacts, resignations=self._resignations if now < self._resigned_at + RESIGNATION_SERIES_S else 0
        )

    def resign(self, holder: str, successor: str) -> None:
        """Reserve the lease for the successor if ``holder`` still has it."""
        if self._holder == holder and not self.is_unavailable:
            self._resignations = self.standby_report().resignations + 1
            self._holder, self._successor, self._resigned_at, self._expires_at = "", successor, self._timeline.now, 0.0

    def take_over(self) -> LoadedState:
        """Fence every earlier controller off, and return the stored state."""
        self.epoch += 1
        return LoadedState(
            epoch=self.epoch,
            batch=self._batch,
            fleet=self._fleet,
            nodes=dict(self._nodes),
            active_findings={key: doc for key, doc in sorted(self._active_findings.items()) if doc},
            jobs=dict(self._jobs),
            outbox=[
                OutboxRow(node=node, seq=seq, body=self._directive_body(rows[seq]))
                for node, rows in sorted(self._outbox.items())
                for seq in sorted(rows)
            ],
            acknowledged_reports=dict(self.acknowledged_reports),
            poisoned=frozenset(),
            newest_event=self._newest_event,
            newest_at=self._newest_at,
            versions=[self._versions[key] for key in sorted(self._versions)],
            remediations=sorted(
                (row for row in self._remediations.values() if row.state in OPEN_STATES), key=lambda row: row.id
            ),
        )

    def _directive_body(self, body: str) -> str:
        """Return a directive's body. The body of a generation is in the table of generations."""
        if not body.startswith("@"):
            return body
        job, _, number = body[1:].partition("/")
        return f'{{"type":"NewGeneration","spec":{self.generations[job, int(number)].doc}}}'

    def commit(self, epoch: int, batches: Sequence[Batch], on_result: Callable[[Exception | None], None]) -> None:
        """Write the batches whose numbers are new. ``on_result`` gets None once all are durable, or the error."""
        fault, self.next_write_fault = self.next_write_fault, ""
        delay_s = self.latency_s * (0.5 + self._rng.random())

        def write() -> None:
            if self.is_unavailable or fault == "before":
                on_result(WriteFailed("the database does not answer"))
            elif epoch != self.epoch:
                on_result(Fenced(f"epoch {epoch} is over: {self.epoch} began"))
            else:
                for batch in batches:
                    self._write_batch(epoch, batch)
                on_result(WriteFailed("the answer was lost") if fault == "after" else None)

        self._timeline.after(delay_s, write)

    def _write_batch(self, epoch: int, batch: Batch) -> None:
        if batch.number > self._batch:
            self._batch = batch.number
            self._apply(batch)
            self._on_applied(epoch, batch)

    def _apply(self, batch: Batch) -> None:
        if batch.fleet is not None:
            self._fleet = batch.fleet
        self._delete_forgotten(batch)
        self._nodes |= batch.nodes
        self._active_findings |= batch.active_findings
        self._jobs |= batch.jobs
        for row in batch.generations:
            if (row.job, row.number) in self.generations:
                raise DuplicateRow(f"{row.job} has a generation {row.number} already")
            self.generations[row.job, row.number] = row
        for key, version in batch.versions.items():
            known = self._versions.get(key)
            self._versions[key] = version if known is None else version.after(known)
        for verdict in batch.verdicts:
            if verdict.id in self._verdicts:
                raise DuplicateRow(f"verdict {verdict.id} was given already")
            self._verdicts.add(verdict.id)
        for directive in batch.outbox:
            self._outbox.setdefault(directive.node, {})[directive.seq] = directive.body
        self._remediations |= batch.remediations
        self._note_events(batch.event_log)
        for node, through in batch.acknowledged.items():
            rows = self._outbox.get(node, {})
            for seq in [seq for seq in rows if seq <= through]:
                del rows[seq]
        for (node, incarnation), through in batch.acknowledged_reports.items():
            self.acknowledged_reports = {
                k: v for k, v in self.acknowledged_reports.items() if k[0] != node or k[1] >= incarnation
            }
            self.acknowledged_reports[node, incarnation] = through

    def _delete_forgotten(self, batch: Batch) -> None:
        for node in batch.forgotten_nodes:
            self._nodes.pop(node, None)
            self._outbox.pop(node, None)
            self._active_findings = {key: doc for key, doc in self._active_findings.items() if key[0] != node}
            self._verdicts = {name for name in self._verdicts if name.rpartition("-")[0] != node}
            self.acknowledged_reports = {
                key: through for key, through in self.acknowledged_reports.items() if key[0] != node
            }
        for job in batch.forgotten_jobs:
            self._jobs.pop(job, None)
            self.generations = {key: row for key, row in self.generations.items() if key[0] != job}
            self._versions = {key: row for key, row in self._versions.items() if key[0] != job}

    def _note_events(self, rows: list[EventLogRow]) -> None:
        for row in rows:
            self._newest_event = max(self._newest_event, row.id)
            self._newest_at = max(self._newest_at, row.at)

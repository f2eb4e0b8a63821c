"""The database that all controllers share: batches whole or not at all, an epoch that fences, a lease, and bad days."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from everstep_controller.leadership.lease import StandbyReport
from everstep_controller.store.leases import CONTACTS_VALID_S, RESIGNATION_SERIES_S, SUCCESSOR_WAIT_S
from everstep_controller.store.rows import (
    AuditRow,
    Batch,
    GenerationRow,
    LoadedState,
    OutboxRow,
    RemediationRow,
    VersionRow,
)
from everstep_controller.store.table_access import OPEN_STATES

from tests.sim.timeline import Timeline

LEASE_S = 2.0
"""How long a lease holds without being renewed."""


class Failed(Exception):
    """A write failed. ``written`` is what really became of it; whoever wrote does not learn it."""


class Fenced(Exception):
    """Another controller has taken the database over."""


class NotUnique(AssertionError):
    """A row that must be new was there: two rosters under one number, a verdict twice."""


class Database:
    """Tables as dictionaries. ``on_applied`` hears of every batch that became durable."""

    def __init__(self, timeline: Timeline, rng: random.Random, on_applied: Callable[[int, Batch], None]) -> None:
        self.epoch = 0
        self.away = False
        self.latency_s = 0.002
        self.fail_next: str = ""
        self._timeline = timeline
        self._rng = rng
        self._on_applied = on_applied
        self._holder = ""
        self._expires_at = 0.0
        self._heir = ""
        self._resigned_at = -RESIGNATION_SERIES_S
        self._resignations = 0
        self._knocks: dict[str, tuple[int, float]] = {}
        self._fleet: str | None = None
        self._nodes: dict[str, str] = {}
        self._standing: dict[tuple[str, str], str] = {}
        self._jobs: dict[str, str] = {}
        self.generations: dict[tuple[str, int], GenerationRow] = {}
        self._versions: dict[tuple[str, int, int], VersionRow] = {}
        self._verdicts: set[str] = set()
        self._remedies: dict[str, RemediationRow] = {}
        self._outbox: dict[str, dict[int, str]] = {}
        self.marks: dict[tuple[str, int], int] = {}
        self._batch = 0
        self._newest_audit = 0
        self._newest_at = 0.0

    # --- leadership --------------------------------------------------------------------------------------------------

    def lease(self, holder: str) -> bool:
        """Takes or renews the lease; False while another holds it, or the database is away."""
        now = self._timeline.now
        if self.away or (self._holder != holder and now < self._expires_at):
            return False
        if self._heir not in ("", holder) and now < self._resigned_at + SUCCESSOR_WAIT_S:
            return False
        self._holder, self._expires_at, self._heir = holder, now + LEASE_S, ""
        return True

    def tell(self, controller: str, nodes: int) -> None:
        """So many nodes insist on a controller that stands by."""
        if not self.away:
            self._knocks[controller] = nodes, self._timeline.now

    def told(self) -> StandbyReport:
        """What its holder finds beside the lease."""
        now = self._timeline.now
        fresh = {
            name: nodes
            for name, (nodes, at) in self._knocks.items()
            if name != self._holder and at > now - CONTACTS_VALID_S
        }
        return StandbyReport(
            contacts=fresh, resignations=self._resignations if now < self._resigned_at + RESIGNATION_SERIES_S else 0
        )

    def resign(self, holder: str, heir: str) -> None:
        """The lease is the heir's, if it still was this holder's."""
        if self._holder == holder and not self.away:
            self._resignations = self.told().resignations + 1
            self._holder, self._heir, self._resigned_at, self._expires_at = "", heir, self._timeline.now, 0.0

    def take_over(self) -> LoadedState:
        """Fences every earlier controller off and reads what there is."""
        self.epoch += 1
        return LoadedState(
            epoch=self.epoch,
            batch=self._batch,
            fleet=self._fleet,
            nodes=dict(self._nodes),
            active_findings={place: doc for place, doc in sorted(self._standing.items()) if doc},
            jobs=dict(self._jobs),
            outbox=[
                OutboxRow(node=node, seq=seq, body=self._text(rows[seq]))
                for node, rows in sorted(self._outbox.items())
                for seq in sorted(rows)
            ],
            acknowledged_reports=dict(self.marks),
            poisoned=frozenset(),
            newest_audit=self._newest_audit,
            newest_at=self._newest_at,
            versions=[self._versions[key] for key in sorted(self._versions)],
            remediations=sorted(
                (row for row in self._remedies.values() if row.state in OPEN_STATES), key=lambda row: row.id
            ),
        )

    def _text(self, body: str) -> str:
        """A directive's body; a generation's stands in its own table."""
        if not body.startswith("@"):
            return body
        job, _, number = body[1:].partition("/")
        return f'{{"type":"NewGeneration","spec":{self.generations[job, int(number)].doc}}}'

    # --- writing -----------------------------------------------------------------------------------------------------

    def commit(self, epoch: int, batches: Sequence[Batch], done: Callable[[Exception | None], None]) -> None:
        """Writes those of the numbered batches that were not applied before; ``done`` hears None once all are durable,
        or what failed."""
        fault, self.fail_next = self.fail_next, ""
        delay_s = self.latency_s * (0.5 + self._rng.random())

        def write() -> None:
            if self.away or fault == "before":
                done(Failed("the database does not answer"))
            elif epoch != self.epoch:
                done(Fenced(f"epoch {epoch} is over: {self.epoch} began"))
            else:
                for batch in batches:
                    self._take(epoch, batch)
                done(Failed("the answer was lost") if fault == "after" else None)

        self._timeline.after(delay_s, write)

    def _take(self, epoch: int, batch: Batch) -> None:
        if batch.number > self._batch:
            self._batch = batch.number
            self._apply(batch)
            self._on_applied(epoch, batch)

    def _apply(self, batch: Batch) -> None:
        if batch.fleet is not None:
            self._fleet = batch.fleet
        self._forget(batch)
        self._nodes |= batch.nodes
        self._standing |= batch.active_findings
        self._jobs |= batch.jobs
        for row in batch.generations:
            if (row.job, row.number) in self.generations:
                raise NotUnique(f"{row.job} has a generation {row.number} already")
            self.generations[row.job, row.number] = row
        for key, version in batch.versions.items():
            known = self._versions.get(key)
            self._versions[key] = version if known is None else version.after(known)
        for verdict in batch.verdicts:
            if verdict.id in self._verdicts:
                raise NotUnique(f"verdict {verdict.id} was given already")
            self._verdicts.add(verdict.id)
        for out in batch.outbox:
            self._outbox.setdefault(out.node, {})[out.seq] = out.body
        self._remedies |= batch.remediations
        self._audit(batch.audit)
        for node, through in batch.acknowledged.items():
            rows = self._outbox.get(node, {})
            for seq in [seq for seq in rows if seq <= through]:
                del rows[seq]
        for (node, life), through in batch.acknowledged_reports.items():
            self.marks = {k: v for k, v in self.marks.items() if k[0] != node or k[1] >= life}
            self.marks[node, life] = through

    def _forget(self, batch: Batch) -> None:
        for node in batch.forgotten_nodes:
            self._nodes.pop(node, None)
            self._outbox.pop(node, None)
            self._standing = {place: doc for place, doc in self._standing.items() if place[0] != node}
            self._verdicts = {name for name in self._verdicts if name.rpartition("-")[0] != node}
            self.marks = {place: through for place, through in self.marks.items() if place[0] != node}
        for job in batch.forgotten_jobs:
            self._jobs.pop(job, None)
            self.generations = {place: row for place, row in self.generations.items() if place[0] != job}
            self._versions = {place: row for place, row in self._versions.items() if place[0] != job}

    def _audit(self, rows: list[AuditRow]) -> None:
        for row in rows:
            self._newest_audit = max(self._newest_audit, row.id)
            self._newest_at = max(self._newest_at, row.at)

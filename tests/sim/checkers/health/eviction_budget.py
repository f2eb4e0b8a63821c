"""Check that evictions stay within the budgets of fleet, rack and job in any window.

No automatic eviction takes a job below its minimum or happens without a database. No quarantine replaces an eviction.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import NamedTuple

import msgspec

from everstep.vocabulary import Decision, JobState, Verdict
from everstep.wire.v1.training import GenerationSpec
from everstep_controller.core.effects import (
    AppendToEventLog,
    DeleteJob,
    DeleteNode,
    PutGeneration,
    PutJob,
    PutNode,
    PutVerdict,
)
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorCommand
from everstep_controller.core.records import JobRecord
from everstep_controller.store.rows import EventLogRow, VerdictRow
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.checkers.stored_records import StoredRecords
from tests.sim.cluster.observations import BatchWritten, LeaderDecided, LeaderStarted

JOB_ENDS = ("job.paused", "job.failed", "job.stopped", "job.finished")
"""Kinds of log entries after which a job computes on no node."""
BREAKER_TRIPPED = "fleet.breaker_tripped"
"""Kind of the log entry after which the breaker forbids evictions."""
BREAKER_RESET = "fleet.breaker_reset"
"""Kind of the log entry after which the breaker allows evictions again."""
RESET_BY_OPERATOR = "operator.reset_breaker"
"""Kind of the log entry after which earlier evictions do not count any more."""


class _JobSeats(msgspec.Struct):
    """The part of a job's record that this checker compares."""

    state: JobState = JobState.FORMING
    generation: GenerationSpec | None = None
    outgoing_generation: GenerationSpec | None = None

    @staticmethod
    def of(record: JobRecord) -> _JobSeats:
        return _JobSeats(record.status.state, record.generation, record.outgoing_generation)


class _Scope(NamedTuple):
    """A budget that an eviction uses. ``name``: ``fleet``, ``rack r`` or ``job j``. ``node_count``: its nodes."""

    name: str
    node_count: int


class _Eviction(NamedTuple):
    """An automatic eviction that was written, with the budgets that it used."""

    node: str
    at: float
    scopes: tuple[_Scope, ...]


class EvictionBudgets(Checker):
    """Count automatic evictions as they are written, at the time of the controller that decided them.

    The sizes of racks and jobs come from the decisions before.
    """

    name = "eviction_budget"

    def __init__(self) -> None:
        self._is_database_unavailable = False
        self._commanded: set[str] = set()
        self._nodes: set[str] = set()
        self._records = StoredRecords()
        self._reachable: set[str] = set()
        self._racks: dict[str, str] = {}
        self._jobs: dict[str, _JobSeats] = {}
        self._scopes: dict[str, tuple[_Scope, ...]] = {}
        self._evictions: list[_Eviction] = []
        self._latched = False

    def handlers(self) -> Handlers:
        return {
            LeaderDecided: self._on_decision,
            BatchWritten: self._on_write,
            LeaderStarted: self._on_leader,
        }

    def _on_leader(self, _start: LeaderStarted) -> None:
        self._is_database_unavailable = False
        nodes = self._records.nodes()
        self._reachable = {name for name, record in nodes.items() if record.liveness.reachable}
        self._racks = {name: record.identity.domain.rack for name, record in nodes.items()}
        self._jobs = {name: _JobSeats.of(record) for name, record in self._records.jobs().items()}

    def _on_decision(self, decision: LeaderDecided) -> None:
        if isinstance(decision.event, DatabaseAvailabilityChanged):
            self._is_database_unavailable = decision.event.is_unavailable
        verdicts = [effect.verdict for effect in decision.effects if isinstance(effect, PutVerdict)]
        evicted = [verdict for verdict in verdicts if verdict.decision is Decision.EVICT]
        for verdict in verdicts:
            if verdict.decision is Decision.QUARANTINE:
                self._check_quarantine(decision, verdict)
        if isinstance(decision.event, OperatorCommand):
            self._commanded |= {verdict.id for verdict in evicted}
        elif evicted:
            names = sorted(verdict.node for verdict in evicted)
            if self._is_database_unavailable:
                raise Violation(
                    self.name, f"{names} are evicted while the database is unavailable: the eviction could be lost"
                )
            self._check_no_pause(decision, names)
        before = {
            verdict.id: self._scopes_of(verdict.node, self._jobs_that_left(decision, verdict)) for verdict in evicted
        }
        self._update(decision)
        for verdict in evicted:  # if nodes join or leave in the event, the larger size counts
            after = {scope.name: scope.node_count for scope in self._scopes_of(verdict.node)}
            self._scopes[verdict.id] = tuple(
                _Scope(name, max(node_count, after.get(name, 0))) for name, node_count in before[verdict.id]
            )

    def _check_quarantine(self, decision: LeaderDecided, verdict: Verdict) -> None:
        """Check that no job computes on a node in quarantine, since a quarantine uses no budget."""
        for name in self._jobs_on(verdict.node, self._jobs_that_left(decision, verdict)):
            problem = f"{verdict.node} is quarantined out of its seat in job {name}, and no budget was asked"
            raise Violation(self.name, f"{problem}: {verdict.sentence}")

    def _check_no_pause(self, decision: LeaderDecided, evicted: list[str]) -> None:
        """Check that an automatic eviction pauses no job."""
        is_evicted = False
        for effect in decision.effects:
            is_evicted = is_evicted or (isinstance(effect, PutVerdict) and effect.verdict.decision is Decision.EVICT)
            if is_evicted and isinstance(effect, AppendToEventLog) and effect.entry.kind == "job.paused":
                raise Violation(self.name, f"the eviction of {evicted} pauses: {effect.entry.sentence}")

    def _update(self, decision: LeaderDecided) -> None:
        for effect in decision.effects:
            if isinstance(effect, PutNode):
                self._racks[effect.node] = effect.doc.identity.domain.rack
                (self._reachable.add if effect.doc.liveness.reachable else self._reachable.discard)(effect.node)
            elif isinstance(effect, DeleteNode):
                self._reachable.discard(effect.node)
            elif isinstance(effect, DeleteJob):
                self._jobs.pop(effect.job, None)
            elif isinstance(effect, PutJob):
                self._jobs[effect.job] = _JobSeats.of(effect.doc)

    def _scopes_of(self, node: str, left_jobs: Collection[str] = ()) -> tuple[_Scope, ...]:
        """Return the budgets of the node's rack and of the jobs that compute on the node.

        A rack counts its reachable nodes, a job its seats. A node without a rack has no rack budget.

        Args:
            node: The node's name.
            left_jobs: Jobs that have left the node already.
        """
        rack = self._racks[node]
        members = [name for name in self._reachable if self._racks[name] == rack]
        racks = [_Scope(f"rack {rack}", len(members))] if rack else []
        jobs = [
            _Scope(f"job {name}", len(job.generation.seats) if job.generation is not None else 0)
            for name, job in self._jobs_on(node, left_jobs).items()
        ]
        return (*racks, *jobs)

    def _jobs_on(self, node: str, left_jobs: Collection[str] = ()) -> dict[str, _JobSeats]:
        """Return the jobs that compute on the node, except those in ``left_jobs``."""
        return {
            name: job
            for name, job in self._jobs.items()
            if job.state is JobState.RUNNING
            and name not in left_jobs
            and any(spec is not None and node in spec.seats for spec in (job.generation, job.outgoing_generation))
        }

    def _jobs_that_left(self, decision: LeaderDecided, verdict: Verdict) -> set[str]:
        """Return the jobs that left the node earlier in the event that evicted it.

        Such a job was paused, ended, began at once a generation without the node, or passed the boundary at which it
        left the node.
        """
        regrouped = {effect.spec.job for effect in decision.effects if isinstance(effect, PutGeneration)}
        found: set[str] = set()
        for effect in decision.effects:
            if isinstance(effect, PutJob) and effect.job not in regrouped and effect.doc.outgoing_generation is None:
                before, spec = self._jobs.get(effect.job), effect.doc.generation
                has_crossed = before is not None and before.outgoing_generation is not None
                if has_crossed and spec and verdict.node not in spec.seats:
                    found.add(effect.job)
        for effect in decision.effects:
            if isinstance(effect, PutVerdict) and effect.verdict is verdict:
                break
            if isinstance(effect, AppendToEventLog) and effect.entry.kind in JOB_ENDS and effect.entry.job is not None:
                found.add(effect.entry.job)
            elif isinstance(effect, PutGeneration) and effect.spec.after_step is None:
                (found.discard if verdict.node in effect.spec.seats else found.add)(effect.spec.job)
        return found

    def _on_write(self, write: BatchWritten) -> None:
        self._records.note(write.batch)
        self._nodes = (self._nodes - set(write.batch.forgotten_nodes)) | write.batch.nodes.keys()
        rolled_back = {row.node: row.at for row in write.batch.event_log if row.kind == "node.eviction_rolled_back"}
        evicted_again = {row.node for row in write.batch.verdicts if row.decision == Decision.EVICT}
        self._roll_back({node: at for node, at in rolled_back.items() if node not in evicted_again})
        rows: list[VerdictRow | EventLogRow] = [*write.batch.verdicts, *write.batch.event_log]
        rows.sort(key=lambda row: row.at)
        for _, instant in groupby(rows, key=lambda row: row.at):
            self._count_instant(list(instant), rolled_back)

    def _count_instant(self, rows: list[VerdictRow | EventLogRow], rolled_back: dict[str, float]) -> None:
        """Count the rows of one time. The order of verdicts and log entries of one time is not stored."""
        breaker_kinds = (BREAKER_TRIPPED, BREAKER_RESET, RESET_BY_OPERATOR)
        kinds = [row.kind for row in rows if isinstance(row, EventLogRow) and row.kind in breaker_kinds]
        self._latched = self._latched and BREAKER_RESET not in kinds
        for row in rows:
            if not isinstance(row, VerdictRow) or row.decision != Decision.EVICT or row.id in self._commanded:
                continue
            if row.at > rolled_back.get(row.node, 0.0):  # else the same batch has rolled the eviction back
                self._count_eviction(row.node, row.at, (_Scope("fleet", len(self._nodes)), *self._scopes[row.id]))
        if RESET_BY_OPERATOR in kinds:
            self._evictions = []
        if kinds:
            self._latched = kinds[-1] == BREAKER_TRIPPED

    def _roll_back(self, rolled_back: dict[str | None, float]) -> None:
        """Remove each node's last eviction, which an outbreak has rolled back."""
        for node, at in rolled_back.items():
            earlier = [eviction for eviction in self._evictions if eviction.node == node and eviction.at <= at]
            newest = earlier[-1] if earlier else None
            self._evictions = [eviction for eviction in self._evictions if eviction is not newest]

    def _count_eviction(self, node: str, at: float, scopes: tuple[_Scope, ...]) -> None:
        policy = self.world.plan.policy
        if self._latched:
            raise Violation(self.name, f"{node} is evicted while the breaker is latched")
        recent = [eviction for eviction in self._evictions if eviction.at > at - policy.budget.window_s]
        self._evictions = [*recent, _Eviction(node, at, scopes)]
        for name, node_count in scopes:
            earlier = sum(1 for eviction in recent if any(scope.name == name for scope in eviction.scopes))
            allowed = self._allowed(name, node_count + earlier if name.startswith("job ") else node_count)
            if earlier + 1 > allowed:
                raise Violation(
                    self.name,
                    f"{earlier + 1} evictions of the {name} within {policy.budget.window_s:g} s, {allowed} allowed",
                )

    def _allowed(self, name: str, node_count: int) -> int:
        """Return how many evictions a budget allows. A job's share includes the nodes that it lost to evictions."""
        policy = self.world.plan.policy
        count, share = {
            "fleet": (policy.budget.count, policy.budget.share),
            "rack": (policy.budget.rack_count, policy.budget.rack_share),
            "job": (policy.budget.job_count, policy.budget.job_share),
        }[name.partition(" ")[0]]
        return max(1, min(count, int(share * node_count)))

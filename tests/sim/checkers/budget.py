"""Evictions never exceed the budget of the fleet, of a rack or of a job in any window, never take a job below its
minimum without an operator, never happen where they could be forgotten, and by no other name."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import NamedTuple

import msgspec
from everstep_controller.core.effects import Audit, DeleteJob, DeleteNode, PutGeneration, PutJob, PutNode, PutVerdict
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorCommand
from everstep_controller.core.records import JobRecord
from everstep_controller.store.rows import AuditRow, VerdictRow

from everstep.vocabulary import Decision, JobState, Verdict
from everstep.wire.v1.training import GenerationSpec
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.checkers.stored import Stored
from tests.sim.facts import Violation

ENDS = ("job.paused", "job.failed", "job.stopped", "job.finished")
LATCHED, OVER, RESET = "fleet.breaker_tripped", "fleet.breaker_reset", "operator.reset_breaker"


class _JobDoc(msgspec.Struct):
    """The part of a job's record that this checker compares."""

    state: JobState = JobState.FORMING
    generation: GenerationSpec | None = None
    leaving: GenerationSpec | None = None

    @staticmethod
    def of(record: JobRecord) -> _JobDoc:
        return _JobDoc(record.status.state, record.generation, record.outgoing_generation)


class _Count(NamedTuple):
    """What one eviction counts against: ``scope`` (``fleet``, ``rack r``, ``job j``), of so many nodes."""

    scope: str
    of: int


class _Written(NamedTuple):
    node: str
    at: float
    counts: tuple[_Count, ...]


class Budget(Checker):
    """Counts automatic evictions as they are written, in the time of whoever decided them; what their shares are taken
    of is known from what was decided before."""

    name = "budget"

    def __init__(self) -> None:
        self._store_away = False
        self._ordered: set[str] = set()
        self._nodes: set[str] = set()
        self._stored = Stored()
        self._reachable: set[str] = set()
        self._racks: dict[str, str] = {}
        self._jobs: dict[str, _JobDoc] = {}
        self._counts: dict[str, tuple[_Count, ...]] = {}
        self._evictions: list[_Written] = []
        self._latched = False

    def watches(self) -> Watches:
        return {facts.Decided: self._handled, facts.Durable: self._durable, facts.TookOver: self._took_over}

    # --- what is decided ---------------------------------------------------------------------------------------------

    def _took_over(self, _fact: facts.TookOver) -> None:
        self._store_away = False
        nodes = self._stored.nodes()
        self._reachable = {name for name, record in nodes.items() if record.liveness.reachable}
        self._racks = {name: record.identity.domain.rack for name, record in nodes.items()}
        self._jobs = {name: _JobDoc.of(record) for name, record in self._stored.jobs().items()}

    def _handled(self, fact: facts.Decided) -> None:
        if isinstance(fact.event, DatabaseAvailabilityChanged):
            self._store_away = fact.event.is_unavailable
        verdicts = [effect.verdict for effect in fact.effects if isinstance(effect, PutVerdict)]
        evicted = [verdict for verdict in verdicts if verdict.decision is Decision.EVICT]
        for verdict in verdicts:
            if verdict.decision is Decision.QUARANTINE:
                self._unseated(fact, verdict)
        if isinstance(fact.event, OperatorCommand):
            self._ordered |= {verdict.id for verdict in evicted}
        elif evicted:
            names = sorted(verdict.node for verdict in evicted)
            if self._store_away:
                raise Violation(self.name, f"{names} are evicted while the database is away: it could be forgotten")
            self._spared(fact, names)
        before = {verdict.id: self._counted(verdict.node, self._without(fact, verdict)) for verdict in evicted}
        self._follow(fact)
        for verdict in evicted:  # nodes that come and go in the same event: whichever allows more
            after = {count.scope: count.of for count in self._counted(verdict.node)}
            self._counts[verdict.id] = tuple(
                _Count(scope, max(of, after.get(scope, 0))) for scope, of in before[verdict.id]
            )

    def _unseated(self, fact: facts.Decided, verdict: Verdict) -> None:
        """To quarantine a node costs no budget, since it does not serve: no job computes there."""
        for name in self._computing(verdict.node, self._without(fact, verdict)):
            words = f"{verdict.node} is quarantined out of its seat in job {name}, and no budget was asked"
            raise Violation(self.name, f"{words}: {verdict.sentence}")

    def _spared(self, fact: facts.Decided, evicted: list[str]) -> None:
        """No job is paused by what follows from an automatic eviction."""
        begun = False
        for effect in fact.effects:
            begun = begun or (isinstance(effect, PutVerdict) and effect.verdict.decision is Decision.EVICT)
            if begun and isinstance(effect, Audit) and effect.entry.kind == "job.paused":
                raise Violation(self.name, f"the eviction of {evicted} pauses: {effect.entry.sentence}")

    def _follow(self, fact: facts.Decided) -> None:
        for effect in fact.effects:
            if isinstance(effect, PutNode):
                self._racks[effect.node] = effect.doc.identity.domain.rack
                (self._reachable.add if effect.doc.liveness.reachable else self._reachable.discard)(effect.node)
            elif isinstance(effect, DeleteNode):
                self._reachable.discard(effect.node)
            elif isinstance(effect, DeleteJob):
                self._jobs.pop(effect.job, None)
            elif isinstance(effect, PutJob):
                self._jobs[effect.job] = _JobDoc.of(effect.doc)

    def _counted(self, node: str, without: Collection[str] = ()) -> tuple[_Count, ...]:
        """The rack's nodes that are expected to be heard, if the node is in one, and the seats of the jobs that compute
        on the node, but for those that do ``without`` it."""
        rack = self._racks[node]
        inside = [name for name in self._reachable if self._racks[name] == rack]
        racks = [_Count(f"rack {rack}", len(inside))] if rack else []
        jobs = [
            _Count(f"job {name}", len(job.generation.seats) if job.generation is not None else 0)
            for name, job in self._computing(node, without).items()
        ]
        return (*racks, *jobs)

    def _computing(self, node: str, without: Collection[str] = ()) -> dict[str, _JobDoc]:
        """Jobs that compute on the node, but for those that do ``without`` it."""
        return {
            name: job
            for name, job in self._jobs.items()
            if job.state is JobState.RUNNING
            and name not in without
            and any(spec is not None and node in spec.seats for spec in (job.generation, job.leaving))
        }

    def _without(self, fact: facts.Decided, verdict: Verdict) -> set[str]:
        """Jobs that did without the node already when it was evicted, in the same event: paused, at their end, in a
        generation that interrupts and has no seat for it, or past the boundary at which they left it."""
        anew = {effect.spec.job for effect in fact.effects if isinstance(effect, PutGeneration)}
        found: set[str] = set()
        for effect in fact.effects:
            if isinstance(effect, PutJob) and effect.job not in anew and effect.doc.outgoing_generation is None:
                before, spec = self._jobs.get(effect.job), effect.doc.generation
                if before is not None and before.leaving is not None and spec and verdict.node not in spec.seats:
                    found.add(effect.job)
        for effect in fact.effects:
            if isinstance(effect, PutVerdict) and effect.verdict is verdict:
                break
            if isinstance(effect, Audit) and effect.entry.kind in ENDS and effect.entry.job is not None:
                found.add(effect.entry.job)
            elif isinstance(effect, PutGeneration) and effect.spec.after_step is None:
                (found.discard if verdict.node in effect.spec.seats else found.add)(effect.spec.job)
        return found

    # --- what is written ---------------------------------------------------------------------------------------------

    def _durable(self, fact: facts.Durable) -> None:
        self._stored.note(fact.batch)
        self._nodes = (self._nodes - set(fact.batch.forgotten_nodes)) | fact.batch.nodes.keys()
        acquitted = {row.node: row.at for row in fact.batch.audit if row.kind == "node.eviction_rolled_back"}
        convicted = {row.node for row in fact.batch.verdicts if row.decision == Decision.EVICT}
        self._take_back({node: at for node, at in acquitted.items() if node not in convicted})
        rows = sorted((*fact.batch.verdicts, *fact.batch.audit), key=lambda row: row.at)
        for _, instant in groupby(rows, key=lambda row: row.at):
            self._at_once(list(instant), acquitted)

    def _at_once(self, rows: list[VerdictRow | AuditRow], acquitted: dict[str, float]) -> None:
        """What was decided at one time: whether a verdict came before or after a line of the log is not written."""
        words = [row.kind for row in rows if isinstance(row, AuditRow) and row.kind in (LATCHED, OVER, RESET)]
        self._latched = self._latched and OVER not in words
        for row in rows:
            if not isinstance(row, VerdictRow) or row.decision != Decision.EVICT or row.id in self._ordered:
                continue
            if row.at > acquitted.get(row.node, 0.0):  # else what is written together never stood
                self._evicted(row.node, row.at, (_Count("fleet", len(self._nodes)), *self._counts[row.id]))
        if RESET in words:
            self._evictions = []
        if words:
            self._latched = words[-1] == LATCHED

    def _take_back(self, acquitted: dict[str | None, float]) -> None:
        """An eviction that an outbreak has taken back counts no more: the node's last one."""
        for node, at in acquitted.items():
            mine = [one for one in self._evictions if one.node == node and one.at <= at]
            self._evictions = [one for one in self._evictions if one is not (mine[-1] if mine else None)]

    def _evicted(self, node: str, at: float, counts: tuple[_Count, ...]) -> None:
        policy = self.world.plan.policy
        if self._latched:
            raise Violation(self.name, f"{node} is evicted while the breaker is latched")
        recent = [one for one in self._evictions if one.at > at - policy.eviction_window_s]
        self._evictions = [*recent, _Written(node, at, counts)]
        for scope, of in counts:
            earlier = sum(1 for one in recent if any(count.scope == scope for count in one.counts))
            allowed = self._allowed(scope, of + earlier if scope.startswith("job ") else of)
            if earlier + 1 > allowed:
                raise Violation(
                    self.name,
                    f"{earlier + 1} evictions of the {scope} within {policy.eviction_window_s:g} s, {allowed} allowed",
                )

    def _allowed(self, scope: str, of: int) -> int:
        """A job's share is of the nodes that it has, and of those that it lost to evictions."""
        policy = self.world.plan.policy
        count, share = {
            "fleet": (policy.eviction_count, policy.eviction_share),
            "rack": (policy.eviction_rack_count, policy.eviction_rack_share),
            "job": (policy.eviction_job_count, policy.eviction_job_share),
        }[scope.partition(" ")[0]]
        return max(1, min(count, int(share * of)))

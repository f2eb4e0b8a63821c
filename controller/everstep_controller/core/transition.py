"""One event's work in progress: collects effects, and which records changed, until the event is done."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from everstep.ids import JobId, NodeId, Rank
from everstep.vocabulary import Action, Decision, Finding, Verdict
from everstep.wire.v1.directives import AnyDirective
from everstep_controller.core import records
from everstep_controller.core.effects import (
    Audit,
    AuditEntry,
    DeleteJob,
    DeleteNode,
    Effect,
    PutFleet,
    PutJob,
    PutNode,
    PutVerdict,
    Remediation,
    RequestRemediation,
    Send,
)
from everstep_controller.core.jobs.progress import StepRate, Stragglers, compute_step_rate, find_stragglers
from everstep_controller.core.state import FleetState, Ignored


class HeartbeatRead(msgspec.Struct, frozen=True, tag=True):
    """``state.Pulse`` of node ``of`` as a rule saw it. ``since``: when its silence began, by what we could hear."""

    subject: NodeId
    last_seen_at: float
    clean_beats: int
    longest_pause_s: float
    silent_since: float


class StepsRead(msgspec.Struct, frozen=True, tag=True):
    """Each rank's last finished step in job ``of``, as a rule saw them."""

    subject: JobId
    steps: dict[Rank, int]


class EnteredRanksRead(msgspec.Struct, frozen=True, tag=True):
    """Ranks that were seen in the current generation of job ``subject``, as a rule saw them."""

    subject: JobId
    ranks: frozenset[Rank]


class BeyondRead(msgspec.Struct, frozen=True, tag=True):
    """Ranks of job ``subject`` that had begun a step after a given one, with the last step each had begun."""

    subject: JobId
    begun: dict[Rank, int]


class DeadlineCheck(msgspec.Struct, frozen=True, tag=True):
    """A Tick looked at ``of``, and more than a node heard in time was found there."""

    subject: str
    kind: str


class ControllerFindingChange(msgspec.Struct, frozen=True):
    """A finding of the controller's own was raised on ``node`` (``before``: the one of its key that stood; ``why``:
    what a second pass has shown), or, without ``finding``, the one ``before`` has cleared, as ``why`` says."""

    node: NodeId
    before: Finding | None
    finding: Finding | None
    reason: str = ""


R = TypeVar("R", HeartbeatRead, StepsRead, EnteredRanksRead, BeyondRead, StepRate, Stragglers)
RecordedRead = HeartbeatRead | StepsRead | EnteredRanksRead | BeyondRead | StepRate | Stragglers | DeadlineCheck
"""What a rule read of that which heartbeats change. Beats are too many to be written down; these are few."""


class Transition:
    """What the rules write to while they handle one event.

    ``reads`` lists, in order, what was read of that which heartbeats change: with them the event can be handled again
    elsewhere, without the beats before it, and leads to the same effects. ``quiet``: a Tick that only found nodes
    heard in time; history can do without it. ``looks``: where the Tick of ``recorded`` looked; silence deadlines, which
    beats move, are not to be looked at otherwise then. ``freed``: scopes whose held evictions are to be looked at again
    (``eviction``). ``departed``: nodes lost in this turn, and why, by the jobs that they had a seat in. ``own``: what
    the controller found itself and is not judged yet. ``returning``: nodes on probation against which something
    stands, to be judged as well. ``proving``: nodes on probation that were heard, to be looked at after that.
    ``released``: nodes whose held eviction is over in this turn. ``regrouped``: jobs that a rule regroups once for all
    that it decides in this turn, so that nobody else need.

    Args:
        trace: of the stimulus; rules that carry out something older pass that one's trace instead.
        entropy: hex digits for a new job's secret.
        recorded: ``reads`` of the time when the event was handled first; None for the first time. A node of which
            nothing was read then counts as heard just now: nothing had followed from its silence.
    """

    def __init__(
        self,
        state: FleetState,
        now: float,
        trace: str,
        entropy: str = "",
        recorded: Sequence[RecordedRead] | None = None,
    ) -> None:
        self.reads: list[RecordedRead] = []
        self.recorded_checks = (
            None if recorded is None else [read for read in recorded if isinstance(read, DeadlineCheck)]
        )
        self._recorded = None if recorded is None else _by_subject(recorded)
        self.is_uneventful = False
        self.state = state
        self.policy = state.policy
        self.now = now
        self.trace = trace
        self.entropy = entropy
        self.freed_scopes: dict[str, None] = {}
        self.returning_nodes: dict[NodeId, None] = {}
        self.seen_on_probation: dict[NodeId, None] = {}
        self.deferral_dropped: dict[NodeId, None] = {}
        self.lost_nodes_by_job: dict[JobId, dict[NodeId, str]] = {}
        self.controller_finding_changes: list[ControllerFindingChange] = []
        self.regroup_claimed: set[JobId] = set()
        self._effects: list[Effect] = []
        self._remediations: list[Remediation] = []
        self._verdict_ids: dict[NodeId, str] = {}
        self._is_fleet_changed = False
        self._changed_nodes: dict[str, None] = {}
        self._changed_jobs: dict[str, None] = {}

    def read_heartbeats(self, node: str) -> HeartbeatRead:
        """When the node was last heard, its clean beats, its longest pause of lately."""
        pulse = self.state.node_runtime[node].heartbeats
        heard_at = pulse.last_seen_at if self._recorded is None else self.now
        since = max(heard_at, self.state.observer.receiving_since)
        return self._record_read(HeartbeatRead(node, heard_at, pulse.clean_beats, pulse.longest_pause_s, since))

    def read_step_rate(self, job: str) -> StepRate:
        """How fast the job steps."""
        return self._record_read(compute_step_rate(job, self.state.job_runtime[job].progress))

    def read_stragglers(self, job: str, factor: float) -> Stragglers:
        """Ranks whose own time for a step is more than ``factor`` times the job's median."""
        return self._record_read(find_stragglers(job, self.state.job_runtime[job].progress, factor))

    def read_steps(self, job: str) -> dict[Rank, int]:
        """Each rank's last finished step in the running generation, where it is known."""
        pace = self.state.job_runtime[job].progress
        return self._record_read(StepsRead(job, {rank: progress.step for rank, progress in pace.by_rank.items()})).steps

    def read_entered_ranks(self, job: str) -> frozenset[Rank]:
        """Ranks that were seen in the current generation."""
        return self._record_read(
            EnteredRanksRead(job, frozenset(self.state.job_runtime[job].progress.entered_ranks))
        ).ranks

    def beyond(self, job: str, step: int) -> dict[Rank, int]:
        """Ranks that have begun a step after ``step`` in the running generation, with the last step each has begun."""
        progress = self.state.job_runtime[job].progress.by_rank.values()
        further = {report.rank: report.started_step for report in progress if report.started_step > step}
        return self._record_read(BeyondRead(job, further)).begun

    def _record_read(self, fresh: R) -> R:
        if self._recorded and (then := self._recorded.get((type(fresh), fresh.subject))):
            fresh = then.popleft()
        self.reads.append(fresh)
        return fresh

    def mark_fleet_changed(self) -> None:
        self._is_fleet_changed = True

    def mark_node_changed(self, node: str) -> None:
        self._changed_nodes[node] = None

    def mark_job_changed(self, job: str) -> None:
        self._changed_jobs[job] = None

    def delete_node(self, node: str) -> None:
        """The state knows the node no more."""
        self._changed_nodes.pop(node, None)
        self.emit(DeleteNode(node))

    def delete_job(self, job: str) -> None:
        """The state knows the job no more."""
        self._changed_jobs.pop(job, None)
        self.emit(DeleteJob(job))

    def changed_records(self) -> tuple[list[NodeId], list[JobId]]:
        """Nodes and jobs whose records changed so far."""
        return list(self._changed_nodes), list(self._changed_jobs)

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, node: str, body: AnyDirective) -> None:
        """A directive for ``node``, unless nobody ever registered under that name."""
        if node in self.state.nodes:
            self.emit(Send(node, body))

    def audit(
        self,
        kind: str,
        sentence: str,
        *,
        node: str | None = None,
        job: str | None = None,
        generation: int | None = None,
        trace: str | None = None,
        data: dict[str, str] | None = None,
    ) -> None:
        self.emit(
            Audit(
                AuditEntry(
                    kind=kind,
                    sentence=sentence,
                    at=self.now,
                    trace=self.trace if trace is None else trace,
                    node=node,
                    job=job,
                    generation=generation,
                    data=data or {},
                )
            )
        )

    def add_verdict(
        self,
        node: str,
        decision: Decision,
        sentence: str,
        *,
        action: Action = Action.NONE,
        evidence: tuple[Finding, ...] = (),
        trace: str | None = None,
    ) -> None:
        """A judgement on ``node``, with a line in the log."""
        record = self.state.nodes[node]
        record.verdict_count += 1
        self.mark_node_changed(node)
        verdict = Verdict(
            id=f"{node}-{record.verdict_count}",
            node=node,
            decision=decision,
            sentence=sentence,
            action=action,
            evidence=evidence,
            at=self.now,
            trace=self.trace if trace is None else trace,
        )
        self.emit(PutVerdict(verdict))
        if decision in STATE_CHANGING_DECISIONS:
            record.current_verdict_id = self._verdict_ids[node] = verdict.id
        records.append_history(record, self.now, "verdict", f"{decision}: {sentence}", {"verdict": verdict.id})
        self.audit(f"verdict.{decision}", sentence, node=node, trace=verdict.trace, data={"verdict": verdict.id})

    def request_remediation(self, remediation: Remediation) -> None:
        """Asks for an action on a node: last of all effects, so that the verdict it follows from is known by then."""
        self._remediations.append(remediation)

    def count_ignored(self, reason: Ignored) -> None:
        """Count an event that a rule drops; the log is spared."""
        self.state.ignored_counts[reason] = self.state.ignored_counts.get(reason, 0) + 1

    def schedule(self, due: float, kind: str, subject: str) -> None:
        """Asks for a look at ``subject`` at ``due``."""
        push_deadline(self.state, due, kind, subject)

    def finish(self) -> list[Effect]:
        """All effects: first the records that changed, then what was emitted, in order."""
        state = self.state
        puts: list[Effect] = [PutFleet(state.fleet)] if self._is_fleet_changed else []
        puts += [PutNode(node, state.nodes[node]) for node in self._changed_nodes]
        puts += [PutJob(job, state.jobs[job]) for job in self._changed_jobs]
        return puts + self._effects + [RequestRemediation(self._with_verdict(remedy)) for remedy in self._remediations]

    def _with_verdict(self, remediation: Remediation) -> Remediation:
        return msgspec.structs.replace(
            remediation, verdict_id=self._verdict_ids.get(remediation.node, remediation.verdict_id)
        )


STATE_CHANGING_DECISIONS = (Decision.EVICT, Decision.QUARANTINE, Decision.READMIT, Decision.REPAIR)
"""Decisions by which a node is where it is; what is asked of the outside follows from one of them."""


def _by_subject(reads: Iterable[RecordedRead]) -> dict[tuple[type, str], deque[Any]]:
    found: dict[tuple[type, str], deque[Any]] = defaultdict(deque)
    for read in reads:
        found[type(read), read.subject].append(read)
    return found


def push_deadline(state: FleetState, due: float, kind: str, subject: str) -> None:
    """Queues a hint to look at ``subject``: ``silence`` or ``node`` of a node, ``job``, ``probe``; or at what it says
    itself: ``correlation``, ``reunion``, ``held``, ``retention``,
    ``maintenance``."""
    if (due, kind, subject) in state.queued_deadlines:
        return
    state.queued_deadlines.add((due, kind, subject))
    state.deadline_sequence += 1
    heapq.heappush(state.deadlines, (due, state.deadline_sequence, kind, subject))


def pop_due(state: FleetState, now: float) -> tuple[str, str] | None:
    """The next (kind, subject) whose time has come."""
    if not state.deadlines or state.deadlines[0][0] > now:
        return None
    due, _, kind, subject = heapq.heappop(state.deadlines)
    state.queued_deadlines.discard((due, kind, subject))
    return kind, subject


# ---- undecided
# Findings that stand and cannot be judged yet: each is looked at again when what stood in the way may be over.


def defer_judgement(transition: Transition, node: str, key: str, reason: str, due: float) -> None:
    """One look a second at most, however often findings are raised meanwhile."""
    transition.state.nodes[node].undecided_findings[key] = reason
    transition.mark_node_changed(node)
    transition.schedule(float(math.ceil(due)), "care", node)

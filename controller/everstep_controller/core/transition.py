"""Collect the effects and changed records of one event while the rules handle it."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from everstep.ids import JobId, NodeId, Rank
from everstep.vocabulary import Action, Decision, Finding, FindingKind, Severity, Verdict
from everstep.wire.v1.directives import AnyDirective
from everstep_controller.core import effects
from everstep_controller.core.effects import Effect, EventLogEntry, Remediation
from everstep_controller.core.records import MAX_HISTORY_ENTRIES, HistoryEntry, HistoryKind, UndecidedReason
from everstep_controller.core.state import DeadlineKind, FleetState, Ignored, JobProgress

MIN_STEP_S = 1e-6
"""Shorter reported step times, in seconds, are ignored: the steps per second would be no number that can be sent."""
MAX_SAMPLED_RANKS = 512
"""Maximum number of ranks in the median step time, because sorting ten thousand takes milliseconds."""


class StepRate(msgspec.Struct, frozen=True, tag=True):
    """Step rate of a job."""

    subject: JobId
    step: int | None
    """Last finished step of the furthest rank; None if unknown."""
    at: float
    """Time at which ``step`` was reported."""
    step_s: float
    """Median step time in seconds, of a sample in large jobs, whose ranks step together; 0.0 if unknown."""

    def predict_step(self, now: float, max_unseen_s: float) -> int:
        """Return the furthest rank's step, extrapolated for at most ``max_unseen_s`` beyond the last report."""
        assert self.step is not None
        return self.step + int(min(now - self.at, max_unseen_s) / self.step_s)


def compute_step_rate(job: JobId, job_progress: JobProgress) -> StepRate:
    apart = 1 + len(job_progress.by_rank) // MAX_SAMPLED_RANKS
    some = itertools.islice(job_progress.by_rank.values(), 0, None, apart)
    times = sorted(progress.step_s for progress in some if progress.step_s >= MIN_STEP_S)
    step_s = times[len(times) // 2] if times else 0.0
    return StepRate(job, job_progress.furthest_step, job_progress.furthest_step_at, step_s)


MIN_EXCESS_SHARE = 0.05
"""Minimum excess over the median, as a share of the step time. Less is noise of a loop that hardly computes."""


class Stragglers(msgspec.Struct, frozen=True, tag=True):
    """Ranks of a job whose own time per step stands out."""

    subject: JobId
    measured_ranks: int
    """Number of ranks that report their own time."""
    median_s: float
    """Lower median of their own times in seconds."""
    slow: dict[Rank, float]
    """Seconds of the ranks that exceed the median by the factor, and enough to delay a step."""


def find_stragglers(job: JobId, job_progress: JobProgress, factor: float) -> Stragglers:
    """Return the ranks that need more than ``factor`` times the median."""
    busy = {rank: progress.busy_s for rank, progress in job_progress.by_rank.items() if progress.busy_s is not None}
    if not busy:
        return Stragglers(job, 0, 0.0, {})
    median = sorted(busy.values())[(len(busy) - 1) // 2]
    limit = max(factor * median, median + MIN_EXCESS_SHARE * compute_step_rate(job, job_progress).step_s)
    return Stragglers(job, len(busy), median, {rank: own for rank, own in busy.items() if own > limit})


class HeartbeatRead(msgspec.Struct, frozen=True, tag=True):
    """``HeartbeatState`` of node ``subject`` as a rule saw it; ``silent_since`` is when its silence began."""

    subject: NodeId
    last_seen_at: float
    clean_heartbeats: int
    longest_pause_s: float
    silent_since: float


class StepsRead(msgspec.Struct, frozen=True, tag=True):
    """Last finished step of each rank of job ``subject``, as a rule saw them."""

    subject: JobId
    steps: dict[Rank, int]


class EnteredRanksRead(msgspec.Struct, frozen=True, tag=True):
    """Ranks seen in the current generation of job ``subject``, as a rule saw them."""

    subject: JobId
    ranks: frozenset[Rank]


class RanksBeyondRead(msgspec.Struct, frozen=True, tag=True):
    """Ranks of job ``subject`` that had begun a step after a given one, with the last step that each had begun."""

    subject: JobId
    begun: dict[Rank, int]


class DeadlineCheck(msgspec.Struct, frozen=True, tag=True):
    """A Tick's check of ``subject`` that found more than a node heard in time."""

    subject: str
    kind: DeadlineKind


class ControllerFindingChange(msgspec.Struct, frozen=True):
    """A change of a finding of the controller on ``node``; ``finding`` is None if ``before`` has cleared."""

    node: NodeId
    before: Finding | None
    finding: Finding | None
    reason: str = ""


R = TypeVar("R", HeartbeatRead, StepsRead, EnteredRanksRead, RanksBeyondRead, StepRate, Stragglers)
RecordedRead = HeartbeatRead | StepsRead | EnteredRanksRead | RanksBeyondRead | StepRate | Stragglers | DeadlineCheck
"""A rule's read of state that heartbeats change. Heartbeats are too many to journal; these reads are few."""


class Transition:
    """Work in progress of one event: the rules write to it.

    Args:
        state: The state to change.
        now: Time of the event.
        trace: Trace id of the event. Rules that carry out something older pass the older trace instead.
        entropy: Hex digits for a new job's secret.
        recorded: ``reads`` of an earlier run of the event; None in the first run. In a replay, a node without a
            recorded read counts as heard just now, because nothing had followed from its silence.

    Attributes:
        reads: Reads of state that heartbeats change, in order. With them the event can be replayed without the
            heartbeats before it, and leads to the same effects.
        is_uneventful: True for a Tick that only found nodes heard in time; the journal may omit such a Tick.
        recorded_checks: Deadline checks of the recorded Tick. In a replay, silence deadlines are checked only there,
            because heartbeats move them.
        freed_scopes: Scopes whose deferred evictions must be checked again (``health.eviction``).
        returning_nodes: Nodes on probation with findings to judge.
        seen_on_probation: Nodes on probation that were heard in this event.
        deferral_dropped: Nodes whose deferred eviction ended in this event.
        lost_nodes_by_job: Nodes lost in this event, with the reason, by the jobs in which they had a seat.
        controller_finding_changes: Changes of the controller's own findings that are not judged yet.
        regroup_claimed: Jobs that a rule regroups once for all its decisions in this event.
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
        """Return the node's last message, clean heartbeats and longest recent pause."""
        heartbeats = self.state.node_runtime[node].heartbeats
        heard_at = heartbeats.last_seen_at if self._recorded is None else self.now
        since = max(heard_at, self.state.observer.receiving_since)
        fresh = HeartbeatRead(node, heard_at, heartbeats.clean_heartbeats, heartbeats.longest_pause_s, since)
        return self._record_read(fresh)

    def read_step_rate(self, job: str) -> StepRate:
        """Return the rate at which the job steps."""
        return self._record_read(compute_step_rate(job, self.state.job_runtime[job].progress))

    def read_stragglers(self, job: str, factor: float) -> Stragglers:
        """Return the ranks whose own time for a step is more than ``factor`` times the job's median."""
        return self._record_read(find_stragglers(job, self.state.job_runtime[job].progress, factor))

    def read_steps(self, job: str) -> dict[Rank, int]:
        """Return the last finished step of each rank in the running generation, where known."""
        by_rank = self.state.job_runtime[job].progress.by_rank
        return self._record_read(StepsRead(job, {rank: progress.step for rank, progress in by_rank.items()})).steps

    def read_entered_ranks(self, job: str) -> frozenset[Rank]:
        """Return the ranks that were seen in the current generation."""
        entered = frozenset(self.state.job_runtime[job].progress.entered_ranks)
        return self._record_read(EnteredRanksRead(job, entered)).ranks

    def read_ranks_beyond(self, job: str, step: int) -> dict[Rank, int]:
        """Return the ranks that have begun a step after ``step``, with the last step that each has begun."""
        progress = self.state.job_runtime[job].progress.by_rank.values()
        further = {report.rank: report.started_step for report in progress if report.started_step > step}
        return self._record_read(RanksBeyondRead(job, further)).begun

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
        """Emit the deletion of a node that the state no longer contains."""
        self._changed_nodes.pop(node, None)
        self.emit(effects.DeleteNode(node))

    def delete_job(self, job: str) -> None:
        """Emit the deletion of a job that the state no longer contains."""
        self._changed_jobs.pop(job, None)
        self.emit(effects.DeleteJob(job))

    def changed_records(self) -> tuple[list[NodeId], list[JobId]]:
        """Return the nodes and jobs whose records have changed so far."""
        return list(self._changed_nodes), list(self._changed_jobs)

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, node: str, body: AnyDirective) -> None:
        """Send a directive to ``node``, if a node of that name is known."""
        if node in self.state.nodes:
            self.emit(effects.Send(node, body))

    def log_event(
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
        entry = EventLogEntry(
            kind=kind,
            sentence=sentence,
            at=self.now,
            trace=self.trace if trace is None else trace,
            node=node,
            job=job,
            generation=generation,
            data=data or {},
        )
        self.emit(effects.AppendToEventLog(entry))

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
        """Emit a verdict on ``node``, with an entry in its history and in the event log."""
        record = self.state.nodes[node]
        record.history.verdict_count += 1
        verdict = Verdict(
            id=f"{node}-{record.history.verdict_count}",
            node=node,
            decision=decision,
            sentence=sentence,
            action=action,
            evidence=evidence,
            at=self.now,
            trace=self.trace if trace is None else trace,
        )
        self.emit(effects.PutVerdict(verdict))
        if decision in STATE_CHANGING_DECISIONS:
            record.history.current_verdict_id = self._verdict_ids[node] = verdict.id
        self.append_history(node, HistoryKind.VERDICT, f"{decision}: {sentence}", {"verdict": verdict.id})
        self.log_event(f"verdict.{decision}", sentence, node=node, trace=verdict.trace, data={"verdict": verdict.id})

    def make_finding(
        self,
        kind: FindingKind,
        subject: str,
        severity: Severity,
        message: str,
        *,
        action: Action = Action.NONE,
        value: float | None = None,
        threshold: float | None = None,
        evidence: dict[str, str] | None = None,
    ) -> Finding:
        """Return a finding of the controller that stands since now; ``raise_finding`` stores it."""
        return Finding(
            kind=kind,
            subject=subject,
            severity=severity,
            message=message,
            action=action,
            value=value,
            threshold=threshold,
            since=self.now,
            trace=self.trace,
            evidence=evidence or {},
        )

    def raise_finding(self, node: NodeId, finding: Finding, lasts_s: float = 0.0, proof: str = "") -> None:
        """Store a finding of the controller until it is cleared, or not seen for ``lasts_s`` seconds (0.0: no limit).

        It is judged by its rule at the end of the event (``findings.judge_controller_findings``), or earlier if a rule
        needs the result.
        """
        health = self.state.nodes[node].health
        before = health.controller_findings.get(finding.key)
        self.controller_finding_changes.append(ControllerFindingChange(node, before, finding, proof))
        health.controller_findings[finding.key] = finding
        self.mark_node_changed(node)
        health.controller_findings_until.pop(finding.key, None)
        if lasts_s:
            self.extend_finding(node, finding.key, lasts_s)

    def extend_finding(self, node: NodeId, key: str, lasts_s: float) -> None:
        """Extend a standing finding of the controller by ``lasts_s`` seconds from now."""
        self.state.nodes[node].health.controller_findings_until[key] = self.now + lasts_s
        self.mark_node_changed(node)
        self.schedule_treatment(self.now + lasts_s, node)

    def clear_findings(self, node: NodeId, keys: Iterable[str] | None = None, reason: str = "") -> None:
        """Clear the controller's findings with these keys, or all. ``reason`` is the sentence for the event log."""
        record = self.state.nodes[node]
        for key in list(record.health.controller_findings if keys is None else keys):
            finding = record.health.controller_findings.pop(key, None)
            record.health.controller_findings_until.pop(key, None)
            if finding is None:
                continue
            if key in record.quarantine.causes:
                record.quarantine.cause_cleared_at[key] = self.now
            self.mark_node_changed(node)
            self.controller_finding_changes.append(ControllerFindingChange(node, finding, None, reason))

    def append_history(
        self, node: NodeId, kind: HistoryKind, sentence: str, detail: dict[str, str] | None = None
    ) -> None:
        """Append an entry to the node's history, which changes its record."""
        history = self.state.nodes[node].history
        entry = HistoryEntry(at=self.now, kind=kind, sentence=sentence, detail=detail or {})
        history.entries = [*history.entries[1 - MAX_HISTORY_ENTRIES :], entry]
        self.mark_node_changed(node)

    def request_remediation(self, remediation: Remediation) -> None:
        """Request an action on a node. Requests come last among the effects, to name the verdict behind them."""
        self._remediations.append(remediation)

    def count_ignored(self, reason: Ignored) -> None:
        """Count an event that a rule drops, without a log entry."""
        self.state.counts.ignored[reason] = self.state.counts.ignored.get(reason, 0) + 1

    def schedule(self, due: float, kind: DeadlineKind, subject: str) -> None:
        """Queue a check of ``subject`` at ``due``."""
        push_deadline(self.state, due, kind, subject)

    def schedule_node(self, due: float, node: str) -> None:
        self.schedule(due, DeadlineKind.NODE, node)

    def schedule_treatment(self, due: float, node: str) -> None:
        self.schedule(due, DeadlineKind.NODE_TREATMENT, node)

    def schedule_job(self, due: float, job: str) -> None:
        self.schedule(due, DeadlineKind.JOB, job)

    def finish(self) -> list[Effect]:
        """Return all effects: changed records first, then the emitted effects in order, then remediations."""
        state = self.state
        puts: list[Effect] = [effects.PutFleet(state.fleet)] if self._is_fleet_changed else []
        puts += [effects.PutNode(node, state.nodes[node]) for node in self._changed_nodes]
        puts += [effects.PutJob(job, state.jobs[job]) for job in self._changed_jobs]
        requests: list[Effect] = []
        for remediation in self._remediations:
            verdict_id = self._verdict_ids.get(remediation.node, remediation.verdict_id)
            requests.append(effects.RequestRemediation(msgspec.structs.replace(remediation, verdict_id=verdict_id)))
        return puts + self._effects + requests


STATE_CHANGING_DECISIONS = (Decision.EVICT, Decision.QUARANTINE, Decision.READMIT, Decision.REPAIR)
"""Decisions that change a node's state. Every remediation follows from one of them."""


def _by_subject(reads: Iterable[RecordedRead]) -> dict[tuple[type, str], deque[Any]]:
    found: dict[tuple[type, str], deque[Any]] = defaultdict(deque)
    for read in reads:
        found[type(read), read.subject].append(read)
    return found


def push_deadline(state: FleetState, due: float, kind: DeadlineKind, subject: str) -> None:
    """Queue a check of ``subject`` at ``due``."""
    if (due, kind, subject) in state.deadline_queue.entries:
        return
    state.deadline_queue.entries.add((due, kind, subject))
    state.deadline_queue.sequence += 1
    heapq.heappush(state.deadline_queue.heap, (due, state.deadline_queue.sequence, kind, subject))


def pop_due(state: FleetState, now: float) -> tuple[DeadlineKind, str] | None:
    """Pop and return the next (kind, subject) that is due, or None."""
    if not state.deadline_queue.heap or state.deadline_queue.heap[0][0] > now:
        return None
    due, _, kind, subject = heapq.heappop(state.deadline_queue.heap)
    state.deadline_queue.entries.discard((due, kind, subject))
    return kind, subject


def defer_judgement(transition: Transition, node: str, key: str, reason: UndecidedReason, due: float) -> None:
    """Note that a standing finding cannot be judged yet, and queue one more look, at most one a second per node."""
    transition.state.nodes[node].health.undecided_findings[key] = reason
    transition.mark_node_changed(node)
    transition.schedule_treatment(float(math.ceil(due)), node)

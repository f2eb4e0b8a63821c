"""Build operators' views of the fleet's state as messages, in the event loop's thread.

A view may be ahead of the database by the transaction being written; directives and answers to changes never are.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from everstep import __version__
from everstep.errors import NotFound
from everstep.ids import Rank, Version
from everstep.vocabulary import Finding, GenerationReason, NodeState
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.operator import GenerationRecovery, ProbeRow, ProbeStatus, ProgressHistory, ProgressSample
from everstep.wire.v1.training import AnyReport, GenerationSpec, ProbeFinished, RankProgress, Resumed
from everstep_controller.core.health.eviction import budget_left, eviction_scopes
from everstep_controller.core.health.offences import offender_score
from everstep_controller.core.health.outbreaks import active_outbreaks, signature, spared_findings_of
from everstep_controller.core.maintenance import planned_windows
from everstep_controller.core.needs import is_unblemished, list_needs, service_faults
from everstep_controller.core.records import IN_SERVICE, JobRecord, NodeRecord
from everstep_controller.core.seats import membership
from everstep_controller.core.state import FleetState
from everstep_controller.read_models.gpu_gauges import GpuGaugeTable
from everstep_controller.read_models.hardware_drift import DriftTable
from everstep_controller.read_models.run_totals import RunTotals
from everstep_controller.store.database_errors import DatabaseOutage
from everstep_controller.store.rows import StandbyReport, decode_cursor, encode_cursor

# ---- trackers
# The core only counts the ranks that resumed and the nodes that passed a probe. The trackers keep the remaining
# contents of those reports for people: phases of a recovery, and measurements of a probe.

MAX_REMEMBERED_PROBES = 256


class _ResumedRanks(msgspec.Struct):
    """Reports of a generation's ranks about their recovery."""

    restored: Version | None = None
    ranks: set[int] = msgspec.field(default_factory=set)
    phases_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Those of the slowest rank: while it builds its model, the others wait for it in their restore."""
    finished_step: int | None = None


class RecoveryTracker:
    """Tracks how each generation recovered. Recoveries that stored ``jobs`` finished before are not reported again."""

    def __init__(self, jobs: Iterable[JobRecord] = ()) -> None:
        self._resuming: dict[tuple[str, int], _ResumedRanks] = {}
        self._newest: dict[str, GenerationRecovery] = {}
        resumed = (job for job in jobs if job.progress.resumed_at is not None)
        self._reported = {job.job: job.generation.number for job in resumed if job.generation is not None}

    def record_resumed(self, report: Resumed) -> None:
        """Record a rank's first step in a generation."""
        resumed = self._resuming.setdefault((report.job, report.generation), _ResumedRanks())
        resumed.ranks.add(report.rank)
        resumed.restored = report.restored if resumed.restored is None else resumed.restored
        if sum(report.phases_s.values()) > sum(resumed.phases_s.values()):
            resumed.phases_s = dict(report.phases_s)
        if report.finished_step is not None:
            resumed.finished_step = max(report.finished_step, resumed.finished_step or 0)

    def forget(self, job: str) -> None:
        """Forget a deleted job."""
        self._reported.pop(job, None)
        self._newest.pop(job, None)
        self._resuming = {key: resumed for key, resumed in self._resuming.items() if key[0] != job}

    def current(self, job: JobRecord) -> GenerationRecovery | None:
        """Return the newest generation's recovery as far as it has progressed."""
        spec = job.generation
        if spec is None:
            return None
        resumed = self._resuming.get((job.job, spec.number), _ResumedRanks())
        opened_at, resumed_at = job.progress.opened_at, job.progress.resumed_at
        duration_s = None if resumed_at is None else max(0.0, resumed_at - opened_at)
        return GenerationRecovery(
            generation=spec.number,
            reason=spec.reason,
            sentence=spec.sentence,
            trace=spec.trace,
            decided_at=opened_at,
            duration_s=duration_s,
            restored=resumed.restored,
            resumed_ranks=len(resumed.ranks),
            world_size=spec.world_size,
            phases_s=dict(resumed.phases_s),
            finished_step=resumed.finished_step,
            after_step=spec.after_step,
        )

    def take_finished(self, job: JobRecord) -> GenerationRecovery | None:
        """Return the recovery that just finished with this change of the job; each is returned once."""
        spec = job.generation
        if spec is None or job.progress.resumed_at is None or self._reported.get(job.job) == spec.number:
            return None
        recovery = self.current(job)
        self._reported[job.job] = spec.number
        if recovery is not None and spec.reason is not GenerationReason.FORMED:
            self._newest[job.job] = recovery
        self._resuming = {key: resumed for key, resumed in self._resuming.items() if key[0] != job.job}
        return recovery

    def newest(self, job: str) -> GenerationRecovery | None:
        """Return the job's newest recovery that has finished since this controller leads."""
        return self._newest.get(job)


class ProbeTracker:
    """The newest probes and their members' measurements; forgotten at a restart."""

    def __init__(self) -> None:
        self._probes: dict[str, ProbeStatus] = {}
        self._answers: dict[str, dict[str, ProbeFinished]] = {}
        self.results: dict[str, int] = {"passed": 0, "failed": 0}
        self.newest_rows: tuple[ProbeRow, ...] = ()

    def record_started(self, probe: RunProbe, now: float) -> None:
        """Record the start of a probe."""
        if probe.probe in self._probes:
            return
        self._probes[probe.probe] = ProbeStatus(probe=probe.probe, nodes=probe.nodes, started_at=now, trace=probe.trace)
        self._answers[probe.probe] = {}
        while len(self._probes) > MAX_REMEMBERED_PROBES:
            oldest = next(iter(self._probes))
            del self._probes[oldest], self._answers[oldest]

    def record_result(self, node: str, report: ProbeFinished) -> None:
        """Record a member's result."""
        status = self._probes.get(report.probe)
        if status is None or node not in status.nodes:  # a node may report only its own part
            return
        answers = self._answers[report.probe]
        answers[node] = report
        complete = set(status.nodes) <= set(answers)
        failed = any(not answer.ok for answer in answers.values())
        if status.ok is None and (failed or complete):
            self.results["failed" if failed else "passed"] += 1
        rows = _slowest(answers.values())
        self.newest_rows = rows if complete and rows else self.newest_rows
        self._probes[report.probe] = msgspec.structs.replace(
            status,
            ok=False if failed else True if complete else None,
            answers={member: answer.detail or ("ok" if answer.ok else "failed") for member, answer in answers.items()},
            rows=rows,
        )

    def newest(self) -> tuple[ProbeStatus, ...]:
        """Return the probes, newest first."""
        return tuple(reversed(self._probes.values()))

    def page(self, node: str, cursor: str, limit: int) -> tuple[tuple[ProbeStatus, ...], str]:
        """Return a page of probes with ``node``, newest first, and the next cursor. Raises MalformedMessage."""
        place = decode_cursor(cursor, (int,))
        before = (probe for probe in self.newest() if place is None or _number(probe.probe) < place[0])
        found = [probe for probe in before if not node or node in probe.nodes]
        more = len(found) > limit
        return tuple(found[:limit]), encode_cursor([_number(found[limit - 1].probe)]) if more else ""

    def get(self, probe: str) -> ProbeStatus:
        """Return the probe. Raises NotFound."""
        status = self._probes.get(probe)
        if status is None:
            kept = f"only the newest {MAX_REMEMBERED_PROBES} since the controller's start are kept"
            raise NotFound(f"no probe {probe!r}: {kept}")
        return status


def _number(probe: str) -> int:
    """Return the probe's number in the fleet."""
    return int(probe.rpartition("-")[2])


def _slowest(answers: Iterable[ProbeFinished]) -> tuple[ProbeRow, ...]:
    """Return per size the longest latency and lowest bandwidth of all members."""
    rows: dict[int, ProbeRow] = {}
    for answer in answers:
        for size, latency_s, bandwidth in answer.rows:
            other = rows.get(size)
            rows[size] = ProbeRow(
                bytes=size,
                latency_s=max(latency_s, other.latency_s) if other else latency_s,
                bandwidth_bytes_per_s=min(bandwidth, other.bandwidth_bytes_per_s) if other else bandwidth,
            )
    return tuple(rows[size] for size in sorted(rows))


class ReadModels:
    """Both trackers, fed by the same reports, the totals of each run, the gauges of GPUs, and like nodes' values."""

    def __init__(self, jobs: Iterable[JobRecord] = ()) -> None:
        self.recoveries = RecoveryTracker(jobs)
        self.probes = ProbeTracker()
        self.totals = RunTotals()
        self.gpu_gauges = GpuGaugeTable()
        self.drift = DriftTable()

    def record_report(self, node: str, body: AnyReport) -> None:
        """Record a report that the core has taken."""
        if isinstance(body, Resumed):
            self.recoveries.record_resumed(body)
        elif isinstance(body, ProbeFinished):
            self.probes.record_result(node, body)


MAX_PAGE_SIZE = 1000  # entries in an answer
IN_OUTBREAK = "outbreak"
"""State shown for nodes that serve despite an outbreak's finding: they are not healthy."""
FAULTY = "faulty"
"""State shown for nodes that serve despite a fault that needs a person: they are not healthy."""
NEEDS_LISTED = 200  # needs of a person that the fleet's status lists
OUTBREAK_NODES_NAMED = 32  # most nodes of an outbreak that the fleet's status names


class DirectiveCounts(Protocol):
    """The part of the outbox that views read."""

    def connected_count(self) -> int:
        """Return the number of nodes with a session."""

    def has_receiver(self, node: str) -> bool:
        """Return whether the node has a session."""

    def pending_count(self, node: str) -> int:
        """Return the number of the node's unacknowledged directives."""

    def total_pending(self) -> int:
        """Return the number of unacknowledged directives of all nodes."""


class ViewContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a view may read."""

    state: FleetState
    outbox: DirectiveCounts
    epoch: int
    started_at: float
    now: Callable[[], float]
    lag_s: Callable[[], float]
    queued: Callable[[], int]
    newest_event: Callable[[], int]
    database_outage: Callable[[], DatabaseOutage | None] = lambda: None
    open_remediations: Callable[[], int] = lambda: 0
    journal_gaps: Callable[[], int] = lambda: 0
    standby_report: Callable[[], StandbyReport] = StandbyReport
    clock_ahead_s: Callable[[], float] = lambda: 0.0

    def budget_left(self) -> int:
        """Return how many nodes may be evicted now."""
        return budget_left(self.state, self.now())

    def node(self, node: str) -> NodeRecord:
        """Return the node. Raises NotFound."""
        record = self.state.nodes.get(node)
        if record is None:
            raise NotFound(f"no node {node!r}: `everstep nodes` lists them; a node appears when its agent registers")
        return record

    def job(self, job: str) -> JobRecord:
        """Return the job. Raises NotFound."""
        record = self.state.jobs.get(job)
        if record is None:
            raise NotFound(f"no job {job!r}: `everstep jobs` lists them; a job appears when its first launcher joins")
        return record


class NodeFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A filter for nodes; an empty field matches all."""

    state: str = ""  # one, or several separated by commas, of ``effective_state``
    rack: str = ""
    switch: str = ""
    job: str = ""
    gpu_model: str = ""  # part of the GPUs' model name
    driver: str = ""
    gpu: str = ""  # UUID or serial number
    label: str = ""  # NAME, or NAME=VALUE

    def matches(self, state: FleetState, record: NodeRecord, now: float) -> bool:
        """Return whether the node matches all fields except ``job``."""
        if self.state and effective_state(state, record, now) not in self.state.split(","):
            return False
        identity = record.identity
        for wanted, actual in (
            (self.rack, identity.domain.rack),
            (self.switch, identity.domain.switch),
            (self.driver, identity.driver_version),
        ):
            if wanted and wanted != actual:
                return False
        if self.gpu_model and not any(self.gpu_model.lower() in gpu.name.lower() for gpu in identity.gpus):
            return False
        if self.gpu and not any(self.gpu in (gpu.uuid, gpu.serial) for gpu in identity.gpus):
            return False
        name, _, value = self.label.partition("=")
        return not name or (name in identity.labels and (not value or identity.labels[name] == value))


def effective_state(state: FleetState, record: NodeRecord, now: float) -> str:
    """Return the node's state; IN_OUTBREAK or FAULTY for one that serves despite what stands against it."""
    if record.state in IN_SERVICE:
        if spared_findings_of(state, record):
            return IN_OUTBREAK
        if service_faults(state, record, now):
            return FAULTY
    return str(record.state)


def node_counts(state: FleetState, now: float) -> dict[str, int]:
    """Return the number of nodes by ``effective_state``."""
    nodes = state.nodes.values()
    blemished = [record for record in nodes if not is_unblemished(record)]
    counts = Tally(effective_state(state, record, now) for record in blemished)
    if healthy := len(nodes) - len(blemished):
        counts[str(NodeState.HEALTHY)] += healthy
    return dict(counts)


def outbreaks(state: FleetState) -> tuple[op.Outbreak, ...]:
    """Return the active outbreaks, the oldest first."""
    known = len(state.nodes)
    return tuple(
        op.Outbreak(
            finding=outbreak.name,
            rule=outbreak.rule,
            count=len(outbreak.nodes),
            nodes=outbreak.nodes[:OUTBREAK_NODES_NAMED],
            since=outbreak.since,
            sentence=outbreak.sentence(known),
            advice=outbreak.advice(),
        )
        for outbreak in active_outbreaks(state)
    )


def _reason(record: NodeRecord, spared: Sequence[Finding], faults: Sequence[op.Need]) -> str:
    """Return the reason for the node's state, and what stands against a node that serves."""
    if faults and not spared:
        return "; ".join([*(fault.reason for fault in faults[:3]), f"earlier: {record.sentence}"])
    if not spared or record.state not in IN_SERVICE:
        return record.sentence
    found = "; ".join(f"{signature(finding)} is present on {record.node}: {finding.message}" for finding in spared[:3])
    return f"{found}; not evicted because of an outbreak (see `everstep status`); earlier: {record.sentence}"


def _job_of(state: FleetState, node: str) -> str | None:
    """Return the job in whose running roster the node is, or None."""
    seated = membership.jobs_seated_on(state, node) if node in state.node_runtime else []
    return next((job.job for job in seated if not job.is_ended and node in job.seats), None)


def node_summary(context: ViewContext, record: NodeRecord, job: str | None) -> op.NodeSummary:
    live = context.state.node_runtime.get(record.node)
    spared = spared_findings_of(context.state, record)
    faults = service_faults(context.state, record, context.now())
    return op.NodeSummary(
        node=record.node,
        state=record.state,
        since=record.since,
        reason=_reason(record, spared, faults),
        connected=context.outbox.has_receiver(record.node),
        last_seen_at=live.heartbeats.last_seen_at if live is not None and live.heartbeats.last_seen_at > 0 else None,
        job=job,
        gpus=len(record.identity.gpus),
        findings=len(record.all_findings()),
        domain=record.identity.domain,
        gpu_model=record.identity.gpus[0].name if record.identity.gpus else "",
        labels=record.identity.labels,
        hold_reason=record.scheduling.hold_reason,
        driver_version=record.identity.driver_version,
        outbreaks=tuple(dict.fromkeys(signature(finding) for finding in spared)),
        is_faulty=bool(faults) and not spared,
    )


def find_nodes(context: ViewContext, node_filter: NodeFilter) -> list[str]:
    """Return the names of the matching nodes, in order."""
    state = context.state
    if node_filter.job:
        job = state.jobs.get(node_filter.job)
        names = job.seats if job is not None and not job.is_ended else []
    else:
        names = list(state.nodes)
    now = context.now()
    return sorted(name for name in names if name in state.nodes and node_filter.matches(state, state.nodes[name], now))


def take_page(found: Sequence[str], cursor: str, limit: int) -> tuple[Sequence[str], str]:
    """Return the names after ``cursor``, and the next page's cursor (empty if there is none)."""
    begin = bisect_right(found, cursor) if cursor else 0
    page = found[begin : begin + limit]
    return page, page[-1] if begin + limit < len(found) else ""


def node_summaries(context: ViewContext, names: Iterable[str]) -> list[op.NodeSummary]:
    """Return summaries of the nodes that still exist."""
    state = context.state
    return [node_summary(context, state.nodes[name], _job_of(state, name)) for name in names if name in state.nodes]


def node_detail(context: ViewContext, node: str) -> op.NodeDetail:
    """Return all but the verdicts, which are in the store. Raises NotFound."""
    record = context.node(node)
    return op.NodeDetail(
        summary=node_summary(context, record, _job_of(context.state, node)),
        incarnation=record.identity.incarnation,
        agent_version=record.identity.agent_version,
        driver_version=record.identity.driver_version,
        boot_id=record.identity.boot_id,
        vault=record.identity.vault,
        gpus=record.identity.gpus,
        host=record.identity.host,
        findings=record.all_findings(),
        evictions=len(record.history.eviction_times),
        pending_directives=context.outbox.pending_count(node),
        registered_at=record.identity.registered_at,
        offence_score=round(offender_score(record, context.now(), context.state.policy.offenders.half_life_s), 3),
        hold_reason=record.scheduling.hold_reason,
        external_cordon_by=record.scheduling.external_cordon_by,
        maintenance_until=record.scheduling.maintenance_until,
        planned_maintenance=msgspec.convert(
            planned_windows(context.state, record), tuple[op.PlannedMaintenance, ...], from_attributes=True
        ),
        eviction_deferred_by=record.health.eviction_deferred_by,
    )


def ineligible_nodes(state: FleetState, job: JobRecord) -> dict[str, str]:
    """Return the nodes that offer themselves to the job and may not be seated now, with the reasons."""
    worked_out: membership.RostersByJob = {}
    promises = membership.claimed_by_priority(state, job, worked_out)
    fit = {*membership.eligible_nodes(state, job, rosters=worked_out), *job.seats}
    unfit = [node for node in job.membership.launchers if node not in fit]
    return {node: membership.no_seat_reason(state, job, node, promises) for node in unfit}


def job_summary(state: FleetState, job: JobRecord) -> op.JobSummary:
    """Return a job's summary. It is linear in the job's ranks, and fast, because dashboards poll it."""
    spec, live = job.generation, state.job_runtime.get(job.job)
    progress = live.progress.by_rank if live is not None else {}
    number = spec.number if spec is not None else 0
    newest = (live.progress.furthest_step or 0) if live is not None else 0
    finished, step_s, until_step = _extremes(progress, number)
    have_returned = spec is not None and len(job.progress.finished_ranks) == spec.world_size  # after a signal, too
    if job.is_ended or have_returned:
        step = max(job.progress.ended_step, newest)
    else:
        step = newest if finished is None else finished
    stall = live.regroup.stall_notice if live is not None and job.is_running else None
    return op.JobSummary(
        job=job.job,
        state=job.status.state,
        generation=spec.number if spec else 0,
        world_size=spec.world_size if spec else 0,
        nodes=len(spec.seats) if spec else 0,
        spares=len(membership.spares(state, job)),
        step=step,
        step_s=step_s,
        loss=job.progress.ended_loss[1] if job.is_ended and job.progress.ended_loss else _loss(progress, spec),
        committed=live.commits.committed_version if live else None,
        verified=live.commits.verified_version if live else None,
        reason=job.status.sentence,
        until_step=until_step,
        audited=job.commits.audited.version if job.commits.audited is not None else None,
        is_stopped=job.status.is_stopped,
        stall=stall.lasting_sentence if stall is not None else "",
        stall_since=stall.since if stall is not None and stall.lasting_sentence else None,
    )


def _extremes(progress: Mapping[Rank, RankProgress], number: int) -> tuple[int | None, float, int]:
    """Return the least step, the longest step time and the last asked-for step of the ranks of a generation.

    It is one pass, since reading 10,000 ranks from memory takes longer than comparing them.
    """
    step, step_s, until_step = None, 0.0, 0
    for rank_progress in progress.values():
        if rank_progress.generation != number:
            continue
        if step is None or rank_progress.step < step:
            step = rank_progress.step
        if rank_progress.step_s > step_s:
            step_s = rank_progress.step_s
        if rank_progress.until_step > until_step:
            until_step = rank_progress.until_step
    return step, step_s, until_step


def _loss(progress: Mapping[Rank, RankProgress], spec: GenerationSpec | None) -> float | None:
    """Return the loss of the lowest rank that reports one, usually the first."""
    if spec is not None and progress:
        for rank in range(spec.world_size):
            one = progress.get(rank)
            if one is not None and one.generation == spec.number and one.loss is not None:
                return one.loss
    return None


def job_detail(context: ViewContext, job: str) -> op.JobDetail:
    """Return all but the recoveries, which are in the store. Raises NotFound."""
    record = context.job(job)
    spec, live = record.generation, context.state.job_runtime.get(job)
    progress = live.progress.by_rank if spec is not None and live is not None else {}
    return op.JobDetail(
        summary=job_summary(context.state, record),
        spec=record.spec,
        roster=spec.roster if spec else (),
        spares=tuple(membership.spares(context.state, record)),
        store=spec.store if spec else None,
        ranks=tuple(
            op.RankStatus(
                rank=rank_progress.rank,
                node=spec.node_of(rank_progress.rank),
                step=rank_progress.step,
                step_s=rank_progress.step_s,
                loss=rank_progress.loss,
                busy_s=rank_progress.busy_s,
                snapshot_every=rank_progress.snapshot_every,
            )
            for rank_progress in map(progress.__getitem__, sorted(progress))
            if spec is not None and rank_progress.generation == spec.number and rank_progress.rank < spec.world_size
        ),
        ineligible_nodes=ineligible_nodes(context.state, record),
        created_at=record.progress.created_at,
        since=record.status.since,
        audits=_job_audits(record),
    )


def _job_audits(record: JobRecord) -> op.JobAudits:
    found = record.audits
    return op.JobAudits(
        preset=record.spec.sdc,
        mode=record.spec.sdc_mode,
        off=found.off,
        not_compared=tuple(found.not_compared.values()),
        reports=tuple(found.reports),
        withdrawn=tuple(found.withdrawn),
        voting_off_reason=found.voting_off_reason,
    )


def fleet_status(context: ViewContext, jobs: Iterable[op.JobSummary]) -> op.FleetStatus:
    """Return the fleet's status; ``jobs`` are those that have not ended."""
    state = context.state
    needs = list_needs(state, context.now())
    return op.FleetStatus(
        version=__version__,
        epoch=context.epoch,
        now=context.now(),
        started_at=context.started_at,
        nodes=node_counts(state, context.now()),
        jobs=tuple(jobs),
        connected_nodes=context.outbox.connected_count(),
        budget_left=context.budget_left(),
        breaker=state.fleet.breaker_reason,
        newest_event=context.newest_event(),
        breaker_at=state.fleet.breaker_since,
        database_outage=state.database.outage,
        outbreaks=outbreaks(state),
        needs=tuple(needs[:NEEDS_LISTED]),
        need_count=len(needs),
    )


def budget_status(context: ViewContext) -> operator_history.BudgetStatus:
    state, fleet = context.state, context.state.fleet
    return operator_history.BudgetStatus(
        window_s=state.policy.budget.window_s,
        breaker=fleet.breaker_reason,
        breaker_at=fleet.breaker_since,
        scopes=tuple(
            operator_history.BudgetScope(
                kind=scope.kind,
                name=scope.name,
                limit=scope.limit,
                used=scope.used,
                remaining=0 if fleet.breaker_reason else scope.remaining,
                nodes=scope.node_count,
                next_free_at=0.0 if fleet.breaker_reason else scope.next_free_at,
            )
            for scope in eviction_scopes(state, context.now())
        ),
        deferred=tuple(
            operator_history.DeferredEviction(
                node=record.node,
                finding=record.health.deferred_eviction_key,
                deferred_by=record.health.eviction_deferred_by,
            )
            for record in state.nodes.values()
            if record.health.deferred_eviction_key
        ),
    )


# ---- progress history
# Samples live in memory and begin again when another controller leads.

SAMPLES_KEPT = 720
"""Samples of a job. When it has more, every second one is dropped and the interval doubles."""
INTERVAL_S = 1.0  # between a job's first samples
RANKS_PER_SECOND = 1000
"""A job's interval grows by a second for each so many ranks, because a sample is linear in them."""


class _Track(msgspec.Struct):
    """One job's samples. ``created_at`` tells a new job of the same name from the old one."""

    created_at: float
    interval_s: float
    due_at: float = 0.0
    samples: list[ProgressSample] = []


class ProgressRecorder:
    """Keeps running jobs' progress over their whole life, in a bounded number of samples for charts."""

    def __init__(self, state: FleetState, now: Callable[[], float]) -> None:
        self._state = state
        self._now = now
        self._tracks: dict[str, _Track] = {}

    def history(self, job: str, since: float = 0.0) -> ProgressHistory:
        """Return the job's samples after ``since`` (wall seconds), oldest first."""
        track = self._tracks.get(job)
        if track is None:
            return ProgressHistory(job=job, interval_s=INTERVAL_S)
        newer = tuple(sample for sample in track.samples if sample.at > since)
        return ProgressHistory(job=job, interval_s=track.interval_s, samples=newer)

    def due_jobs(self) -> list[str]:
        """Return the running jobs whose next sample is due, and forget deleted ones."""
        jobs, now = self._state.jobs, self._now()
        self._tracks = {name: track for name, track in self._tracks.items() if name in jobs}
        running = (name for name, job in jobs.items() if job.is_running)
        return [name for name in running if name not in self._tracks or now >= self._tracks[name].due_at]

    def sample(self, name: str) -> None:
        """Take one sample of a job, if it still exists."""
        job, now = self._state.jobs.get(name), self._now()
        if job is None:
            return
        track = self._tracks.get(name)
        if track is None or track.created_at != job.progress.created_at:
            track = self._tracks[name] = _Track(created_at=job.progress.created_at, interval_s=INTERVAL_S)
        one = job_summary(self._state, job)
        track.due_at = now + max(track.interval_s, one.world_size / RANKS_PER_SECOND)
        fields = ("generation", "step", "world_size", "step_s", "loss")
        track.samples.append(ProgressSample(at=now, **{name: getattr(one, name) for name in fields}))
        if len(track.samples) > SAMPLES_KEPT:
            track.samples = track.samples[::2]
            track.interval_s *= 2

    async def run(self) -> None:
        """Sample until cancelled, one job in each turn of the event loop."""
        while True:
            for name in self.due_jobs():
                self.sample(name)
                await asyncio.sleep(0)
            await asyncio.sleep(INTERVAL_S / 2)

"""Export the controller's metrics to Prometheus.

A fleet has thousands of nodes, so per-node metrics come from the agents. The few families here that name nodes, racks
or ranks are bounded (``bounded_families``).
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from typing import Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from everstep import __version__
from everstep.vocabulary import AuditKind, Decision, GenerationReason, JobState, NodeState, Severity, Verdict
from everstep.wire.v1.operator import JobSummary
from everstep_controller.core import events as ev
from everstep_controller.core.health.outbreaks import active_outbreaks
from everstep_controller.core.judgement.audits import OUTCOMES, PROGRAM
from everstep_controller.core.needs import list_needs
from everstep_controller.core.state import FleetState, Ignored
from everstep_controller.read_models import bounded_families, fleet_views
from everstep_controller.read_models.bounded_families import PREFIX, LateRanks
from everstep_controller.store.rows import EventLogRow

_FAST = (0.00001, 0.0000316, 0.0001, 0.000316, 0.001, 0.00316, 0.01, 0.0316, 0.1, 1.0)
_COMMIT = (0.0001, 0.000316, 0.001, 0.00316, 0.01, 0.0316, 0.1, 0.316, 1.0, 10.0)
_RECOVERY = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0)
_RECOVERY_REASONS = tuple(str(reason) for reason in GenerationReason if reason is not GenerationReason.FORMED)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class BufferedAnswers(Protocol):
    """Answers in progress, as far as their gauges need them."""

    def __len__(self) -> int: ...

    @property
    def buffered_bytes(self) -> int:
        """Bytes that clients have not read yet."""


class Metrics:
    """Counters and histograms, in one registry per controller.

    A series with predictable labels exists from the start, at 0, because ``increase()`` misses the first event of a
    series that begins with it. ``urgencies`` and ``request_limits`` are such labels: of requests that the full queue
    sheds, and of requests over a limit. ``heartbeats`` is the number of heartbeats answered.
    """

    def __init__(self, *, urgencies: Iterable[str] = (), request_limits: Iterable[str] = ()) -> None:
        self.registry = CollectorRegistry()
        self.heartbeats = 0
        ProcessCollector(registry=self.registry)
        self._events = self._counter("events", "Events handled by the core.", "kind")
        self._event_counters = {kind.__name__: self._events.labels(kind.__name__) for kind in get_args(ev.Event)}
        self._handle = self._histogram("event_handling_seconds", "Seconds to handle one event.", _FAST)
        self._commit = self._histogram("commit_seconds", "Seconds until a transaction is durable.", _COMMIT)
        self._commit_events = self._histogram("commit_events", "Events per transaction.", _COUNTS)
        self._shed = self._counter("requests_shed", "Requests refused because the queue was full.", "class")
        self.sessions_cut = self._counter(
            "agent_sessions_cut", "Sessions closed because the agent did not read its directives."
        )
        self.events_suppressed = self._counter(
            "events_suppressed", "Event log entries suppressed by the per-node rate limit."
        )
        self._reports = self._counter("reports", "Reports accepted.")
        self._repeated = self._counter("reports_repeated", "Reports dropped because they were accepted before.")
        self._refused = self._counter("requests_failed", "Requests answered with an error.", "route", "code")
        self._over_limit = self._counter(
            "requests_over_limit", "Requests refused because of a per-client limit.", "limit"
        )
        self._verdicts = self._counter("verdicts", "Verdicts given.", "decision")
        self._recoveries = self._counter("recoveries", "Generations that resumed training.", "run", "reason")
        self._recovery = self._histogram(
            "recovery_seconds", "Seconds from the decision to the last rank's first step.", _RECOVERY, "reason"
        )
        self._runs: set[str] = set()
        self._user_errors = self._counter("user_errors", "Exceptions raised by training functions.", "run")
        self.streams_cut = self._counter("event_streams_cut", "Event streams closed because of slow readers.")
        self.remediation_failures = self._counter(
            "external_call_failures", "Remediation, alert and observation calls that failed."
        )
        _export_version(self.registry)
        for family, labels in (
            (self._shed, urgencies),
            (self._over_limit, request_limits),
            (self._verdicts, Decision),
            (self._recovery, _RECOVERY_REASONS),
        ):
            for label in labels:
                family.labels(str(label))

    def watch(self, requests: BufferedAnswers, streams: BufferedAnswers) -> None:
        """Export the requests in progress and the open event streams."""
        self._gauge("requests_in_flight", "Requests in progress, without those of agents.", lambda: len(requests))
        self._gauge("answers_buffered_bytes", "Bytes of responses being sent.", lambda: requests.buffered_bytes)
        self._gauge("event_streams", "Open event streams.", lambda: len(streams))
        text = "Bytes not yet read by event-stream clients."
        self._gauge("event_streams_buffered_bytes", text, lambda: streams.buffered_bytes)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(PREFIX + name, text, registry=self.registry).set_function(value)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self.registry)

    def over_limit(self, limit: str) -> None:
        """Count a request that was refused for a per-client limit."""
        self._over_limit.labels(limit).inc()

    def observe_event(self, kind: str, seconds: float) -> None:
        self._event_counters[kind].inc()
        self._handle.observe(seconds)

    def observe_commit(self, seconds: float, events: int) -> None:
        self._commit.observe(seconds)
        self._commit_events.observe(events)

    def count_shed(self, urgency: str) -> None:
        self._shed.labels(urgency).inc()

    def count_reports(self, accepted: int, repeated: int) -> None:
        self._reports.inc(accepted)
        self._repeated.inc(repeated)

    def count_refused(self, route: str, code: str) -> None:
        self._refused.labels(route, code).inc()

    def count_verdicts(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self._verdicts.labels(verdict.decision).inc()

    def count_user_errors(self, rows: Iterable[EventLogRow]) -> None:
        for row in rows:
            if row.kind == "user_error":
                self._user_errors.labels(row.job).inc()

    def observe_recovery(self, job: str, reason: str, seconds: float) -> None:
        self._recoveries.labels(job, reason).inc()
        self._recovery.labels(reason).observe(seconds)

    def render(self, runs: Collection[str]) -> bytes:
        """Return all series in Prometheus' text format, with counters of the jobs ``runs`` and of no others."""
        for run in self._runs - set(runs):
            self._user_errors.remove(run)
            for reason in _RECOVERY_REASONS:
                self._recoveries.remove(run, reason)
        for run in set(runs) - self._runs:
            self._user_errors.labels(run)
            for reason in _RECOVERY_REASONS:
                self._recoveries.labels(run, reason)
        self._runs = set(runs)
        return generate_latest(self.registry)


_LEADER = ("leader", "1 if this controller leads, 0 if it is standby.")
_PERSISTENT_NODES = (
    "standby_persistent_nodes",
    "Nodes that repeatedly contact this controller while it is standby (0 on the leader).",
)


def _export_version(registry: CollectorRegistry) -> None:
    Gauge(PREFIX + "info", "The program.", ["version"], registry=registry).labels(__version__).set(1)


def standby_registry(persistent_nodes: Callable[[], int]) -> CollectorRegistry:
    """Return the metrics of a standby, with the number of nodes that contact it persistently."""
    registry = CollectorRegistry()
    _export_version(registry)
    for (name, text), value in ((_LEADER, lambda: 0), (_PERSISTENT_NODES, persistent_nodes)):
        Gauge(PREFIX + name, text, registry=registry).set_function(value)
    return registry


class FleetCollector(Collector):
    """Gauges read from the fleet's state at each scrape, and the heartbeats."""

    def __init__(
        self, context: fleet_views.ViewContext, metrics: Metrics, read_models: fleet_views.ReadModels | None = None
    ) -> None:
        self._context, self._metrics = context, metrics
        self._read_models = read_models or fleet_views.ReadModels()
        self._summaries: list[JobSummary] = []
        self._late: dict[str, LateRanks] = {}

    async def refresh(self, yield_to_agents: Callable[[], Awaitable[None]]) -> None:
        """Read nodes and jobs before ``collect``, and yield between them, because each job is linear in its ranks."""
        state, jobs, summaries = self._context.state, self._context.state.jobs, []
        await self._read_models.drift.refresh(state.nodes, yield_to_agents)
        late: dict[str, LateRanks] = {}
        for name in list(jobs):
            if name in jobs:
                summaries.append(fleet_views.job_summary(state, jobs[name]))
            await yield_to_agents()
            if name in jobs and jobs[name].is_running and (ranks := bounded_families.late_ranks(state, jobs[name])):
                late[name] = ranks
            await yield_to_agents()
        self._summaries, self._late = summaries, late

    def collect(self) -> Iterator[Metric]:
        context, state = self._context, self._context.state
        # From a plain integer: a Counter's lock costs as much as the work it counts.
        yield CounterMetricFamily(PREFIX + "heartbeats", "Heartbeats answered.", value=self._metrics.heartbeats)
        yield _gauge("epoch", "Leader terms on this database.", context.epoch)
        yield _gauge("loop_lag_seconds", "Maximum lag of the event loop in the last second.", context.lag_s())
        yield _gauge(
            "time_ahead_of_clock_seconds", "Controller time minus the machine's clock.", context.clock_ahead_s()
        )
        yield _gauge(*_LEADER, 1)
        yield _gauge("queue_depth", "Requests waiting for their transaction.", context.queued())
        gaps = context.journal_gaps()
        yield CounterMetricFamily(PREFIX + "journal_gaps", "Gaps in the journal.", value=gaps)
        yield _gauge("remediations_open", "Remediations that have not ended.", context.open_remediations())
        report = context.standby_report()
        yield _gauge(*_PERSISTENT_NODES, 0)
        text = "Nodes that repeatedly contact a standby controller (maximum over standbys)."
        yield _gauge("nodes_contacting_standby", text, max(report.contacts.values(), default=0))
        text = "Consecutive leaders within the last hour that resigned because nodes could not reach them."
        yield _gauge("leader_resignations", text, report.resignations)
        yield from self._database()
        yield from _fleet(state, context.outbox, context.now())
        yield from bounded_families.need_families(list_needs(state, context.now()))
        yield from self._evictions(state)
        yield from _jobs(self._summaries)
        yield from _audits(state, self._summaries)
        yield from _storage_and_parity(state)
        yield from bounded_families.node_families(state, context.now())
        text = "Nodes that differ from the majority of like nodes in a value, such as their driver."
        yield _gauge_by("drifted_nodes", text, "value", self._read_models.drift.counts())
        yield from bounded_families.run_families(state, self._read_models, self._late, context.now())
        yield from bounded_families.probe_families(self._read_models.probes)

    def _database(self) -> Iterator[Metric]:
        outage = self._context.database_outage()
        outage_s = self._context.now() - outage.since if outage else 0.0
        buffered_bytes = outage.buffered_bytes if outage else 0
        yield _gauge("database_unavailable", "1 while the database cannot be written.", outage is not None)
        text = "Seconds since the database became unavailable; 0 while it is available."
        yield _gauge("database_outage_seconds", text, outage_s)
        yield _gauge("database_outage_buffered_bytes", "Approximate bytes of unwritten records.", buffered_bytes)

    def _evictions(self, state: FleetState) -> Iterator[Metric]:
        deferred = sum(bool(node.health.deferred_eviction_key) for node in state.nodes.values())
        is_open = bool(state.fleet.breaker_reason)
        yield _gauge("eviction_breaker_open", "1 while automatic eviction is stopped.", is_open)
        yield _gauge("eviction_budget_left", "Nodes that may be evicted now.", self._context.budget_left())
        yield _gauge("evictions_deferred", "Nodes whose eviction is deferred.", deferred)


def _fleet(state: FleetState, outbox: fleet_views.DirectiveCounts, now: float) -> Iterator[Metric]:
    yield _gauge("agents_connected", "Nodes with a session.", outbox.connected_count())
    yield _gauge("outbox_depth", "Directives not yet acknowledged.", outbox.total_pending())
    yield _gauge(
        "nodes_missing_heartbeats",
        "Silent or disconnected nodes that are not lost yet.",
        len(state.liveness.silent_nodes),
    )
    text = "1 while so many nodes are silent at once that none of them is declared lost."
    yield _gauge("correlated_silence", text, state.liveness.correlated_silence is not None)
    counts = fleet_views.node_counts(state, now)
    names = [*map(str, NodeState), fleet_views.IN_OUTBREAK, fleet_views.FAULTY]
    yield _gauge_by("nodes", "Nodes by state.", "state", {name: counts.get(name, 0) for name in names})
    outbreaks = active_outbreaks(state)
    affected = len({node for outbreak in outbreaks for node in outbreak.nodes})
    text = "Findings present on so many nodes that no node is evicted for them."
    yield _gauge("outbreaks", text, len(outbreaks))
    yield _gauge("outbreak_nodes", "Nodes with a finding that is an outbreak.", affected)
    found = Tally(finding.severity for node in state.nodes.values() for finding in node.all_findings())
    yield _gauge_by("node_findings", "Active findings.", "severity", {s.value: found[s] for s in Severity})
    ignored = CounterMetricFamily(PREFIX + "reports_ignored", "Reports the core ignored.", labels=["reason"])
    for reason in get_args(Ignored):
        ignored.add_metric([reason], state.counts.ignored.get(reason, 0))
    yield ignored


def _jobs(summaries: list[JobSummary]) -> Iterator[Metric]:
    info = GaugeMetricFamily(PREFIX + "job_state", "1 for the job's state.", labels=["run", "state"])
    for summary in summaries:
        for state in JobState:
            info.add_metric([summary.job, state.value], summary.state is state)
    yield info
    for name, text, field in (
        ("job_generation", "Generation number.", "generation"),
        ("job_world_size", "Ranks of the roster.", "world_size"),
        ("job_spares", "Launchers that wait outside the roster.", "spares"),
        ("job_step", "Newest step that all ranks finished.", "step"),
        ("job_step_seconds", "Step time of the slowest rank.", "step_s"),
        ("job_loss", "Newest loss reported by the lowest rank.", "loss"),
    ):
        yield _gauge_by(name, text, "run", {summary.job: getattr(summary, field) for summary in summaries})
    committed = {summary.job: summary.committed.step if summary.committed else 0 for summary in summaries}
    yield _gauge_by("job_committed_step", "Step of the newest committed version; 0 before the first.", "run", committed)
    verified = {summary.job: summary.verified.step if summary.verified else 0 for summary in summaries}
    yield _gauge_by("job_verified_step", "Step of the newest verified version; 0 before the first.", "run", verified)


def _audits(state: FleetState, summaries: list[JobSummary]) -> Iterator[Metric]:
    jobs = {name for name, job in state.jobs.items() if job.spec.keeps_audited_version}
    audited = {
        summary.job: summary.audited.step if summary.audited else 0 for summary in summaries if summary.job in jobs
    }
    text = "Step of the newest version verified by audits; 0 before the first."
    yield _gauge_by("job_audited_step", text, "run", audited)
    lag = {summary.job: max(0, summary.step - audited[summary.job]) for summary in summaries if summary.job in jobs}
    text = "Steps since the newest version verified by audits, which are computed again after a conviction."
    yield _gauge_by("job_audited_step_lag", text, "run", lag)
    cases = CounterMetricFamily(
        PREFIX + "audit_cases", "Differences found by audits of training.", labels=["audit", "outcome"]
    )
    for audit in AuditKind:
        for outcome in (*OUTCOMES.values(), PROGRAM):
            cases.add_metric([audit, outcome], state.counts.audits.get((audit, outcome), 0))
    yield cases


def _storage_and_parity(state: FleetState) -> Iterator[Metric]:
    jobs = {name: job for name, job in state.jobs.items() if job.spec.spill is not None or job.spills.stored}
    stored = {name: job.spills.stored[-1] for name, job in jobs.items() if job.spills.stored}
    steps = {name: stored[name].version.step if name in stored else 0 for name in jobs}
    yield _gauge_by("job_storage_step", "Step of the newest checkpoint on storage; 0 before the first.", "run", steps)
    text = "Time at which the newest checkpoint on storage was complete (unix time)."
    yield _gauge_by(
        "job_storage_timestamp_seconds", text, "run", {n: checkpoint.stored_at for n, checkpoint in stored.items()}
    )
    pending = {name: job.spills.pending is not None for name, job in jobs.items()}
    yield _gauge_by("job_spill_in_progress", "1 while a version is being written to storage.", "run", pending)
    failed = {name: job.spills.failed_versions for name, job in jobs.items()}
    yield _gauge_by("job_spills_failed", "Versions that could not be written to storage.", "run", failed)
    parity = {name: job.parity for name, job in state.jobs.items() if job.spec.parity_group_size}
    steps = {
        name: parity_state.active.protection.version.step if parity_state.active else 0
        for name, parity_state in parity.items()
    }
    yield _gauge_by("job_parity_step", "Step of the version protected by parity; 0 before the first.", "run", steps)
    failures = {name: parity_state.failures_in_row for name, parity_state in parity.items()}
    yield _gauge_by("job_parity_failures", "Consecutive versions without parity.", "run", failures)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _gauge_by(name: str, text: str, label: str, values: Mapping[str, float | None]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        if value is not None:
            family.add_metric([key], value)
    return family

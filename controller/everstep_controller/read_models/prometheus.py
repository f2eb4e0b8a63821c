"""Export the controller's metrics to Prometheus.

======================================================  =========  =====================================================
name                                                    kind       meaning
======================================================  =========  =====================================================
everstep_controller_info{version}                       gauge      1
everstep_controller_epoch                               gauge      number of take-overs of this database
everstep_controller_events_total{kind}                  counter    events handled by the core
everstep_controller_event_handling_seconds              histogram  the core's time per event
everstep_controller_commit_seconds                      histogram  time until a transaction is durable
everstep_controller_commit_events                       histogram  events per transaction
everstep_controller_loop_lag_seconds                    gauge      worst lateness of the event loop, last second
everstep_controller_time_ahead_of_clock_seconds                 gauge      controller's time minus the machine's clock
everstep_controller_leader                              gauge      1 if this controller leads, 0 if it stands by
everstep_controller_database_unavailable                gauge      1 while the database cannot be written
everstep_controller_database_outage_seconds             gauge      the outage's duration, 0 without one
everstep_controller_database_outage_buffered_bytes      gauge      approximate bytes buffered during the outage
everstep_controller_queue_depth                         gauge      stimuli waiting for their transaction
everstep_controller_requests_shed_total{class}          counter    stimuli refused because the queue was full
everstep_controller_agent_sessions_cut_total            counter    sessions whose agent did not read its pushes
everstep_controller_heartbeats_total                    counter    heartbeats answered
everstep_controller_reports_total                       counter    reports taken
everstep_controller_reports_repeated_total              counter    reports dropped because they were taken before
everstep_controller_events_suppressed_total             counter    audit entries beyond a node's allowance
everstep_controller_reports_ignored_total{reason}       counter    reports the core dropped by rule
everstep_controller_requests_failed_total{route,code}  counter    requests answered with an error
everstep_controller_requests_over_limit_total{limit}    counter    refused: too many requests "in_flight", or too many
                                                                   unsent "bytes"
everstep_controller_requests_in_flight                  gauge      requests in progress, without agents'
everstep_controller_answers_buffered_bytes              gauge      bytes of their responses being sent
everstep_controller_journal_gaps_total                  counter    gaps in the journal
everstep_controller_standby_persistent_nodes                    gauge      nodes that contact this standby persistently
everstep_controller_nodes_contacting_standby            gauge      nodes that contact another controller, a standby
everstep_controller_leader_resignations                 gauge      resignations in a row: see resign_after_s
everstep_controller_agents_connected                    gauge      nodes with a session
everstep_controller_nodes{state}                        gauge      nodes by state, or ``outbreak``
everstep_controller_outbreaks                           gauge      findings on so many nodes that none is evicted
everstep_controller_outbreak_nodes                      gauge      nodes with such a finding
everstep_controller_nodes_missing_heartbeats            gauge      nodes past their deadline or cut off, not yet lost
everstep_controller_correlated_silence                  gauge      1 while many nodes are silent, which spares them all
everstep_controller_node_findings{severity}             gauge      active findings
everstep_controller_outbox_depth                        gauge      unacknowledged directives
everstep_controller_verdicts_total{decision}            counter    verdicts given
everstep_controller_eviction_breaker_open               gauge      1 while automatic eviction is stopped
everstep_controller_eviction_budget_left                gauge      nodes that may be evicted now
everstep_controller_evictions_deferred                  gauge      nodes whose eviction is deferred
everstep_controller_remediations_open                   gauge      remediations (cordons, resets, ...) not ended
everstep_controller_job_state{run,state}                gauge      1 for the state the job is in
everstep_controller_job_generation{run}                 gauge      generation number
everstep_controller_job_world_size{run}                 gauge      ranks of the roster
everstep_controller_job_spares{run}                     gauge      launchers waiting outside the roster
everstep_controller_job_step{run}                       gauge      newest step that all ranks finished
everstep_controller_job_step_seconds{run}               gauge      slowest rank's step time
everstep_controller_job_loss{run}                       gauge      newest loss reported by the lowest rank
everstep_controller_job_committed_step{run}             gauge      step of the newest committed version
everstep_controller_job_verified_step{run}              gauge      step of the newest verified version
everstep_controller_job_parity_step{run}                gauge      step of the version protected by parity
everstep_controller_job_parity_failures{run}            gauge      consecutive versions without parity
everstep_controller_job_storage_step{run}               gauge      step of the newest checkpoint on storage
everstep_controller_job_storage_timestamp_seconds{run}  gauge      its completion, unix time
everstep_controller_job_spill_in_progress{run}          gauge      1 while a version is written to storage
everstep_controller_job_spills_failed{run}              gauge      versions whose writing to storage failed
everstep_controller_recoveries_total{run,reason}        counter    recovered generations, without the first
everstep_controller_recovery_seconds{reason}            histogram  decision to the last rank's first step
everstep_controller_user_errors_total{run}              counter    exceptions of training functions
everstep_controller_external_call_failures_total          counter    external calls that were given up
everstep_controller_event_streams                       gauge      open event streams
everstep_controller_event_streams_buffered_bytes        gauge      bytes that their readers have not taken yet
everstep_controller_event_streams_cut_total             counter    event streams cut off because of slow readers
======================================================  =========  =====================================================

No series has a node label, because a fleet has thousands. Per-node metrics come from the agents.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from everstep import __version__
from everstep.vocabulary import Decision, GenerationReason, JobState, NodeState, Severity, Verdict
from everstep.wire.v1.operator import JobSummary
from everstep_controller.api.admission import LIMITS, AdmissionControl
from everstep_controller.api.stream import StreamReservations
from everstep_controller.core import events as ev
from everstep_controller.core.health.outbreaks import active_outbreaks
from everstep_controller.core.state import FleetState, Ignored
from everstep_controller.read_models import fleet_views
from everstep_controller.runtime.intake import Urgency
from everstep_controller.runtime.push import Outbox
from everstep_controller.store.rows import AuditRow

_PREFIX = "everstep_controller_"
_FAST = (0.00001, 0.0000316, 0.0001, 0.000316, 0.001, 0.00316, 0.01, 0.0316, 0.1, 1.0)
_COMMIT = (0.0001, 0.000316, 0.001, 0.00316, 0.01, 0.0316, 0.1, 0.316, 1.0, 10.0)
_RECOVERY = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0)
_RECOVERY_REASONS = tuple(str(reason) for reason in GenerationReason if reason is not GenerationReason.FORMED)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters and histograms, in one registry per controller.

    A series with predictable labels exists from the start, at 0, because ``increase()`` misses the first event of a
    series that begins with it. ``heartbeats`` is the number of heartbeats answered.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._events = self._counter("events", "Events the core has handled.", "kind")
        self._of_kind = {kind.__name__: self._events.labels(kind.__name__) for kind in get_args(ev.Event)}
        self._handle = self._histogram("event_handling_seconds", "The core's time per event.", _FAST)
        self._commit = self._histogram("commit_seconds", "A transaction, until it is durable.", _COMMIT)
        self._commit_events = self._histogram("commit_events", "Events that shared a transaction.", _COUNTS)
        self._shed = self._counter("requests_shed", "Stimuli refused because too many waited.", "class")
        for urgency in Urgency:
            self._shed.labels(urgency.value)
        self.sessions_cut = self._counter("agent_sessions_cut", "Sessions whose agent did not read its pushes.")
        self.heartbeats = 0
        self.registry.register(_HeartbeatCollector(self))
        self.events_suppressed = self._counter("events_suppressed", "Lines a node caused beyond its allowance.")
        self._reports = self._counter("reports", "Reports taken.")
        self._repeated = self._counter("reports_repeated", "Reports dropped: their number was taken before.")
        self._refused = self._counter("requests_failed", "Requests answered with an error.", "route", "code")
        self._over = self._counter("requests_over_limit", "Refused since the bearer had too much at once.", "limit")
        for limit in LIMITS:  # a series at 0 from the start
            self._over.labels(limit)
        self._under_way = self._plain_gauge("requests_in_flight", "Requests under way that are no agent's.")
        self._answer_bytes = self._plain_gauge("answers_buffered_bytes", "Of answers that are being sent.")
        self._verdicts = self._counter("verdicts", "Verdicts given.", "decision")
        for decision in Decision:
            self._verdicts.labels(decision)
        self._recoveries = self._counter("recoveries", "Generations that came to step.", "run", "reason")
        self._recovery = Histogram(
            _PREFIX + "recovery_seconds",
            "Decision to the last rank's first step.",
            ["reason"],
            buckets=_RECOVERY,
            registry=self.registry,
        )
        for reason in _RECOVERY_REASONS:
            self._recovery.labels(reason)
        self._runs: set[str] = set()
        self._user_errors = self._counter("user_errors", "Exceptions of a training function's own.", "run")
        self.streams_cut = self._counter("event_streams_cut", "Event streams whose readers took nothing for too long.")
        self._streams = self._plain_gauge("event_streams", "Event streams that are open.")
        self._streams_bytes = self._plain_gauge(
            "event_streams_buffered_bytes", "What their readers have not taken yet."
        )
        self.remediation_failures = self._counter(
            "external_call_failures",
            "Calls to an external system (remediation backend, alert receiver) that failed finally.",
        )
        Gauge(_PREFIX + "info", "The program.", ["version"], registry=self.registry).labels(__version__).set(1)

    def watch_requests(self, admission: AdmissionControl) -> None:
        """Export the requests in progress."""
        self._under_way.set_function(lambda: len(admission))
        self._answer_bytes.set_function(lambda: admission.buffered_bytes)

    def over_limit(self, limit: str) -> None:
        """Count a request that was refused for one of LIMITS."""
        self._over.labels(limit).inc()

    def watch_streams(self, readers: StreamReservations) -> None:
        """Export the open event streams."""
        self._streams.set_function(lambda: len(readers))
        self._streams_bytes.set_function(lambda: readers.buffered_bytes)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def _plain_gauge(self, name: str, text: str) -> Gauge:
        return Gauge(_PREFIX + name, text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=tuple(buckets), registry=self.registry)

    def observe_event(self, kind: str, seconds: float) -> None:
        self._of_kind[kind].inc()
        self._handle.observe(seconds)

    def observe_commit(self, seconds: float, events: int) -> None:
        self._commit.observe(seconds)
        self._commit_events.observe(events)

    def count_shed(self, urgency: Urgency) -> None:
        self._shed.labels(urgency.value).inc()

    def count_reports(self, accepted: int, repeated: int) -> None:
        self._reports.inc(accepted)
        self._repeated.inc(repeated)

    def count_refused(self, route: str, code: str) -> None:
        self._refused.labels(route, code).inc()

    def count_verdicts(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self._verdicts.labels(verdict.decision).inc()

    def count_user_errors(self, rows: Iterable[AuditRow]) -> None:
        for row in rows:
            if row.kind == "user_error":
                self._user_errors.labels(row.job).inc()

    def observe_recovery(self, job: str, reason: str, seconds: float) -> None:
        self._recoveries.labels(job, reason).inc()
        self._recovery.labels(reason).observe(seconds)

    def render(self, runs: Collection[str]) -> bytes:
        """Return all series in Prometheus' text format.

        Args:
            runs: jobs that the controller knows. Each has its counters from now on; counters of others are removed.
        """
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


class _HeartbeatCollector(Collector):
    """Exports heartbeats from a plain integer: a Counter's lock costs as much as the work it counts."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(_PREFIX + "heartbeats", "Heartbeats answered.", value=self._metrics.heartbeats)


class FleetCollector(Collector):
    """Gauges read from the fleet's state at each scrape."""

    def __init__(self, context: fleet_views.ViewContext) -> None:
        self._context = context
        self._jobs_seen: list[JobSummary] = []

    async def refresh(self, yield_to_agents: Callable[[], Awaitable[None]]) -> None:
        """Read the jobs before ``collect``, one per ``turn``, because each is linear in its ranks."""
        jobs, seen = self._context.state.jobs, []
        for name in list(jobs):
            if name in jobs:
                seen.append(fleet_views.job_summary(self._context.state, jobs[name]))
            await yield_to_agents()
        self._jobs_seen = seen

    def collect(self) -> Iterator[Metric]:
        context = self._context
        yield _gauge("epoch", "Lives of a controller over this database.", context.epoch)
        yield _gauge("loop_lag_seconds", "Worst lateness of the event loop in the last second.", context.lag_s())
        yield _gauge(
            "time_ahead_of_clock_seconds", "The controller's time minus the machine's clock.", context.clock_ahead_s()
        )
        yield _gauge("leader", "1 where this controller leads, 0 where it stands by.", 1)
        yield _gauge("queue_depth", "Stimuli that wait for their transaction.", context.queued())
        gaps = "Places where the journal lacks something."
        yield CounterMetricFamily(_PREFIX + "journal_gaps", gaps, value=context.journal_gaps())
        yield _gauge("remediations_open", "Remedies that have not ended.", context.open_remediations())
        told = context.standby_report()
        away = "Nodes that knock again and again at a controller that stands by, of one the most."
        yield _gauge(
            "standby_persistent_nodes",
            "Nodes that keep contacting this controller although it is a standby; 0 on the leader.",
            0,
        )
        yield _gauge("nodes_contacting_standby", away, max(told.contacts.values(), default=0))
        unreached = "Leaders in a row, within the hour, whom nodes did not reach."
        yield _gauge("leader_resignations", unreached, told.resignations)
        yield from self._database()
        yield from self._fleet(context.state, context.outbox)
        yield from self._evictions(context.state)
        yield from _jobs(self._jobs_seen)
        yield from _storage_and_parity(context.state)

    def _database(self) -> Iterator[Metric]:
        away = self._context.database_outage()
        away_s = self._context.now() - away.since if away else 0.0
        yield _gauge("database_unavailable", "1 while the database cannot be written.", away is not None)
        yield _gauge("database_outage_seconds", "For how long it cannot, 0 while it can.", away_s)
        yield _gauge(
            "database_outage_buffered_bytes", "About what waits in memory for it.", away.buffered_bytes if away else 0
        )

    def _evictions(self, state: FleetState) -> Iterator[Metric]:
        held = sum(bool(node.health.deferred_eviction_key) for node in state.nodes.values())
        yield _gauge(
            "eviction_breaker_open", "1 while automatic eviction is stopped.", bool(state.fleet.breaker_reason)
        )
        yield _gauge("eviction_budget_left", "Nodes that may be evicted now.", self._context.budget_left())
        yield _gauge("evictions_deferred", "Nodes that are convicted, and stay.", held)

    def _fleet(self, state: FleetState, outbox: Outbox) -> Iterator[Metric]:
        together = state.correlated_silence is not None
        yield _gauge("agents_connected", "Nodes with a session.", outbox.connected_count())
        yield _gauge("outbox_depth", "Directives not acknowledged yet.", outbox.total_pending())
        yield _gauge(
            "nodes_missing_heartbeats", "Nodes over their deadline or cut off, not lost yet.", len(state.silent_nodes)
        )
        yield _gauge("correlated_silence", "1 while many are silent at once, and none is lost for it.", together)
        counts, names = fleet_views.node_counts(state), [*(s.value for s in NodeState), fleet_views.IN_OUTBREAK]
        yield _gauge_by("nodes", "Nodes by state.", "state", {name: counts.get(name, 0) for name in names})
        outbreaks = active_outbreaks(state)
        ill = len({node for one in outbreaks for node in one.nodes})
        yield _gauge("outbreaks", "Findings that stand on so many nodes that none is evicted.", len(outbreaks))
        yield _gauge("outbreak_nodes", "Nodes that such a finding stands on.", ill)
        found = Tally(finding.severity for node in state.nodes.values() for finding in node.all_findings())
        text = "Findings raised and not cleared."
        yield _gauge_by("node_findings", text, "severity", {s.value: found[s] for s in Severity})
        dropped = "Reports the core dropped by rule."
        ignored = CounterMetricFamily(_PREFIX + "reports_ignored", dropped, labels=["reason"])
        for reason in get_args(Ignored):
            ignored.add_metric([reason], state.ignored_counts.get(reason, 0))
        yield ignored


def _jobs(summaries: list[JobSummary]) -> Iterator[Metric]:
    info = GaugeMetricFamily(_PREFIX + "job_state", "1 for the state the job is in.", labels=["run", "state"])
    for one in summaries:
        for state_name in JobState:
            info.add_metric([one.job, state_name.value], one.state is state_name)
    yield info
    columns: tuple[tuple[str, str, dict[str, float | None]], ...] = (
        ("job_generation", "Generation number.", {s.job: s.generation for s in summaries}),
        ("job_world_size", "Ranks of the roster.", {s.job: s.world_size for s in summaries}),
        ("job_spares", "Launchers that wait outside the roster.", {s.job: s.spares for s in summaries}),
        ("job_step", "Newest step that all ranks finished.", {s.job: s.step for s in summaries}),
        ("job_step_seconds", "Slowest rank's step time.", {s.job: s.step_s for s in summaries}),
        ("job_loss", "Newest loss of the lowest rank.", {s.job: s.loss for s in summaries}),
        (
            "job_committed_step",
            "Step of the newest committed version.",
            {s.job: s.committed.step if s.committed else None for s in summaries},
        ),
        (
            "job_verified_step",
            "Step of the newest verified version.",
            {s.job: s.verified.step if s.verified else None for s in summaries},
        ),
    )
    for name, text, values in columns:
        yield _gauge_by(name, text, "run", values)


def _storage_and_parity(state: FleetState) -> Iterator[Metric]:
    """Yield metrics of jobs' parity and stored checkpoints."""
    jobs = {name: job for name, job in state.jobs.items() if job.spec.spill is not None or job.stored_checkpoints}
    parity = {name: job for name, job in state.jobs.items() if job.spec.parity_group_size}
    columns: tuple[tuple[str, str, dict[str, float | None]], ...] = (
        (
            "job_storage_step",
            "Step of the newest checkpoint on storage.",
            {
                name: job.stored_checkpoints[-1].version.step if job.stored_checkpoints else None
                for name, job in jobs.items()
            },
        ),
        (
            "job_storage_timestamp_seconds",
            "When the newest checkpoint on storage was whole, unix time.",
            {
                name: job.stored_checkpoints[-1].stored_at if job.stored_checkpoints else None
                for name, job in jobs.items()
            },
        ),
        (
            "job_spill_in_progress",
            "1 while a version is on its way to storage.",
            {name: float(job.pending_spill is not None) for name, job in jobs.items()},
        ),
        (
            "job_spills_failed",
            "Versions that were to be written to storage, and were given up.",
            {name: float(job.spills_failed) for name, job in jobs.items()},
        ),
        (
            "job_parity_step",
            "Step of the version that parity keeps.",
            {
                name: job.active_protection.protection.version.step if job.active_protection else None
                for name, job in parity.items()
            },
        ),
        (
            "job_parity_failures",
            "Versions in a row whose parity was not made.",
            {name: float(job.protection_failures) for name, job in parity.items()},
        ),
    )
    for name, text, values in columns:
        yield _gauge_by(name, text, "run", values)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)


def _gauge_by(name: str, text: str, label: str, values: dict[str, float | None] | dict[str, int]) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, text, labels=[label])
    for key, value in values.items():
        if value is not None:
            family.add_metric([key], value)
    return family

"""Yield the controller's metric families that name nodes, racks or ranks, each with a bounded number of series.

A fleet has thousands of nodes and a run has thousands of ranks. These families therefore show only those that a person
would look at first: nodes out of service, racks with the most of them, and the ranks that the others wait for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from heapq import nlargest, nsmallest
from operator import attrgetter

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from everstep.ids import NodeId, Rank
from everstep.vocabulary import RECOVERY_PHASES, Action, NodeState
from everstep.wire.v1.operator import Need
from everstep_controller.core.needs import NeedKind
from everstep_controller.core.records import JobRecord, NodeRecord
from everstep_controller.core.state import FleetState
from everstep_controller.read_models.fleet_views import FAULTY, IN_OUTBREAK, ProbeTracker, ReadModels, effective_state

PREFIX = "everstep_controller_"
_BUSY_S = attrgetter("busy_s")
NODES_SHOWN = 100  # nodes out of service that have a series; those that changed last come first
NEEDS_SHOWN = 100  # matters that need a person and have a series; the gravest come first
RACKS_SHOWN = 50  # racks that have a series; those with the most nodes out of service come first
RANKS_SHOWN = 10  # ranks of a run that have a series; those that work longest on a step come first
REASON_CHARACTERS = 200  # of the sentence that explains a node's state, in a label


class LateRanks(msgspec.Struct, frozen=True):
    """Ranks of a run that work longest on a step."""

    median_s: float  # lower median of all ranks' own seconds per step
    slowest: tuple[tuple[Rank, NodeId, float], ...]  # rank, node and own seconds per step, longest first


def late_ranks(state: FleetState, job: JobRecord) -> LateRanks | None:
    """Return the ranks that the others wait for; None if no rank measures its own time. Linear in the ranks."""
    spec, live = job.generation, state.job_runtime.get(job.job)
    if spec is None or live is None:
        return None
    number, ranks = spec.number, spec.world_size
    measured = [
        progress
        for progress in live.progress.by_rank.values()
        if progress.busy_s is not None and progress.generation == number and progress.rank < ranks
    ]
    if not measured:
        return None
    own_s = sorted(map(_BUSY_S, measured))  # numbers alone sort five times as fast as pairs with their ranks
    limit = own_s[-RANKS_SHOWN:][0]
    slowest = sorted((progress for progress in measured if _BUSY_S(progress) >= limit), key=_BUSY_S, reverse=True)
    shown = slowest[:RANKS_SHOWN]
    named = tuple((progress.rank, spec.node_of(progress.rank), _BUSY_S(progress)) for progress in shown)
    return LateRanks(own_s[(len(own_s) - 1) // 2], named)


class NextStep(StrEnum):
    """What a node out of service waits for, apart from an ``Action``; ``docs/how-to/monitoring.md`` explains each."""

    HEARTBEAT = "heartbeat"
    FINDINGS_CLEAR = "findings_clear"
    DIAGNOSTICS = "diagnostics"
    OPERATOR = "operator"
    RELEASE = "release"
    END_OF_OUTBREAK = "end_of_outbreak"


_NEXT_BY_STATE: dict[str, NextStep | Action] = {
    IN_OUTBREAK: NextStep.END_OF_OUTBREAK,
    FAULTY: NextStep.OPERATOR,
    NodeState.SUSPECT: NextStep.HEARTBEAT,
    NodeState.LOST: NextStep.HEARTBEAT,
    NodeState.HELD: NextStep.RELEASE,
    NodeState.REPAIR: Action.REPAIR,
    NodeState.PROBATION: NextStep.DIAGNOSTICS,
}


def next_step(record: NodeRecord, shown: str) -> NextStep | Action:
    """Return what a node in the state ``shown`` waits for."""
    if shown in _NEXT_BY_STATE:
        return _NEXT_BY_STATE[shown]
    plan = record.quarantine.plan
    if record.quarantine.needs_operator:
        return NextStep.OPERATOR
    if plan is not None and plan.ladder_step < len(plan.ladder):
        return plan.ladder[plan.ladder_step]
    return NextStep.FINDINGS_CLEAR if record.quarantine.causes else NextStep.DIAGNOSTICS


def _rule(record: NodeRecord) -> str:
    """Return the rule that took the node out of service, or that of its gravest finding; "" if there is none."""
    if record.quarantine.plan is not None and record.quarantine.plan.rule_id:
        return record.quarantine.plan.rule_id
    gravest = max(record.all_findings(), key=lambda finding: finding.severity.gravity, default=None)
    return (gravest.rule or str(gravest.kind)) if gravest is not None else ""


def need_families(needs: Sequence[Need]) -> Iterator[Metric]:
    """Yield what needs a person: the first ``NEEDS_SHOWN`` with all their labels, and the number of all by kind."""
    since = GaugeMetricFamily(
        PREFIX + "need_since_timestamp_seconds",
        f"Time since which a matter needs a person (unix time), for the {NEEDS_SHOWN} gravest. GPU is the index on the "
        "node; finding is its kind, and XID.",
        labels=["kind", "severity", "subject", "node", "run", "gpu", "finding", "reason"],
    )
    for need in needs[:NEEDS_SHOWN]:
        labels = [need.kind, need.severity, need.subject, need.node, need.job, need.gpu, need.finding]
        since.add_metric([*labels, need.reason[:REASON_CHARACTERS]], need.since)
    yield since
    counted = Counter(need.kind for need in needs)
    by_kind = GaugeMetricFamily(PREFIX + "needs", "Matters that need a person.", labels=["kind"])
    for kind in NeedKind:
        by_kind.add_metric([kind], counted[kind])
    yield by_kind


def node_families(state: FleetState, now: float) -> Iterator[Metric]:
    """Yield which nodes are out of service and why, and the racks with the most of them."""
    shown_states = ((record, effective_state(state, record, now)) for record in state.nodes.values())
    unfit = [(record, shown) for record, shown in shown_states if shown != NodeState.HEALTHY]
    nodes = GaugeMetricFamily(
        PREFIX + "node_unfit_since_timestamp_seconds",
        f"Time since which a node is not healthy (unix time), for the {NODES_SHOWN} newest. The labels say why, and "
        "what the node waits for.",
        labels=["node", "rack", "state", "rule", "next", "reason"],
    )
    for record, shown in nlargest(NODES_SHOWN, unfit, key=lambda one: one[0].since):
        reason = record.sentence[:REASON_CHARACTERS]
        rack, step = record.identity.domain.rack, next_step(record, shown)
        nodes.add_metric([record.node, rack, shown, _rule(record), step, reason], record.since)
    yield nodes
    by_rack = dict.fromkeys(sorted({record.identity.domain.rack for record in state.nodes.values()}), 0)
    by_rack |= Counter(record.identity.domain.rack for record, _ in unfit)
    text = f"Nodes that are not healthy, for the {RACKS_SHOWN} racks with the most."
    racks = GaugeMetricFamily(PREFIX + "rack_unfit_nodes", text, labels=["rack"])
    for rack, count in nsmallest(RACKS_SHOWN, by_rack.items(), key=lambda one: -one[1]):
        racks.add_metric([rack], count)
    yield racks


def run_families(
    state: FleetState, read_models: ReadModels, late: dict[str, LateRanks], now: float
) -> Iterator[Metric]:
    """Yield each run's totals, the phases of its newest recovery, and the ranks in ``late``."""
    activity = CounterMetricFamily(
        PREFIX + "job_seconds",
        "Seconds that a run spent on an activity since this controller leads. Effective time is the share of training.",
        labels=["run", "activity"],
    )
    text = "Bytes of the versions committed since this controller leads."
    committed = CounterMetricFamily(PREFIX + "job_committed_bytes", text, labels=["run"])
    phases = GaugeMetricFamily(
        PREFIX + "job_recovery_phase_seconds",
        "Seconds of each phase in the newest finished recovery, of the slowest rank; 0 before the first.",
        labels=["run", "phase"],
    )
    text = "Time at which the newest finished recovery was decided (unix time); 0 before the first."
    recovered = GaugeMetricFamily(PREFIX + "job_recovery_timestamp_seconds", text, labels=["run"])
    for name, job in state.jobs.items():
        read_models.totals.record_state(job, now)
        for spent_on, seconds in read_models.totals.seconds(name).items():
            activity.add_metric([name, spent_on], seconds)
        committed.add_metric([name], read_models.totals.committed_bytes(name))
        recovery = read_models.recoveries.newest(name)
        for phase, seconds in _phases(recovery.phases_s if recovery is not None else {}).items():
            phases.add_metric([name, phase], seconds)
        recovered.add_metric([name], recovery.decided_at if recovery is not None else 0.0)
    yield from (activity, committed, phases, recovered)
    yield from _late_rank_families(late)


def _phases(seconds: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each known phase, and the sum of any others."""
    known = {phase: seconds.get(phase, 0.0) for phase in RECOVERY_PHASES}
    return known | {"other": sum(spent for phase, spent in seconds.items() if phase not in known)}


def _late_rank_families(late: dict[str, LateRanks]) -> Iterable[Metric]:
    text = "Median of the ranks' own seconds per step, without waiting for other ranks."
    median = GaugeMetricFamily(PREFIX + "job_rank_busy_median_seconds", text, labels=["run"])
    text = f"Own seconds per step above the run's median, for the {RANKS_SHOWN} slowest ranks of each run."
    lateness = GaugeMetricFamily(PREFIX + "job_rank_lateness_seconds", text, labels=["run", "rank", "node"])
    for run, ranks in late.items():
        median.add_metric([run], ranks.median_s)
        for rank, node, own_s in ranks.slowest:
            lateness.add_metric([run, str(rank), node], own_s - ranks.median_s)
    return (median, lateness)


def probe_families(probes: ProbeTracker) -> Iterator[Metric]:
    """Yield the results of probes, and what the newest one measured at its largest size."""
    text = "Probes that ended since this controller leads."
    results = CounterMetricFamily(PREFIX + "probes", text, labels=["result"])
    for result, count in probes.results.items():
        results.add_metric([result], count)
    yield results
    rows = probes.newest_rows
    text = "Lowest bandwidth of a member in the newest measured probe, at its largest size; 0 before the first."
    lowest = rows[-1].bandwidth_bytes_per_s if rows else 0.0
    yield GaugeMetricFamily(PREFIX + "probe_bandwidth_bytes_per_second", text, value=lowest)
    text = "Longest latency of a member in the newest measured probe, at its smallest size; 0 before the first."
    yield GaugeMetricFamily(PREFIX + "probe_latency_seconds", text, value=rows[0].latency_s if rows else 0.0)

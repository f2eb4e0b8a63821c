"""Check the invariants of the core's state, after every event in tests of the core and in simulation.

Eviction budgets depend on the time of each decision; ``tests/sim/checkers/health/eviction_budget.py`` checks them.
"""

from __future__ import annotations

from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.training import GenerationSpec
from everstep_controller.core.liveness.correlation import groups_of
from everstep_controller.core.records import IN_SERVICE, DiagnosticsStatus, JobRecord, NodeRecord, max_seats, min_seats
from everstep_controller.core.seats.membership import next_seats
from everstep_controller.core.state import DeadlineKind, FleetState, ScopeKind, SilenceCount

STATES_WITHOUT_SEAT = (NodeState.QUARANTINED, NodeState.REPAIR, NodeState.LOST)


def check(state: FleetState) -> None:
    """Raise AssertionError for the first invariant that does not hold."""
    assert state.nodes.keys() == state.node_runtime.keys(), "every node has its runtime record"
    assert state.jobs.keys() == state.job_runtime.keys(), "every job has its runtime record"
    assert state.liveness.silent_nodes <= state.liveness.reachable_nodes, (
        f"silent but not reachable: {state.liveness.silent_nodes - state.liveness.reachable_nodes}"
    )
    assert state.rejoin_window.unseen_nodes <= state.liveness.reachable_nodes, (
        f"unseen but not reachable: {state.rejoin_window.unseen_nodes - state.liveness.reachable_nodes}"
    )
    _check_silence_counts(state)
    _check_deferrals(state)
    for record in state.nodes.values():
        _check_node(state, record)
    for job in state.jobs.values():
        _check_job(state, job)
    _check_seats_disjoint(state)
    _check_index(state)
    _check_references(state)


def _check_silence_counts(state: FleetState) -> None:
    """Check the incremental counts against a fresh count."""
    counted: dict[str, SilenceCount] = {}
    for node in state.liveness.reachable_nodes:
        for name in groups_of(state.nodes[node]):
            silence_count = counted.setdefault(name, SilenceCount())
            silence_count.expected += 1
            silence_count.silent += node in state.liveness.silent_nodes
    assert counted == state.liveness.silence_counts, "the counts of silent nodes are wrong"
    assert (state.liveness.correlated_silence is not None) == bool(state.liveness.silent_groups), (
        "silent groups without an episode"
    )


def _check_references(state: FleetState) -> None:
    """Check that no index refers to a forgotten node or job."""
    for name, seen in state.shared_findings.sightings.items():
        assert seen.keys() <= state.nodes.keys(), f"{name} was seen on a node that is forgotten"
    for name, waiting in state.shared_findings.outbreaks.items():
        assert waiting.keys() <= state.nodes.keys(), f"a node that is forgotten waits for the end of {name}"
    for node, live in state.node_runtime.items():
        assert live.jobs.keys() <= state.jobs.keys(), f"{node} offers itself to a job that is forgotten"
    for job in state.jobs.values():
        for node in (*job.membership.launchers, *job.membership.former_nodes):
            assert node in state.nodes, f"{job.job} counts on {node}, which is forgotten"


def _check_deferrals(state: FleetState) -> None:
    for scope, nodes in state.evictions.deferred.items():
        assert nodes, f"{scope} defers no eviction"
        for node in nodes:
            record = state.nodes[node]
            assert not record.health.deferred_eviction_key or record.health.eviction_deferred_by == scope, (
                f"{node} is deferred by {scope} and {record.health.eviction_deferred_by}"
            )
    asked_again = {ScopeKind.FLEET.scope(), ScopeKind.DATABASE.scope()} | (
        {of for _, kind, of in state.deadline_queue.entries if kind is DeadlineKind.DEFERRED_EVICTIONS}
        if state.evictions.deferred
        else set()
    )
    assert state.evictions.deferred.keys() <= asked_again, (
        f"no deadline rechecks the evictions deferred by {state.evictions.deferred.keys() - asked_again}"
    )


def _check_node(state: FleetState, record: NodeRecord) -> None:
    node = record.node
    assert record.liveness.reachable == (node in state.liveness.reachable_nodes), f"{node}: reachable in one place only"
    assert record.sentence, f"{node}: every state has its sentence"
    if record.state in (NodeState.HEALTHY, NodeState.SUSPECT, NodeState.PROBATION):
        assert record.liveness.reachable, f"{node} is {record.state} and out of reach"
    if record.state is NodeState.LOST:
        assert not record.liveness.reachable, f"{node} is lost and reachable"
    if record.state is NodeState.QUARANTINED:
        way_out = (
            record.quarantine.causes
            or record.quarantine.needs_operator
            or not record.liveness.reachable
            or record.quarantine.earliest_end > 0
        )
        assert way_out, f"{node}: a quarantine without a way out"
    if order := record.scheduling.external_cordon_by or record.scheduling.hold_reason:
        assert record.state not in IN_SERVICE, f"{node} is {record.state}, but must be out of service: {order}"
    if record.state is NodeState.PROBATION:
        begun = record.quarantine.diagnostics is not DiagnosticsStatus.NOT_STARTED
        assert begun, f"{node} is on probation without diagnostics"
    if record.liveness.reachable:
        assert state.node_runtime[node].has_silence_deadline, f"{node}: no deadline for its silence"
    if node in state.liveness.silent_nodes:
        assert record.state is not NodeState.HEALTHY, f"{node} is silent and not suspected"


def _check_job(state: FleetState, job: JobRecord) -> None:
    live = state.job_runtime[job.job]
    if job.generation is not None:
        _check_generation(job, job.generation)
        assert job.progress.last_number >= job.generation.number, f"{job.job}: its number is behind its generation"
        is_last = not job.is_running or job.progress.last_number == job.generation.number
        assert is_last, f"{job.job}: the current generation is not the last one"
    if job.outgoing_generation is not None:
        assert job.generation is not None, f"{job.job}: leaves a generation for none"
        assert job.outgoing_generation.number < job.generation.number, f"{job.job}: generations must increase"
        assert job.generation.after_step is not None, f"{job.job}: leaves a generation without a boundary"
    for version in (live.commits.committed_version, live.commits.verified_version):
        settled = version is None or (
            live.commits.settled_version is not None and version <= live.commits.settled_version
        )
        assert settled, f"{job.job}: {version} is committed or verified, and not settled"
    if live.commits.settled_version is not None:
        assert all(v > live.commits.settled_version for v in live.commits.seals), (
            f"{job.job}: a seal of a settled version"
        )
    if job.commits.restore_ceiling is not None:
        assert (
            live.commits.committed_version is None or live.commits.committed_version <= job.commits.restore_ceiling
        ), f"{job.job}: committed above the ceiling"
    if job.is_running:
        _check_running(state, job)
    elif job.status.state is JobState.PAUSED:
        able = next_seats(state, job)
        wanted = any(
            len(state.node_runtime[node].jobs) > 1 for node in able
        )  # counted for other jobs too: the next Tick decides which job gets the node
        looked_at = (
            live.regroup.node_offered_at is not None
            or (live.regroup.growth_due, DeadlineKind.JOB, job.job) in state.deadline_queue.entries
        )
        assert len(able) < job.min_seats or wanted or looked_at, f"{job.job} is paused although {able} could go on"
    if live.regroup.node_offered_at is not None:
        assert (live.regroup.node_offered_at, DeadlineKind.JOB, job.job) in state.deadline_queue.entries, (
            f"{job.job}: no deadline to look at the node that it was offered"
        )
    if live.regroup.pending is not None:
        assert job.is_running, f"{job.job}: waits for witnesses and does not run"
        assert (live.regroup.pending.due, DeadlineKind.JOB, job.job) in state.deadline_queue.entries, (
            f"{job.job}: waits for witnesses without a deadline"
        )


def _check_seats_disjoint(state: FleetState) -> None:
    owners: dict[str, str] = {}
    for job in state.jobs.values():
        for node in set(job.all_seats) if job.is_running else ():
            assert node not in owners, f"{node} computes for {owners[node]} and for {job.job}"
            owners[node] = job.job
    assert owners == state.job_by_node, "the index of jobs by node is wrong"


def _check_index(state: FleetState) -> None:
    """Check the index of jobs by node against the jobs' records."""
    for job in state.jobs.values():
        ended = job.is_ended
        for node in job.membership.launchers:
            assert ended or job.job in state.node_runtime[node].open_jobs, f"{job.job} is not among the jobs of {node}"
        for node in state.job_runtime[job.job].nodes:
            assert job.job in state.node_runtime[node].jobs, f"{job.job} was on {node}, which does not know it"
    for node, live in state.node_runtime.items():
        assert live.open_jobs.keys() <= live.jobs.keys(), f"{node} never had all of its jobs"
        for name, job in ((name, state.jobs[name]) for name in live.open_jobs):
            assert not job.is_ended, f"{name} is over, and still among the jobs of {node}"
            assert not job.membership.launchers or node in job.membership.launchers, (
                f"{name} goes on without {node}, which counts it"
            )
        for name in live.jobs:
            assert node in state.job_runtime[name].nodes, f"{name} does not know that it was on {node}"


def _check_running(state: FleetState, job: JobRecord) -> None:
    assert job.generation is not None, f"{job.job} runs without a generation"
    for node in job.seats:
        assert node in state.nodes, f"{job.job}: {node} is in a roster and unknown"
        assert state.nodes[node].state not in STATES_WITHOUT_SEAT, (
            f"{job.job}: {node} is {state.nodes[node].state} and in a roster"
        )
        assert node not in job.membership.excluded_nodes, f"{job.job}: {node} is excluded and in the roster"
        assert node in job.membership.launchers, f"{job.job}: {node} is in the roster without a launcher"
    if job.progress.resumed_at is None and job.outgoing_generation is None:
        due = (state.job_runtime[job.job].resume.due, DeadlineKind.JOB, job.job)
        assert due in state.deadline_queue.entries, (
            f"{job.job}: no deadline for generation {job.progress.last_number} to resume"
        )


def _check_generation(job: JobRecord, spec: GenerationSpec) -> None:
    seats = spec.seats
    name = f"{job.job} generation {spec.number}"
    assert len(spec.seated_nodes) == len(seats), f"{name}: a node has two seats"
    bounds = min_seats(spec.spec), max_seats(spec.spec)
    assert bounds[0] <= len(seats) <= bounds[1], f"{name}: {len(seats)} nodes are out of bounds {bounds}"
    assert len(seats) % spec.spec.block_nodes == 0, f"{name}: {len(seats)} nodes are no whole number of blocks"
    assert spec.store_node in seats, f"{name}: its store is not in the roster"
    assert set(seats) <= {holder.node for holder in spec.holders}, f"{name}: a roster node is no holder"
    assert set(spec.replica_nodes) == set(seats), f"{name}: replica placement does not fit the roster"
    for node, copies in spec.replica_nodes.items():
        assert set(copies) <= set(seats) - {node}, f"{name}: {node} is copied to {copies}"
    assert spec.sentence, f"{name}: no sentence"
    assert spec.number >= 1, f"{name}: generations count from 1"
    rule = spec.restore
    if rule.floor is not None and rule.ceiling is not None:
        assert rule.floor <= rule.ceiling, f"{name}: floor above ceiling"

"""Restore the state from stored records, and restart every deadline."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.vocabulary import NodeState
from everstep_controller.core.checkpoints.commits import resume_commits
from everstep_controller.core.events import ControllerStarted
from everstep_controller.core.health.eviction import restore_deferral, schedule_deferral_checks
from everstep_controller.core.health.outbreaks import restore_outbreaks
from everstep_controller.core.health.quarantine import begin_probation
from everstep_controller.core.jobs.stragglers import start_straggler_windows
from everstep_controller.core.liveness.correlation import add_expected, update_correlated_silence
from everstep_controller.core.liveness.node_liveness import schedule_silence_deadline
from everstep_controller.core.maintenance import resume_windows
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import DIAGNOSTICS_DONE, FleetRecord, JobRecord, NodeRecord, VersionRecord
from everstep_controller.core.retirement import schedule_retention
from everstep_controller.core.seats.job_index import restore_job
from everstep_controller.core.state import FLEET, DeadlineKind, FleetState, JobRuntime, NodeRuntime
from everstep_controller.core.transition import Transition


def restore_state(
    policy: CorePolicy,
    fleet: FleetRecord | None = None,
    nodes: Iterable[NodeRecord] = (),
    jobs: Iterable[JobRecord] = (),
    versions: Iterable[VersionRecord] = (),
) -> FleetState:
    """Return the stored state, or a new one if nothing is stored. Send ``ControllerStarted`` first.

    ``versions`` has at least the newest and the newest verified version of each job. Raises ConfigurationError for a
    policy that contradicts itself.
    """
    state = FleetState(policy=policy.validate())
    state.fleet = fleet or FleetRecord()
    for record in nodes:
        state.nodes[record.node] = record
        state.node_runtime[record.node] = NodeRuntime()
        if record.liveness.reachable:
            if record.state is NodeState.SUSPECT:
                state.liveness.silent_nodes.add(record.node)
            add_expected(state, record.node)
            state.rejoin_window.unseen_nodes.add(record.node)
        restore_deferral(state, record.node)
    lost = {node: record.liveness.loss_times[-1] for node, record in state.nodes.items() if record.liveness.loss_times}
    state.liveness.recent_losses = dict(sorted(lost.items(), key=lambda one: one[1]))
    for job in jobs:
        state.jobs[job.job] = job
        state.job_runtime[job.job] = JobRuntime()
        restore_job(state, job)
    for version in versions:
        _restore_version(state, version)
    for job in state.jobs.values():
        for kept in (job.commits.audited, job.commits.audit_candidate):
            if kept is not None:
                _restore_version(state, kept)
    return state


def _restore_version(state: FleetState, record: VersionRecord) -> None:
    job = state.jobs.get(record.job)
    ceiling = job.commits.restore_ceiling if job is not None else None
    if job is None or (ceiling is not None and record.version > ceiling):
        return
    commits, version = state.job_runtime[record.job].commits, record.version
    if commits.committed_version is None or version > commits.committed_version:
        commits.committed_version, commits.committed_at = version, record.committed_at
    if record.verified_at is not None and (commits.verified_version is None or version > commits.verified_version):
        commits.verified_version = version
    commits.settled_version = commits.committed_version


def handle_controller_started(transition: Transition, event: ControllerStarted) -> None:
    """Restart all deadlines, because no node could reach the controller during its absence."""
    state = transition.state
    state.epoch = event.epoch or state.epoch
    state.observer.receiving_since = state.observer.last_received_at = transition.now
    state.rejoin_window.ends_at = transition.now + transition.policy.liveness.rejoin_window_s
    state.rejoin_window.latest_end = transition.now + transition.policy.liveness.rejoin_window_max_s
    if state.rejoin_window.unseen_nodes:
        transition.schedule(state.rejoin_window.ends_at, DeadlineKind.REJOIN_WINDOW, FLEET)
    restore_outbreaks(transition)
    schedule_deferral_checks(transition)
    update_correlated_silence(transition)
    for node, record in state.nodes.items():
        live = state.node_runtime[node]
        transition.schedule_node(max(transition.now, record.quarantine.earliest_end), node)
        if (
            record.health.undecided_findings
            or record.health.controller_findings_until
            or record.scheduling.maintenance_until
            or record.scheduling.notice_reason
            or record.state is NodeState.QUARANTINED
        ):
            transition.schedule_treatment(max(transition.now, record.scheduling.maintenance_until), node)
            transition.schedule_treatment(transition.now, node)
        if record.liveness.reachable:
            live.has_silence_deadline = False
            schedule_silence_deadline(transition, node)
        launchers = (state.jobs[name].membership.launchers.get(node) for name in live.jobs)
        if any(launcher is not None and not launcher.has_rejoined for launcher in launchers):
            live.launcher_rejoin_due = transition.now + transition.policy.liveness.launcher_rejoin_grace_s
            transition.schedule_node(live.launcher_rejoin_due, node)
        if record.state is NodeState.PROBATION and record.quarantine.diagnostics not in DIAGNOSTICS_DONE:
            begin_probation(transition, node, record.sentence.partition(";")[0])
    schedule_retention(transition)
    resume_windows(transition)
    for name, job_live in state.job_runtime.items():
        job_live.resume.due = transition.now + transition.policy.regroups.resume_deadline_s
        has_resumed = state.jobs[name].progress.resumed_at is not None
        job_live.resume.is_inherited = state.jobs[name].generation is not None and not has_resumed
        job_live.regroup.boundary_fallback_at = transition.now + transition.policy.regroups.boundary_fallback_s
        resume_commits(transition, state.jobs[name])
        if has_resumed:
            start_straggler_windows(transition, state.jobs[name])
        for due in (transition.now, job_live.regroup.boundary_fallback_at, job_live.resume.due):
            transition.schedule_job(due, name)

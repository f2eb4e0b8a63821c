"""Restart ranks, the mildest action: kill the processes of a node's ranks, and let their job regroup with new ones.

A restart costs the job one regroup and no eviction. The kill carries the generation's number and precedes the next
generation, so that it never hits the replacement process.
"""

from __future__ import annotations

import msgspec

from everstep.vocabulary import Finding, GenerationReason
from everstep.wire.v1.training import GenerationSpec, Member
from everstep_controller.core.health import node_state
from everstep_controller.core.health.offences import suspect_gpus
from everstep_controller.core.jobs import losses
from everstep_controller.core.jobs.generations import RegroupCause
from everstep_controller.core.jobs.notifications import send_kill
from everstep_controller.core.policy import VerdictRule
from everstep_controller.core.records import JobRecord
from everstep_controller.core.seats.membership import jobs_seated_on
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Transition


class RestartTarget(msgspec.Struct, frozen=True):
    """Ranks of a job to restart, all on one node. ``members`` is empty if they were just restarted."""

    job: JobRecord
    spec: GenerationSpec
    members: tuple[Member, ...]

    def describe(self) -> str:
        ranks = ", ".join(str(member.rank) for member in self.members)
        return f"rank {ranks} of {self.job.job}"


def find_restart_target(transition: Transition, node: str, finding: Finding, rule: VerdictRule) -> RestartTarget | None:
    """Return the ranks that the finding concerns and that were not just replaced: its GPU's, else the node's."""
    record = transition.state.nodes[node]
    job = next((job for job in jobs_seated_on(transition.state, node) if job.is_running), None)
    spec = job.running_generation if job is not None else None
    members = tuple(spec.members_on(node)) if spec is not None else ()
    if job is None or spec is None or not members:
        return None
    gpus = {gpu.index for gpu in suspect_gpus(record, (finding,))}
    if gpus and spec.spec.nproc_per_node == len(record.identity.gpus):  # local rank i uses GPU i
        members = tuple(member for member in members if member.local_rank in gpus)
    replaced = transition.state.job_runtime[job.job].regroup.rank_replaced_at.get(node, {})
    due = (member for member in members if replaced.get(member.local_rank, 0.0) <= transition.now - rule.coalesce_s)
    return RestartTarget(job, spec, tuple(due))


def restart_ranks(
    transition: Transition, node: str, target: RestartTarget, sentence: str, trace: str, *, counted: bool
) -> None:
    """Kill the processes and regroup. ``counted`` is false for another GPU of the same crash, which counts once."""
    if counted:
        record, fleet, policy = transition.state.nodes[node], transition.state.fleet, transition.policy
        record.history.rank_restart_times = node_state.append_time(
            record.history.rank_restart_times, transition.now, policy.remediation.node_window_s
        )
        fleet.rank_restart_times = node_state.append_time(
            fleet.rank_restart_times, transition.now, policy.remediation.fleet_window_s
        )
        transition.mark_node_changed(node)
        transition.mark_fleet_changed()
    live = transition.state.job_runtime[target.job.job]
    for member in target.members:
        send_kill(transition, target.job, member, target.spec.number, sentence, trace)
        live.regroup.record_replaced_rank(node, member.local_rank, transition.now)
    losses.replace_rank(transition, target.job, node, RegroupCause(GenerationReason.RANK_LOST, sentence, trace))


def node_restart_cap(state: FleetState, node: str, now: float) -> str:
    """Return why the node's ranks are not restarted again; "" while they may be."""
    times, policy = state.nodes[node].history.rank_restart_times, state.policy.remediation
    what = "its ranks were restarted"
    return node_state.describe_cap(times, now, policy.node_window_s, policy.rank_restarts_per_node, what)


def fleet_restart_cap(state: FleetState, now: float) -> tuple[str, float]:
    """Return why no rank is restarted now, and the time of the next restart; ("", 0.0) below the fleet's cap."""
    policy = state.policy.remediation
    times, window_s = state.fleet.rank_restart_times, policy.fleet_window_s
    count, at = node_state.next_allowed_at(times, now, window_s, policy.rank_restarts_per_fleet)
    return (f"ranks were restarted {count} times within {window_s:g} s" if count else ""), at

"""The mildest cure of a ladder: the processes of a node's ranks are ended, and their job regroups with others in place.

It costs the job one regrouping and nobody an eviction. Like a hung rank's, the end is ordered with the generation's
number and sent before the next generation, so that it never meets the process that took the place.
"""

from __future__ import annotations

import msgspec

from controller.core import caps
from controller.core.evidence import suspect_gpus
from controller.core.generations import Cause
from controller.core.losses import replace_rank, running_spec
from controller.core.membership import jobs_seated_on
from controller.core.records import JobRecord
from controller.core.rules import Rule
from controller.core.signals import note_replaced, send_kill
from controller.core.turn import Turn
from everstep.vocabulary import Finding, GenerationReason, JobState
from everstep.wire.v1.training import GenerationSpec, Member


class Target(msgspec.Struct, frozen=True):
    """Ranks of a job that are to be restarted, all on one node. ``members`` may be empty: they have been, just now."""

    job: JobRecord
    spec: GenerationSpec
    members: tuple[Member, ...]

    def in_words(self) -> str:
        ranks = ", ".join(str(member.rank) for member in self.members)
        return f"rank {ranks} of {self.job.job}"


def target_of(turn: Turn, node: str, finding: Finding, rule: Rule) -> Target | None:
    """Which ranks the finding is about: those of its GPU where one can be told, else all on the node. None where none
    computes there.

    Who was replaced within the rule's ``same_s`` is left alone: what the finding tells of ended the process before.
    """
    record = turn.state.nodes[node]
    job = next((job for job in jobs_seated_on(turn.state, node) if job.state is JobState.RUNNING), None)
    spec = running_spec(job) if job is not None else None
    members = tuple(spec.on(node)) if spec is not None else ()
    if job is None or spec is None or not members:
        return None
    gpus = {gpu.index for gpu in suspect_gpus(record, (finding,))}
    if gpus and spec.spec.nproc_per_node == len(record.gpus):  # then a local rank computes on the GPU of its number
        members = tuple(member for member in members if member.local_rank in gpus)
    replaced = turn.state.live_jobs[job.job].replaced.get(node, {})
    due = (member for member in members if replaced.get(member.local_rank, 0.0) <= turn.now - rule.same_s)
    return Target(job, spec, tuple(due))


def restart(turn: Turn, node: str, target: Target, sentence: str, trace: str, *, counted: bool) -> None:
    """Ends the processes, and regroups. ``counted``: under both caps; one crash of several GPUs counts once."""
    if counted:
        record, fleet, policy = turn.state.nodes[node], turn.state.fleet, turn.policy
        record.restarted = caps.noted(record.restarted, turn.now, policy.remedy_node_window_s)
        fleet.restarted = caps.noted(fleet.restarted, turn.now, policy.remedy_fleet_window_s)
        turn.node_changed(node)
        turn.fleet_changed()
    for member in target.members:
        send_kill(turn, target.job, member, target.spec.number, sentence, trace)
        note_replaced(turn, target.job, node, member.local_rank)
    replace_rank(turn, target.job, node, Cause(reason=GenerationReason.RANK_LOST, sentence=sentence, trace=trace))


def node_cap(turn: Turn, node: str) -> str:
    """Why the node's ranks are not restarted once more, in words; empty while they may be."""
    times, policy = turn.state.nodes[node].restarted, turn.policy
    what = "its ranks were restarted"
    return caps.node_cap(times, turn.now, policy.remedy_node_window_s, policy.restarts_per_node, what)


def fleet_cap(turn: Turn) -> tuple[str, float]:
    """Why no rank is restarted now, and when the next one may be; ("", 0.0) below the fleet's cap."""
    times, window_s = turn.state.fleet.restarted, turn.policy.remedy_fleet_window_s
    count, at = caps.next_at(times, turn.now, window_s, turn.policy.restarts_per_fleet)
    return (f"ranks were restarted {count} times within {window_s:g} s" if count else ""), at

"""Find and replace the rank for which a job without progress waits."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from everstep.vocabulary import GenerationReason
from everstep.wire.v1.training import GenerationSpec, Member, RankStalled, RankUnresponsive
from everstep_controller.core.jobs import ending, losses
from everstep_controller.core.jobs.generations import RegroupCause, note_beyond_boundary
from everstep_controller.core.jobs.notifications import record_replaced_rank, send_kill
from everstep_controller.core.records import JobRecord
from everstep_controller.core.state import PendingRegroup
from everstep_controller.core.transition import Transition

UNEQUAL_STEPS_STALL_S = 600.0
"""Seconds for which a rank may stand still after all others returned: it may be saving, or wait for ever."""
MAX_STACK_CHARS = 16384
"""Maximum length of a rank's stacks in the audit log."""


def handle_rank_unresponsive(transition: Transition, job: JobRecord, node: str, report: RankUnresponsive) -> None:
    """Kill and replace an unresponsive rank; its own agent's report suffices."""
    spec = losses.find_generation(job, report.generation) or job.running_generation
    member = spec.member_at(node, report.local_rank) if spec else None
    if spec is None or not job.is_running or member is None:
        transition.count_ignored("rank_unresponsive.stale")
        return
    words = f"rank {report.rank} on {node} has sent no heartbeat for {report.unresponsive_s:.1f} s"
    sentence = f"{words} ({report.process_state})" if report.process_state else words
    if report.generation == spec.number and member.rank == report.rank:
        _replace_hung(transition, job, spec, member, sentence, transition.trace)
    elif report.generation < spec.number and member.rank not in transition.read_entered_ranks(job.job):
        transition.audit("rank.hung", f"{sentence}; killed", node=node, job=job.job, generation=report.generation)
        send_kill(transition, job, member, report.generation, sentence, transition.trace)
    else:
        transition.count_ignored("rank_unresponsive.stale")


def _replace_hung(
    transition: Transition, job: JobRecord, spec: GenerationSpec, member: Member, sentence: str, trace: str
) -> None:
    sentence = f"{sentence}; it is killed and replaced"
    node, data = member.node, {"rank": str(member.rank)}
    transition.audit("rank.hung", sentence, node=node, job=job.job, generation=spec.number, trace=trace, data=data)
    send_kill(transition, job, member, spec.number, sentence, trace)
    record_replaced_rank(transition, job, node, member.local_rank)
    losses.replace_rank(transition, job, node, RegroupCause(GenerationReason.RANK_HUNG, sentence, trace))


def handle_rank_stalled(transition: Transition, job: JobRecord, node: str, report: RankStalled) -> None:
    """Record where a rank stands. The rank at fault is named once the other ranks have reported too."""
    note_beyond_boundary(transition, job, node, report.rank, report.generation, report.step)
    spec = job.running_generation
    if spec is None or not job.is_running or report.generation != spec.number:
        transition.count_ignored("rank_stalled.stale")
        return
    if not spec.has_rank_on(node, report.rank):
        transition.count_ignored("rank_stalled.not_a_member")
        return
    if ending.check_equal_steps(transition, job, {report.rank: report.begun}):
        return
    live = transition.state.job_runtime[job.job]
    live.regroup.stalled_ranks[report.rank] = (report.step, report.collectives)
    sentence = (
        f"rank {report.rank} on {node} has made no progress for {report.stalled_s:.1f} s after step {report.step} "
        f"(limit: {report.threshold_s:.1f} s)"
    )
    data = {"rank": str(report.rank), "collectives": str(report.collectives), "stacks": report.stacks[:MAX_STACK_CHARS]}
    transition.audit("rank.stalled", sentence, node=node, job=job.job, generation=spec.number, data=data)
    if live.regroup.pending is None:
        due = transition.now + transition.policy.stall_settle_s
        live.regroup.pending = PendingRegroup(transition.now, due, transition.trace, sentence)
        transition.schedule_job(due, job.job)
    if len(live.regroup.stalled_ranks.keys() | set(job.progress.finished_ranks)) < spec.world_size:
        return
    if job.progress.finished_ranks and report.stalled_s >= UNEQUAL_STEPS_STALL_S:
        _fail_unequal_steps(transition, job, spec, report)
    else:
        settle_pending_regroup(transition, job)


def _fail_unequal_steps(transition: Transition, job: JobRecord, spec: GenerationSpec, report: RankStalled) -> None:
    finished = job.progress.finished_ranks
    ranks = f"rank {finished[0]} has" if len(finished) == 1 else f"{len(finished)} other ranks have"
    sentence = (
        f"rank {report.rank} on {spec.node_of(report.rank)} has made no progress for {report.stalled_s:.0f} s after "
        f"step {report.step}, and {ranks} returned from the training function. All ranks must run the same steps (if "
        "one rank legitimately works alone for that long, raise --hang-threshold-s)"
    )
    ending.fail_job(transition, job, sentence)


def settle_pending_regroup(transition: Transition, job: JobRecord) -> None:
    """Decide at the end of the wait for witnesses, with the reports at hand."""
    live = transition.state.job_runtime[job.job]
    pending, spec = live.regroup.pending, job.running_generation
    if pending is None or spec is None:
        return
    if losses.regroup_without_missing(transition, job, pending.sentence):
        return
    if pending.reason is not None:
        live.regroup.pending = None
        losses.regroup_with_seen(transition, job, RegroupCause(pending.reason, pending.sentence, pending.trace))
        return
    if not live.regroup.stalled_ranks:
        cause = RegroupCause(GenerationReason.COLLECTIVE_FAILED, pending.sentence, pending.trace)
        losses.regroup_unattributed(transition, job, cause)
        return
    heard = live.regroup.stalled_ranks.keys() | set(job.progress.finished_ranks)
    silent = [rank for rank in range(spec.world_size) if rank not in heard]
    if job.progress.finished_ranks and not silent:
        live.regroup.pending = None
        return
    latest = pending.since + transition.policy.stall_settle_max_s
    if len(silent) > 1 and transition.now < latest:
        due = min(latest, transition.now + transition.policy.stall_settle_s)
        live.regroup.pending = msgspec.structs.replace(pending, due=due)
        transition.schedule_job(due, job.job)
        return
    stuck = find_stuck_rank(live.regroup.stalled_ranks, silent, transition.read_steps(job.job))
    if stuck is None:
        sentence = f"{pending.sentence}; no single rank can be blamed, so all ranks abort their collectives and regroup"
        losses.regroup_unattributed(transition, job, RegroupCause(GenerationReason.RANK_HUNG, sentence, pending.trace))
        return
    member = spec.roster[stuck]
    count = len(live.regroup.stalled_ranks)
    blocked = "a stalled rank" if count == 1 else f"{count} stalled ranks"
    sentence = f"rank {member.rank} on {member.node} blocks {blocked}"
    _replace_hung(transition, job, spec, member, sentence, pending.trace)


def find_stuck_rank(
    stalls: Mapping[int, tuple[int, int]], silent: Collection[int], finished: Mapping[int, int]
) -> int | None:
    """Return the rank for which the others wait, or None if several are possible.

    A reporter behind all other reporters is stuck. If all reporters stand at the same point, they wait for a silent
    rank that is not ahead of them. If every silent rank is ahead, a single reporter is stuck itself.
    ``stalls`` has (step, collectives) of the ranks that report a stall, ``finished`` the last finished steps.
    """
    lowest = min(stalls.values())
    behind = [rank for rank, at in stalls.items() if at == lowest]
    if len(behind) < len(stalls):
        return behind[0] if len(behind) == 1 else None
    suspects = [rank for rank in silent if rank not in finished or finished[rank] <= lowest[0]]
    if not suspects:
        return behind[0] if len(behind) == 1 else None
    if len(suspects) == 1:
        return suspects[0]
    steps = sorted((finished.get(rank, -1), rank) for rank in suspects)
    return steps[0][1] if steps[0][0] < min(steps[1][0], lowest[0]) else None

"""A job makes no progress: who is the rank that the others wait for?"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.training import GenerationSpec, Member, RankStalled, RankUnresponsive
from everstep_controller.core.jobs import lifecycle
from everstep_controller.core.jobs.generations import Cause, heard_beyond_boundary
from everstep_controller.core.jobs.losses import (
    lose_doubtful,
    regroup_blind,
    regroup_heard,
    replace_rank,
    running_spec,
    spoken_of,
)
from everstep_controller.core.jobs.notifications import note_replaced, send_kill
from everstep_controller.core.records import JobRecord
from everstep_controller.core.state import Pending
from everstep_controller.core.transition import Turn

LEFT_ALONE_S = 600.0
"""How long a rank may stand still while all that do not have returned from the training function. It may save a model:
to kill anybody cures nothing. Or it waits in a collective for ranks that make no further step, and will for ever."""
STACKS_IN_AUDIT = 16384
"""Characters of a rank's stacks that the audit log keeps."""


def rank_unresponsive(turn: Turn, job: JobRecord, node: str, report: RankUnresponsive) -> None:
    """The agent's word on its own rank needs no second opinion: the rank is killed and replaced."""
    spec = spoken_of(job, report.generation) or running_spec(job)
    member = spec.member(node, report.local_rank) if spec else None
    if spec is None or job.state is not JobState.RUNNING or member is None:
        turn.ignore("rank_unresponsive.stale")
        return
    words = f"rank {report.rank} on {node} has not ticked for {report.silent_s:.1f} s"
    sentence = f"{words} ({report.process_state})" if report.process_state else words
    if report.generation == spec.number and member.rank == report.rank:
        _replace(turn, job, spec, member, sentence, turn.trace)
    elif report.generation < spec.number and member.rank not in turn.entered(job.job):
        turn.audit("rank.hung", f"{sentence}; killed", node=node, job=job.job, generation=report.generation)
        send_kill(turn, job, member, report.generation, sentence, turn.trace)
    else:
        turn.ignore("rank_unresponsive.stale")


def _replace(turn: Turn, job: JobRecord, spec: GenerationSpec, member: Member, sentence: str, trace: str) -> None:
    sentence = f"{sentence}; it is killed and replaced"
    turn.audit(
        "rank.hung",
        sentence,
        node=member.node,
        job=job.job,
        generation=spec.number,
        trace=trace,
        data={"rank": str(member.rank)},
    )
    send_kill(turn, job, member, spec.number, sentence, trace)
    note_replaced(turn, job, member.node, member.local_rank)
    cause = Cause(reason=GenerationReason.RANK_HUNG, sentence=sentence, trace=trace)
    replace_rank(turn, job, member.node, cause)


def rank_stalled(turn: Turn, job: JobRecord, node: str, report: RankStalled) -> None:
    """Notes where a rank stands; the one to blame is named a moment later, when the others have said the same."""
    heard_beyond_boundary(turn, job, node, report.rank, report.generation, report.step)
    spec = running_spec(job)
    if spec is None or job.state is not JobState.RUNNING or report.generation != spec.number:
        turn.ignore("rank_stalled.stale")
        return
    if not spec.has(node, report.rank):
        turn.ignore("rank_stalled.not_a_member")
        return
    if lifecycle.check_even(turn, job, {report.rank: report.begun}):
        return
    live = turn.state.live_jobs[job.job]
    live.stalls[report.rank] = (report.step, report.collectives)
    sentence = (
        f"rank {report.rank} on {node} stands still after step {report.step} for {report.stalled_s:.1f} s "
        f"(allowed: {report.threshold_s:.1f})"
    )
    data = {
        "rank": str(report.rank),
        "collectives": str(report.collectives),
        "stacks": report.stacks[:STACKS_IN_AUDIT],
    }
    turn.audit("rank.stalled", sentence, node=node, job=job.job, generation=spec.number, data=data)
    if live.pending is None:
        due = turn.now + turn.policy.stall_settle_s
        live.pending = Pending(stall=True, since=turn.now, due=due, trace=turn.trace, sentence=sentence)
        turn.wake(due, "job", job.job)
    if len(live.stalls.keys() | set(job.finished)) < spec.world_size:
        return
    if job.finished and report.stalled_s >= LEFT_ALONE_S:
        _fail_uneven(turn, job, spec, report)
    else:
        settle(turn, job)


def _fail_uneven(turn: Turn, job: JobRecord, spec: GenerationSpec, report: RankStalled) -> None:
    standing = spec.roster[report.rank]
    words = f"rank {report.rank} on {standing.node} stands still after step {report.step} for {report.stalled_s:.0f} s"
    ranks = f"rank {job.finished[0]} has" if len(job.finished) == 1 else f"{len(job.finished)} other ranks have"
    lifecycle.fail(
        turn,
        job,
        f"{words}, and {ranks} returned from the training function: all ranks have to make the same steps (what takes "
        f"one rank so long by itself is given its time by --hang-threshold-s)",
    )


def settle(turn: Turn, job: JobRecord) -> None:
    """The wait for witnesses is over: decide with what is there."""
    live = turn.state.live_jobs[job.job]
    pending, spec = live.pending, running_spec(job)
    if pending is None or spec is None:
        return
    if lose_doubtful(turn, job, pending.sentence):
        return
    if pending.reason is not None:
        live.pending = None
        regroup_heard(turn, job, Cause(reason=pending.reason, sentence=pending.sentence, trace=pending.trace))
        return
    if not live.stalls:
        regroup_blind(turn, job, pending, GenerationReason.COLLECTIVE_FAILED)
        return
    silent = [rank for rank in range(spec.world_size) if rank not in live.stalls and rank not in job.finished]
    if job.finished and not silent:
        live.pending = None
        return
    latest = pending.since + turn.policy.stall_settle_max_s
    if len(silent) > 1 and turn.now < latest:
        due = min(latest, turn.now + turn.policy.stall_settle_s)
        live.pending = Pending(stall=True, since=pending.since, due=due, trace=pending.trace, sentence=pending.sentence)
        turn.wake(due, "job", job.job)
        return
    stuck = name_stuck(live.stalls, silent, turn.steps(job.job))
    if stuck is None:
        named_nobody = Pending(
            stall=True,
            since=pending.since,
            due=pending.due,
            trace=pending.trace,
            sentence=f"{pending.sentence}; no single rank can be named, so all leave their collectives and try again",
        )
        regroup_blind(turn, job, named_nobody, GenerationReason.RANK_HUNG)
        return
    member = spec.roster[stuck]
    sentence = f"rank {member.rank} on {member.node} is the one that {_waiting(len(live.stalls))} for"
    _replace(turn, job, spec, member, sentence, pending.trace)


def _waiting(count: int) -> str:
    return "a stalled rank waits" if count == 1 else f"{count} stalled ranks wait"


def name_stuck(
    stalls: Mapping[int, tuple[int, int]], silent: Collection[int], finished: Mapping[int, int]
) -> int | None:
    """The rank that the others wait for, or None where several could be.

    ``stalls``: (step, collectives) of ranks that report a stall; ``silent``: ranks that report none. A rank behind
    all other reporters is it. Where reporters stand side by side they wait for a silent one that is not ahead of
    them; where every silent one is ahead, a single reporter is stuck itself.
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

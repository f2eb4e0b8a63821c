"""Find and replace the rank for which a job without progress waits."""

from __future__ import annotations

from everstep.ids import Rank
from everstep.vocabulary import GenerationReason, RankActivity
from everstep.wire.v1.training import GenerationSpec, Member, RankStalled, RankUnresponsive
from everstep_controller.core.jobs import ending, losses
from everstep_controller.core.jobs.generations import RegroupCause, note_beyond_boundary
from everstep_controller.core.jobs.notifications import send_kill
from everstep_controller.core.jobs.stall_decisions import (
    Fail,
    JobStall,
    RegroupAll,
    Replace,
    Wait,
    decide,
    hang_key,
)
from everstep_controller.core.records import JobRecord
from everstep_controller.core.state import StalledRank, StallNotice
from everstep_controller.core.transition import Transition

MAX_STACK_CHARS = 16384
"""Maximum length of a rank's stacks in the event log."""
MAX_STACKS = 4
"""Number of ranks whose stacks are kept, and logged with a decision, for each kind of activity."""
SETTLE_PER_RANK_S = 5e-5
"""Seconds per rank of the job by which a decision waits longer for other reports; judging costs time per rank."""
MIN_LEARNED_PAUSE_S = 10.0
"""Seconds from which a pause that ended by itself is remembered."""
MAX_HANG_PLACES = 64
"""Number of places whose hung ranks are counted."""


def handle_rank_unresponsive(transition: Transition, job: JobRecord, node: str, report: RankUnresponsive) -> None:
    """Replace a rank whose process is stopped; its own agent's report suffices. Others are judged with all ranks."""
    spec = losses.find_generation(job, report.generation) or job.running_generation
    member = spec.member_at(node, report.local_rank) if spec else None
    if spec is None or not job.is_running or member is None:
        transition.count_ignored("rank_unresponsive.stale")
        return
    is_noted = report.activity in (RankActivity.WORKING, RankActivity.MOVING)
    if report.activity is RankActivity.STILL:  # one that stands still outside of the generation holds it up
        left = job.outgoing_generation is None and member.rank not in transition.read_entered_ranks(job.job)
        is_noted = not left and report.generation >= spec.number
    if is_noted:
        _note_silent_rank(transition, job, report)
        return
    words = f"rank {report.rank} on {node} has sent no heartbeat for {report.unresponsive_s:.1f} s"
    how = report.doing or report.process_state
    sentence = f"{words} ({how})" if how else words
    if report.generation == spec.number and member.rank == report.rank:
        # Something outside of the script stops processes, so they count as losses of the node, which bounds them.
        cause = _kill_hung(transition, job, spec, member, sentence)
        losses.replace_rank(transition, job, node, cause)
    elif report.generation < spec.number and member.rank not in transition.read_entered_ranks(job.job):
        transition.log_event("rank.hung", f"{sentence}; killed", node=node, job=job.job, generation=report.generation)
        send_kill(transition, job, member, report.generation, sentence, transition.trace)
    else:
        transition.count_ignored("rank_unresponsive.stale")


def _note_silent_rank(transition: Transition, job: JobRecord, report: RankUnresponsive) -> None:
    """Record what the process of a rank does that says nothing, as in a long call that holds Python's lock."""
    running, stalled = job.running_generation, transition.state.job_runtime[job.job].regroup.stalled_ranks
    if running is None or report.generation < running.number:
        transition.count_ignored("rank_unresponsive.stale")
        return
    if report.activity is RankActivity.MOVING:
        stalled.pop(report.rank, None)
    else:
        since, before = transition.now - report.unresponsive_s, stalled.get(report.rank)
        stalled[report.rank] = StalledRank(
            step=transition.read_steps(job.job).get(report.rank, 0),
            collectives=0,  # unknown; the others wait for it, if for any rank
            since=before.since if before is not None else since,
            threshold_s=0.0,
            activity=report.activity,
            activity_since=since,
            doing=report.doing,
            place=before.place if before is not None else "",
            place_since=since,  # Python runs no other code meanwhile
        )
    _schedule_check(transition, job, running)


def _kill_hung(
    transition: Transition, job: JobRecord, spec: GenerationSpec, member: Member, sentence: str, stacks: str = ""
) -> RegroupCause:
    """Kill a hung rank, and return why its job regroups."""
    sentence, trace = f"{sentence}; it is killed and replaced", transition.trace
    node, data = member.node, {"rank": str(member.rank)} | ({"stacks": stacks} if stacks else {})
    transition.log_event("rank.hung", sentence, node=node, job=job.job, generation=spec.number, trace=trace, data=data)
    send_kill(transition, job, member, spec.number, sentence, trace)
    transition.state.job_runtime[job.job].regroup.record_replaced_rank(node, member.local_rank, transition.now)
    return RegroupCause(GenerationReason.RANK_HUNG, sentence, trace)


def handle_rank_stalled(transition: Transition, job: JobRecord, node: str, report: RankStalled) -> None:
    """Record what a rank without progress does, and judge all such ranks a moment later."""
    note_beyond_boundary(transition, job, node, report.rank, report.generation, report.step)
    spec = job.running_generation
    if spec is None or not job.is_running or report.generation != spec.number:
        transition.count_ignored("rank_stalled.stale")
        return
    if not spec.has_rank_on(node, report.rank):
        transition.count_ignored("rank_stalled.not_a_member")
        return
    if ending.fail_if_steps_differ(transition, job, {report.rank: report.begun}):
        return
    stalled = transition.state.job_runtime[job.job].regroup.stalled_ranks
    if report.activity is RankActivity.MOVING:
        stalled.pop(report.rank, None)
        _learn_pause(transition, job, report.activity_s)
    else:
        stalled[report.rank] = _make_record(transition, report, list(stalled.values()))
    _schedule_check(transition, job, spec)


def _make_record(transition: Transition, report: RankStalled, others: list[StalledRank]) -> StalledRank:
    now = transition.now
    alike = sum(1 for other in others if other.stacks and other.activity is report.activity)
    return StalledRank(
        step=report.step,
        collectives=report.collectives,
        since=now - report.stalled_s,
        threshold_s=report.threshold_s,
        activity=report.activity,
        activity_since=now - (report.activity_s if report.activity is not None else report.stalled_s),
        doing=report.doing,
        place=report.place,
        place_since=now - report.place_s if report.place_s else 0.0,
        operation=report.operation,
        section=report.section,
        limit_s=report.limit_s,
        waits_for_all=report.waits_for_all,
        transfers=report.transfers,
        may_wait=report.may_wait,
        stacks=report.stacks[:MAX_STACK_CHARS] if alike < MAX_STACKS else "",
    )


def _learn_pause(transition: Transition, job: JobRecord, pause_s: float) -> None:
    """Remember the longest time for which a rank stood still and went on: the next such pause is no hang either."""
    if pause_s >= max(MIN_LEARNED_PAUSE_S, job.failures.longest_pause_s + 1.0):
        job.failures.longest_pause_s = pause_s
        transition.mark_job_changed(job.job)


def _schedule_check(transition: Transition, job: JobRecord, spec: GenerationSpec) -> None:
    """Have the stalled ranks judged soon, once for reports that come together."""
    live, policy = transition.state.job_runtime[job.job].regroup, transition.policy
    if live.stall_check_due <= transition.now:
        wait_s = policy.stalls.settle_s + SETTLE_PER_RANK_S * spec.world_size
        live.stall_check_due = transition.now + min(wait_s, policy.stalls.settle_max_s)
        transition.schedule_job(live.stall_check_due, job.job)


def judge_stalls(transition: Transition, job: JobRecord) -> bool:
    """Judge the ranks without progress; return whether that ended the generation or the job."""
    live, spec = transition.state.job_runtime[job.job].regroup, job.running_generation
    if not live.stalled_ranks:
        live.end_stall()
        return False
    if spec is None or transition.now < live.stall_check_due:
        return False
    steps = transition.read_steps(job.job)
    for rank, stalled in list(live.stalled_ranks.items()):
        if steps.get(rank, 0) > stalled.step:
            del live.stalled_ranks[rank]
    if not live.stalled_ranks:
        live.end_stall()
        return False
    if live.waiting_rank is not None:
        evidence = f"rank {live.waiting_rank} makes no progress"
        if losses.regroup_without_missing(transition, job, evidence):
            return True
    return _carry_out(transition, job, spec, _gather(transition, job, spec, steps))


def _gather(transition: Transition, job: JobRecord, spec: GenerationSpec, steps: dict[Rank, int]) -> JobStall:
    stalled = transition.state.job_runtime[job.job].regroup.stalled_ranks
    finished = job.progress.finished_ranks
    silent = set(range(spec.world_size)) - stalled.keys() - set(finished)
    return JobStall(
        stalled={rank: stalled[rank] for rank in sorted(stalled) if rank not in finished},
        moving=silent,
        steps=steps,
        returned={rank: job.progress.returned_collectives.get(rank) for rank in finished},
        now=transition.now,
        policy=transition.policy,
        spec=spec.spec,
        failures=job.failures,
    )


def _carry_out(transition: Transition, job: JobRecord, spec: GenerationSpec, stall: JobStall) -> bool:
    decision = decide(stall)
    if isinstance(decision, Wait):
        for notice in decision.notices:
            _say(transition, job, spec, notice)
        if decision.due is not None:
            transition.schedule_job(decision.due, job.job)
        return False
    if isinstance(decision, Fail):
        _log_stacks(transition, job, spec, decision.sentence)
        ending.fail_job(transition, job, decision.sentence)
    elif isinstance(decision, Replace):
        rank, stalled = decision.rank, stall.stalled[decision.rank]
        _count_hang(transition, job, hang_key(rank, stalled))
        cause = _kill_hung(transition, job, spec, spec.roster[rank], decision.sentence, stalled.stacks)
        losses.regroup_with_seen(transition, job, cause)  # no loss of the node: its hangs are counted by place
    else:
        _regroup_all(transition, job, spec, decision)
    return True


def _regroup_all(transition: Transition, job: JobRecord, spec: GenerationSpec, decision: RegroupAll) -> None:
    _log_stacks(transition, job, spec, decision.sentence)
    if decision.step is not None:
        job.failures.hung_collective_step = decision.step
        transition.mark_job_changed(job.job)
    cause = RegroupCause(GenerationReason.RANK_HUNG, decision.sentence[:4000], transition.trace)
    losses.regroup_unattributed(transition, job, cause)


def _count_hang(transition: Transition, job: JobRecord, place: str) -> None:
    kills = job.failures.hang_kills
    kills[place] = kills.get(place, 0) + 1
    if len(kills) > MAX_HANG_PLACES:
        del kills[next(iter(kills))]
    transition.mark_job_changed(job.job)


def _say(transition: Transition, job: JobRecord, spec: GenerationSpec, notice: StallNotice) -> None:
    """Write a notice to the event log, once per stall, and keep the last one for the job's status."""
    live = transition.state.job_runtime[job.job].regroup
    if notice.key in live.said_of_stall:
        return
    live.said_of_stall[notice.key] = None
    live.stall_notice = notice
    _log_stacks(transition, job, spec, notice.sentence(transition.now), notice.ranks[:1])


def _log_stacks(
    transition: Transition, job: JobRecord, spec: GenerationSpec, sentence: str, ranks: tuple[Rank, ...] = ()
) -> None:
    """Write a sentence about ranks without progress to the event log, with the stacks of some of them."""
    stalled = transition.state.job_runtime[job.job].regroup.stalled_ranks
    with_stacks = [rank for rank in ranks or sorted(stalled) if rank in stalled and stalled[rank].stacks]
    for rank in with_stacks[:MAX_STACKS] or ranks[:1]:
        one = stalled.get(rank)
        data = {"rank": str(rank)}
        if one is not None:
            data |= {"collectives": str(one.collectives), "place": one.place, "stacks": one.stacks}
            data["activity"] = one.activity.value if one.activity is not None else ""
        node = spec.node_of(rank)
        transition.log_event("rank.stalled", sentence, node=node, job=job.job, generation=spec.number, data=data)


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
    cause = RegroupCause(GenerationReason.COLLECTIVE_FAILED, pending.sentence, pending.trace)
    losses.regroup_unattributed(transition, job, cause)

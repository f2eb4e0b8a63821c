"""Handle losses of ranks, launchers and nodes, and failed collectives without a known culprit."""

from __future__ import annotations

import msgspec

from everstep.clock import Backoff
from everstep.vocabulary import FindingKind, GenerationReason, JobState, Severity
from everstep.wire.v1.training import CollectiveFailed, GenerationSpec, LauncherLeft, RankLost
from everstep_controller.core.jobs import ending, generations
from everstep_controller.core.jobs.generations import RegroupCause
from everstep_controller.core.records import JobRecord
from everstep_controller.core.seats.job_index import unindex_launcher
from everstep_controller.core.seats.membership import jobs_seated_on
from everstep_controller.core.state import PendingRegroup
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import join_names

UNSEEN_REASON = "has sent nothing since this controller started"
CLOSED_REASON = "closed its connection"
MAX_LATE_GENERATIONS = 1
"""Consecutive generations that a node's ranks may enter late before the node is no longer taken back automatically."""


def find_generation(job: JobRecord, number: int) -> GenerationSpec | None:
    """Return the running or announced generation with this number; None if it is over."""
    return next(
        (spec for spec in (job.outgoing_generation, job.generation) if spec is not None and spec.number == number), None
    )


def handle_rank_lost(transition: Transition, job: JobRecord, node: str, report: RankLost) -> None:
    """Regroup at once, with the launcher's replacement process or without the node."""
    if report.has_replacement:
        _mark_local_rank_replaced(transition, job, node, report.local_rank)
    if job.generation is None or not job.is_running:
        transition.count_ignored("rank_lost.not_running")
        return
    launcher = job.membership.launchers.get(node)
    if launcher is not None and not report.has_replacement:
        launcher.usable, launcher.unusable_reason = False, "its launcher has no replacement for a lost rank"
        launcher.missing_local_ranks = []
        transition.mark_job_changed(job.job)
    spec = find_generation(job, report.generation)
    if not job.is_seated(node) or (spec is None and report.has_replacement):
        transition.count_ignored("rank_lost.stale")
        return
    member = spec.member_at(node, report.local_rank) if spec is not None else None
    if spec is not None and (
        member is None or member.rank != report.rank or report.rank in job.progress.finished_ranks
    ):
        transition.count_ignored("rank_lost.not_a_member")
        return
    if report.has_replacement:
        live = transition.state.job_runtime[job.job]
        live.regroup.record_replaced_rank(node, report.local_rank, transition.now)
    how = "its launcher has a replacement" if report.has_replacement else "its launcher has no replacement"
    sentence = f"rank {report.rank} on {node} lost ({_describe_exit(report)}); {how}"
    data = {"rank": str(report.rank), "detail": report.detail[:1024], "seen_at": f"{report.at:.6f}"}
    transition.log_event("rank.lost", sentence, node=node, job=job.job, generation=report.generation, data=data)
    replace_rank(transition, job, node, RegroupCause(GenerationReason.RANK_LOST, sentence, transition.trace))


def _mark_local_rank_replaced(transition: Transition, job: JobRecord, node: str, local_rank: int) -> None:
    """Note a replacement for a late rank. The last one makes the node usable, unless it was late before."""
    launcher = job.membership.launchers.get(node)
    if launcher is None or local_rank not in launcher.missing_local_ranks:
        return
    launcher.missing_local_ranks = [other for other in launcher.missing_local_ranks if other != local_rank]
    transition.mark_job_changed(job.job)
    if launcher.missing_local_ranks or (
        launcher.late_generations > MAX_LATE_GENERATIONS and job.status.state is not JobState.PAUSED
    ):
        return
    launcher.usable, launcher.unusable_reason = True, ""
    sentence = f"new processes have replaced the late ranks on {node}; the node is usable again"
    transition.log_event("launcher.usable", sentence, node=node, job=job.job)
    generations.consider_growth(transition, job)


def _describe_exit(report: RankLost) -> str:
    if report.out_of_memory:
        return f"killed by the kernel for want of memory (OOM): {report.out_of_memory}"
    if report.signal is not None:
        return f"signal {report.signal}"
    return "its connection closed" if report.exit_code is None else f"exit code {report.exit_code}"


def replace_rank(transition: Transition, job: JobRecord, node: str, cause: RegroupCause) -> None:
    """Regroup after a loss on ``node``, and exclude a node that keeps losing ranks."""
    window_s, before = transition.policy.regroups.failure_window_s, job.failures.rank_loss_times.get(node, [])
    times = [*(at for at in before if at > transition.now - window_s), transition.now]
    job.failures.rank_loss_times[node] = times
    transition.mark_job_changed(job.job)
    count = len(times)
    if count < transition.policy.regroups.rank_flap_count:
        regroup_with_seen(transition, job, cause)
        return
    sentence = f"{node} lost {count} ranks of {job.job} within {window_s:g} s"
    job.membership.excluded_nodes[node] = sentence
    _raise_rank_flapping(transition, node, sentence, count)
    if len(generations.current_roster(transition, job)) < job.min_seats:
        ending.fail_job(transition, job, f"{cause.sentence}; {sentence}, and no other node can take its place")
        return
    generations.regroup(transition, job, RegroupCause(cause.reason, f"{cause.sentence}; {sentence}", cause.trace))


def regroup_with_seen(transition: Transition, job: JobRecord, cause: RegroupCause) -> None:
    """Regroup with members that this controller has heard; a new controller first waits a moment for them."""
    state, live = transition.state, transition.state.job_runtime[job.job]
    spec = job.running_generation
    unmet = state.rejoin_window.unseen_nodes & spec.seated_nodes if spec is not None else set[str]()
    if not unmet:
        generations.regroup(transition, job, cause)
    elif transition.now >= state.rejoin_window.ends_at:
        cause = msgspec.structs.replace(cause, nodes_to_exclude=cause.nodes_to_exclude | unmet)
        generations.regroup(transition, job, cause)
    elif live.regroup.pending is None or live.regroup.pending.reason is None:
        due = state.rejoin_window.ends_at
        live.regroup.pending = PendingRegroup(transition.now, due, cause.trace, cause.sentence, cause.reason)
        transition.schedule_job(due, job.job)


def _raise_rank_flapping(transition: Transition, node: str, sentence: str, count: int) -> None:
    message = f"{sentence}; the job continues without it until an operator readmits it or its launcher restarts"
    most = float(transition.policy.regroups.rank_flap_count)
    finding = transition.make_finding(
        FindingKind.RANK_FLAPPING, "ranks", Severity.WARNING, message, value=float(count), threshold=most
    )
    transition.raise_finding(node, finding, transition.policy.regroups.failure_window_s)


def handle_collective_failed(transition: Transition, job: JobRecord, node: str, report: CollectiveFailed) -> None:
    """Regroup without suspects, or wait briefly for the culprit's report. A newcomer at a boundary is a witness too."""
    generations.note_beyond_boundary(transition, job, node, report.rank, report.generation, report.step)
    spec = find_generation(job, report.generation)
    if spec is None or not job.is_running:
        transition.count_ignored("collective_failed.stale")
        return
    if not spec.has_rank_on(node, report.rank):
        transition.count_ignored("collective_failed.not_a_member")
        return
    live = transition.state.job_runtime[job.job]
    if not live.regroup.failed_collective_ranks and not live.regroup.stalled_ranks:
        for seat in spec.seats:
            if transition.state.node_runtime[seat].peer_loss_reports:
                transition.schedule_node(transition.now, seat)
    live.regroup.failed_collective_ranks.add(report.rank)
    if regroup_without_missing(transition, job, f"a collective of rank {report.rank} failed"):
        return
    if live.regroup.pending is None:
        failed = f"a collective of rank {report.rank} on {node} failed at step {report.step}"
        sentence = f"{failed}, and no report names a lost member"
        policy, times = transition.policy, live.regroup.unattributed_times
        times = [at for at in times if at > transition.now - policy.regroups.failure_window_s]
        live.regroup.unattributed_times = times
        waits = Backoff(floor_s=policy.regroups.collective_settle_s, ceiling_s=policy.regroups.collective_settle_max_s)
        due = transition.now + waits.limit_s(len(times))
        live.regroup.pending = PendingRegroup(transition.now, due, transition.trace, sentence)
        transition.schedule_job(due, job.job)


def regroup_unattributed(transition: Transition, job: JobRecord, cause: RegroupCause) -> None:
    """Regroup with the same roster, because no culprit was named in time."""
    transition.state.job_runtime[job.job].regroup.unattributed_times.append(transition.now)
    regroup_with_seen(transition, job, cause)


def missing_reason(transition: Transition, node: str) -> str:
    """Return why a node counts as lost once its job has a witness; "" for a node that answers."""
    state = transition.state
    if node in state.rejoin_window.unseen_nodes:
        return UNSEEN_REASON if transition.now >= state.rejoin_window.ends_at else ""
    if state.node_runtime[node].disconnected_at is not None:
        return CLOSED_REASON
    return "is silent" if node in state.liveness.silent_nodes else ""


def regroup_without_missing(transition: Transition, job: JobRecord, evidence: str) -> bool:
    """Regroup without the roster's suspect nodes; return False if there are none."""
    spec, state = job.running_generation, transition.state
    if spec is None or not (state.liveness.silent_nodes or state.rejoin_window.unseen_nodes):
        return False
    doubts = {node: words for node in spec.seats if (words := missing_reason(transition, node))}
    if not doubts:
        return False
    pending = state.job_runtime[job.job].regroup.pending
    sentence, trace = f"{_describe_missing(doubts)}, and {evidence}", pending.trace if pending else transition.trace
    cause = RegroupCause(GenerationReason.NODE_LOST, sentence, trace, nodes_to_exclude=frozenset(doubts))
    generations.regroup(transition, job, cause)
    return True


_PLURAL_REASONS = {
    UNSEEN_REASON: "have sent nothing since this controller started",
    CLOSED_REASON: "closed their connections",
}


def _describe_missing(doubts: dict[str, str]) -> str:
    """Return ``n1 is silent`` or ``n1, n2 are silent, n3 closed its connection``."""
    alike: dict[str, list[str]] = {}
    for node, words in doubts.items():
        alike.setdefault(words, []).append(node)
    return ", ".join(
        f"{join_names(who)} {words if len(who) == 1 else _PLURAL_REASONS.get(words, 'are silent')}"
        for words, who in alike.items()
    )


# Launchers and nodes


def handle_launcher_left(transition: Transition, job: JobRecord, node: str, report: LauncherLeft) -> None:
    """Withdraw a node's offer, unless a later launcher of the node has joined."""
    launcher = job.membership.launchers.get(node)
    if launcher is None or report.launcher < launcher.incarnation:
        transition.count_ignored("launcher_left.stale")
        return
    if job.is_ended:  # the record stays: by it a later launcher of the node is known to begin a new run
        transition.count_ignored("launcher_left.job_ended")
        return
    manner = "left in order" if report.orderly else "is gone"
    detail = f" ({report.detail})" if report.detail else ""
    running = job.running_generation
    ranks = [member.rank for member in running.members_on(node)] if running is not None else []
    has_finished = bool(ranks) and set(ranks) <= set(job.progress.finished_ranks)
    if report.orderly and job.is_running and has_finished:  # the node is not missed, and the other ranks end soon
        launcher.usable, launcher.unusable_reason = False, "its ranks have finished, and its launcher has exited"
        transition.mark_job_changed(job.job)
        return
    remove_launcher(transition, job, node, f"the launcher on {node} {manner}{detail}")


def remove_launcher(transition: Transition, job: JobRecord, node: str, sentence: str) -> None:
    """Forget a node's launcher, and regroup without the node if it had a seat."""
    del job.membership.launchers[node]
    transition.mark_job_changed(job.job)
    if not job.membership.launchers:
        job.membership.abandoned_at = transition.now
    unindex_launcher(transition.state, job, node)
    transition.log_event("launcher.left", sentence, node=node, job=job.job, generation=job.progress.last_number)
    if job.is_running and job.is_seated(node):
        stored = job.generation is not None and job.generation.store_node == node
        reason = GenerationReason.STORE_LOST if stored else GenerationReason.NODE_LOST
        generations.regroup(transition, job, RegroupCause(reason, sentence, transition.trace))


def regroup_after_losses(transition: Transition) -> None:
    """Regroup every job that lost nodes in this event once."""
    for name, lost in transition.lost_nodes_by_job.items():
        job = transition.state.jobs[name]
        if job.is_running and any(job.is_seated(node) for node in lost):
            first = next(iter(lost.values()))
            sentence = first if len(lost) == 1 else f"{join_names(list(lost))} are lost ({first})"
            generations.regroup(transition, job, RegroupCause(GenerationReason.NODE_LOST, sentence, transition.trace))


def regroup_jobs_without(transition: Transition, node: str, cause: RegroupCause) -> None:
    """Regroup jobs with a seat on an unfit node, except those already leaving it (unless the cause is urgent)."""
    for job in jobs_seated_on(transition.state, node):
        if job.job in transition.regroup_claimed:
            continue
        leaves = job.generation is not None and not job.has_seat(node)
        if job.is_running and not (leaves and cause.at_boundary):
            generations.regroup(transition, job, cause)

"""Somebody of a job is gone: a rank, a launcher, a node; or all that is known is that a collective failed."""

from __future__ import annotations

import msgspec

from everstep.clock import Backoff
from everstep.vocabulary import Finding, FindingKind, GenerationReason, JobState, Severity
from everstep.wire.v1.training import CollectiveFailed, GenerationSpec, LauncherLeft, RankLost
from everstep_controller.core.health.evidence import raise_own
from everstep_controller.core.jobs import lifecycle
from everstep_controller.core.jobs.generations import (
    Cause,
    consider_growth,
    heard_beyond_boundary,
    next_roster,
    regroup,
)
from everstep_controller.core.jobs.job_index import launcher_went
from everstep_controller.core.jobs.membership import is_seated, jobs_seated_on, least_nodes, seats_of
from everstep_controller.core.jobs.notifications import note_replaced
from everstep_controller.core.records import JobRecord
from everstep_controller.core.state import Pending
from everstep_controller.core.transition import Turn
from everstep_controller.core.wording import named

UNHEARD = "has not been heard since this controller began"
CLOSED = "closed its connection"
LATE_MOST = 1
"""Generations in a row that a node's ranks may not enter in time, and it is taken again by itself."""


def running_spec(job: JobRecord) -> GenerationSpec | None:
    """The generation whose ranks compute: the one before an announced boundary, else the current one."""
    return job.leaving or job.generation


def spoken_of(job: JobRecord, number: int) -> GenerationSpec | None:
    """The generation of that number, where it runs or is announced to follow; None where it is over.

    Agents count a rank to what it was last offered, which may be a generation that it enters at a boundary.
    """
    return next((spec for spec in (job.leaving, job.generation) if spec is not None and spec.number == number), None)


# --- ranks -------------------------------------------------------------------------------------------------------


def rank_lost(turn: Turn, job: JobRecord, node: str, report: RankLost) -> None:
    """Regroups at once: with the launcher's replacement in the rank's place, or without the node."""
    if report.replacement:
        _missed_no_more(turn, job, node, report.local_rank)
    if job.generation is None or job.state is not JobState.RUNNING:
        turn.ignore("rank_lost.not_running")
        return
    launcher = job.launchers.get(node)
    if launcher is not None and not report.replacement:
        launcher.able, launcher.why_not = False, "its launcher has no replacement for a lost rank"
        launcher.missing = []
        turn.job_changed(job.job)
    spec = spoken_of(job, report.generation)
    if not is_seated(job, node) or (spec is None and report.replacement):
        turn.ignore("rank_lost.stale")
        return
    member = spec.member(node, report.local_rank) if spec is not None else None
    if spec is not None and (member is None or member.rank != report.rank or report.rank in job.finished):
        turn.ignore("rank_lost.not_a_member")
        return
    if report.replacement:
        note_replaced(turn, job, node, report.local_rank)
    how = "its launcher has a replacement" if report.replacement else "its launcher has no replacement"
    sentence = f"rank {report.rank} on {node} lost ({_manner(report)}); {how}"
    data = {"rank": str(report.rank), "detail": report.detail[:1024], "seen_at": f"{report.at:.6f}"}
    turn.audit("rank.lost", sentence, node=node, job=job.job, generation=report.generation, data=data)
    replace_rank(turn, job, node, Cause(reason=GenerationReason.RANK_LOST, sentence=sentence, trace=turn.trace))


def _missed_no_more(turn: Turn, job: JobRecord, node: str, local_rank: int) -> None:
    """Another process has the place of one that did not enter a generation in time. With the last of them the node is
    able again; not while the job runs without it, where it was late once more: each time all others wait for it."""
    launcher = job.launchers.get(node)
    if launcher is None or local_rank not in launcher.missing:
        return
    launcher.missing = [other for other in launcher.missing if other != local_rank]
    turn.job_changed(job.job)
    if launcher.missing or (launcher.late > LATE_MOST and job.state is not JobState.PAUSED):
        return
    launcher.able, launcher.why_not = True, ""
    sentence = f"other processes have the places of those on {node} that did not enter in time"
    turn.audit("launcher.able", sentence, node=node, job=job.job)
    consider_growth(turn, job)


def _manner(report: RankLost) -> str:
    if report.signal is not None:
        return f"signal {report.signal}"
    if report.exit_code is not None:
        return f"exit code {report.exit_code}"
    return "its connection closed"


def replace_rank(turn: Turn, job: JobRecord, node: str, cause: Cause) -> None:
    """Regroups after a loss on ``node``; a node that keeps losing ranks is left out from now on."""
    if not _flaps(turn, job, node):
        regroup_heard(turn, job, cause)
        return
    count, window_s = len(job.losses[node]), turn.policy.flap_window_s
    sentence = f"{node} lost {count} ranks of {job.job} within {window_s:g} s"
    job.excluded[node] = sentence
    _note_flapping(turn, node, sentence, count)
    if len(next_roster(turn, job)) < least_nodes(job):
        lifecycle.fail(turn, job, f"{cause.sentence}; {sentence}, and no other node can take its place")
        return
    regroup(turn, job, Cause(reason=cause.reason, sentence=f"{cause.sentence}; {sentence}", trace=cause.trace))


def forgive(turn: Turn, name: str, node: str) -> None:
    """The job has nothing against the node any more: neither lost ranks, nor that it was slow."""
    job = turn.state.jobs[name]
    job.excluded.pop(node, None)
    job.losses.pop(node, None)
    job.slow.pop(node, None)
    turn.job_changed(name)


def regroup_heard(turn: Turn, job: JobRecord, cause: Cause) -> None:
    """Regroups with members that this controller has heard. One that has just begun waits a moment for the others: they
    are on their way back to it, or dead, and a roster with a dead member is soon another regrouping."""
    state, live = turn.state, turn.state.live_jobs[job.job]
    unmet = state.unmet.intersection(seats_of(running_spec(job))) if state.unmet else frozenset()
    if not unmet:
        regroup(turn, job, cause)
    elif turn.now >= state.reunion_at:
        regroup(turn, job, msgspec.structs.replace(cause, without=cause.without | unmet))
    elif live.pending is None or live.pending.reason is None:
        due = state.reunion_at
        live.pending = Pending(False, turn.now, due, cause.trace, cause.sentence, cause.reason)
        turn.wake(due, "job", job.job)


def _flaps(turn: Turn, job: JobRecord, node: str) -> bool:
    window = [at for at in job.losses.get(node, []) if at > turn.now - turn.policy.flap_window_s]
    job.losses[node] = [*window, turn.now]
    turn.job_changed(job.job)
    return len(job.losses[node]) >= turn.policy.rank_flap_count


def _note_flapping(turn: Turn, node: str, sentence: str, count: int) -> None:
    finding = Finding(
        kind=FindingKind.RANK_FLAPPING,
        subject="ranks",
        severity=Severity.WARNING,
        message=f"{sentence}; the job does without it until an operator readmits it or its launcher starts anew",
        value=float(count),
        threshold=float(turn.policy.rank_flap_count),
        since=turn.now,
        trace=turn.trace,
    )
    raise_own(turn, node, finding, turn.policy.flap_window_s)


# --- collectives without a culprit -------------------------------------------------------------------------------


def collective_failed(turn: Turn, job: JobRecord, node: str, report: CollectiveFailed) -> None:
    """A witness. With a doubtful node in the roster it settles the matter; else others get a moment to say who.

    So is a newcomer that waits for the others at an announced boundary: without it they would wait there in vain.
    """
    heard_beyond_boundary(turn, job, node, report.rank, report.generation, report.step)
    spec = spoken_of(job, report.generation)
    if spec is None or job.state is not JobState.RUNNING:
        turn.ignore("collective_failed.stale")
        return
    if not spec.has(node, report.rank):
        turn.ignore("collective_failed.not_a_member")
        return
    live = turn.state.live_jobs[job.job]
    if not live.witnesses and not live.stalls:
        _recall_accused(turn, spec)
    live.witnesses.add(report.rank)
    if lose_doubtful(turn, job, f"a collective of rank {report.rank} failed"):
        return
    if live.pending is None:
        sentence = (
            f"a collective of rank {report.rank} on {node} failed at step {report.step}, and nobody says who is lost"
        )
        due = turn.now + _collective_wait(turn, job)
        live.pending = Pending(stall=False, since=turn.now, due=due, trace=turn.trace, sentence=sentence)
        turn.wake(due, "job", job.job)


def _recall_accused(turn: Turn, spec: GenerationSpec) -> None:
    """The job's first witness: a member that another vault has lost is looked at once more."""
    for node in seats_of(spec):
        if turn.state.live_nodes[node].accusers:
            turn.wake(turn.now, "node", node)


def _collective_wait(turn: Turn, job: JobRecord) -> float:
    live = turn.state.live_jobs[job.job]
    live.blind = [at for at in live.blind if at > turn.now - turn.policy.flap_window_s]
    waits = Backoff(floor_s=turn.policy.collective_settle_s, ceiling_s=turn.policy.collective_settle_max_s)
    return waits.limit_s(len(live.blind))


def regroup_blind(turn: Turn, job: JobRecord, pending: Pending, reason: GenerationReason) -> None:
    """Nobody was named in time: the same roster tries again."""
    turn.state.live_jobs[job.job].blind.append(turn.now)
    regroup_heard(turn, job, Cause(reason=reason, sentence=pending.sentence, trace=pending.trace))


def doubtful(turn: Turn, node: str) -> str:
    """Why a node may be taken for lost once its job has a witness; empty for one that answers."""
    state = turn.state
    if node in state.unmet:
        return UNHEARD if turn.now >= state.reunion_at else ""
    if state.live_nodes[node].gone_at is not None:
        return CLOSED
    return "is silent" if node in state.silent else ""


def lose_doubtful(turn: Turn, job: JobRecord, witness: str) -> bool:
    """Regroups without the roster's doubtful nodes; False where there are none."""
    spec, state = running_spec(job), turn.state
    if spec is None or not (state.silent or state.unmet):
        return False
    doubts = {node: words for node in spec.seats if (words := doubtful(turn, node))}
    if not doubts:
        return False
    pending = state.live_jobs[job.job].pending
    cause = Cause(
        reason=GenerationReason.NODE_LOST,
        sentence=f"{_doubts_in_words(doubts)}, and {witness}",
        trace=pending.trace if pending else turn.trace,
        without=frozenset(doubts),
    )
    regroup(turn, job, cause)
    return True


_OF_SEVERAL = {UNHEARD: "have not been heard since this controller began", CLOSED: "closed their connections"}


def _doubts_in_words(doubts: dict[str, str]) -> str:
    """``n1 is silent``, ``n1, n2 are silent, n3 closed its connection``."""
    alike: dict[str, list[str]] = {}
    for node, words in doubts.items():
        alike.setdefault(words, []).append(node)
    several = (
        f"{named(who)} {words if len(who) == 1 else _OF_SEVERAL.get(words, 'are silent')}"
        for words, who in alike.items()
    )
    return ", ".join(several)


# --- launchers and nodes -----------------------------------------------------------------------------------------


def launcher_left(turn: Turn, job: JobRecord, node: str, report: LauncherLeft) -> None:
    """Takes back a node's offer. A later launcher of the node is not meant."""
    launcher = job.launchers.get(node)
    if launcher is None or report.launcher < launcher.incarnation:
        turn.ignore("launcher_left.stale")
        return
    manner = "left in order" if report.orderly else "is gone"
    detail = f" ({report.detail})" if report.detail else ""
    if report.orderly and job.state is JobState.RUNNING and _has_finished(job, node):
        launcher.able, launcher.why_not = False, "its ranks have finished, and its launcher has left"
        turn.job_changed(job.job)
        return
    remove_launcher(turn, job, node, f"the launcher on {node} {manner}{detail}")


def _has_finished(job: JobRecord, node: str) -> bool:
    """Whether all ranks on the node have come to their end: it is not missed, and the others are about to end too."""
    running = job.leaving or job.generation
    ranks = running.on(node) if running is not None else ()
    return bool(ranks) and all(member.rank in job.finished for member in ranks)


def remove_launcher(turn: Turn, job: JobRecord, node: str, sentence: str) -> None:
    """Forgets a node's launcher, and regroups without the node where it had a seat."""
    del job.launchers[node]
    turn.job_changed(job.job)
    if not job.launchers:
        job.deserted_at = turn.now
    launcher_went(turn.state, job, node)
    turn.audit("launcher.left", sentence, node=node, job=job.job, generation=job.last_number)
    if job.state is JobState.RUNNING and is_seated(job, node):
        stored = job.generation is not None and job.generation.store_node == node
        reason = GenerationReason.STORE_LOST if stored else GenerationReason.NODE_LOST
        regroup(turn, job, Cause(reason=reason, sentence=sentence, trace=turn.trace))


def regroup_departed(turn: Turn) -> None:
    """Every job that lost nodes in this turn regroups once, however many they were."""
    for name, lost in turn.departed.items():
        job = turn.state.jobs[name]
        if job.state is JobState.RUNNING and any(is_seated(job, node) for node in lost):
            first = next(iter(lost.values()))
            sentence = first if len(lost) == 1 else f"{named(list(lost))} are lost ({first})"
            regroup(turn, job, Cause(reason=GenerationReason.NODE_LOST, sentence=sentence, trace=turn.trace))


def node_left_jobs(turn: Turn, node: str, cause: Cause) -> None:
    """The node can take part no more: every running job with a seat on it regroups.

    A job that leaves it at a boundary already is not hurried, where there is no hurry.
    """
    for job in jobs_seated_on(turn.state, node):
        if job.job in turn.regrouped:
            continue
        leaves = job.generation is not None and node not in job.generation.seated
        if job.state is JobState.RUNNING and not (leaves and cause.boundary):
            regroup(turn, job, cause)

"""Send generations, kills and stops to the nodes of a job."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.vocabulary import JobState
from everstep.wire.v1.directives import KillRank, NewGeneration, StopJob
from everstep.wire.v1.training import Member
from everstep_controller.core.records import JobRecord
from everstep_controller.core.transition import Transition


def recipients(job: JobRecord, others: Iterable[str] = ()) -> list[str]:
    """Return every node concerned: the roster in rank order, then nodes that left it, then spares."""
    return list(dict.fromkeys([*job.seats, *others, *job.membership.launchers]))


def is_unannounced(transition: Transition, job: JobRecord) -> bool:
    """Return whether the current generation is not stored yet and must not be announced."""
    untold = transition.state.job_runtime[job.job].regroup.unannounced_generation
    return untold != 0 and job.generation is not None and job.generation.number == untold


def send_generation(transition: Transition, job: JobRecord, previous_nodes: Iterable[str]) -> None:
    """Send the current generation to its roster, to nodes that leave it and to spares."""
    if job.generation is None or is_unannounced(transition, job):
        return
    body = NewGeneration(spec=job.generation)  # one object for all nodes, so that it is encoded once
    for node in recipients(job, previous_nodes):
        transition.send(node, body)


def send_kill(
    transition: Transition,
    job: JobRecord,
    member: Member,
    generation: int,
    reason: str,
    trace: str,
    *,
    has_grace: bool = False,
) -> None:
    """Send the kill of one rank's process, before the generation that replaces the rank.

    With ``has_grace`` the process gets SIGTERM first, and the launcher's grace time.
    """
    body = KillRank(
        job=job.job,
        generation=generation,
        rank=member.rank,
        local_rank=member.local_rank,
        reason=reason[:4096],
        trace=trace,
        has_grace=has_grace,
    )
    transition.send(member.node, body)


def send_stop(transition: Transition, job: JobRecord) -> None:
    """Send the job's end to all nodes concerned; vaults of former members still hold its slots."""
    for node in recipients(job, [*job.all_seats, *job.membership.former_nodes]):
        launcher = job.membership.launchers.get(node)
        # without a known launcher, one may be on its way; a launcher younger than the job's end runs the job again
        incarnation = launcher.incarnation if launcher is not None else int(job.status.since * 1000)
        transition.send(node, make_stop(job, incarnation))


def make_stop(job: JobRecord, launcher: int) -> StopJob:
    """Return the stop directive of an ended job for a launcher."""
    ok = job.status.state is JobState.FINISHED
    return StopJob(job=job.job, ok=ok, reason=job.status.sentence[:4096], launcher=launcher)

"""Who must hear what of a job, and who has not answered."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.vocabulary import JobState
from everstep.wire.v1.directives import KillRank, NewGeneration, StopJob
from everstep.wire.v1.training import Member
from everstep_controller.core.jobs.membership import seats_of
from everstep_controller.core.records import JobRecord
from everstep_controller.core.transition import Transition


def recipients(job: JobRecord, others: Iterable[str] = ()) -> list[str]:
    """Every node concerned: the roster in rank order, then whoever left it, then spares."""
    return list(dict.fromkeys([*seats_of(job.generation), *others, *job.launchers]))


def is_unannounced(transition: Transition, job: JobRecord) -> bool:
    """Whether the current generation is not written, and must be kept from everybody until it is."""
    untold = transition.state.job_runtime[job.job].unannounced_generation
    return untold != 0 and job.generation is not None and job.generation.number == untold


def send_generation(transition: Transition, job: JobRecord, previous_nodes: Iterable[str]) -> None:
    """The current generation to its roster, to those who leave it, and to spares."""
    if job.generation is None or is_unannounced(transition, job):
        return
    body = NewGeneration(spec=job.generation)  # one object for all: it is encoded once
    for node in recipients(job, previous_nodes):
        transition.send(node, body)


def record_replaced_rank(transition: Transition, job: JobRecord, node: str, local_rank: int) -> None:
    """Another process takes the place of this one."""
    transition.state.job_runtime[job.job].rank_replaced_at.setdefault(node, {})[local_rank] = transition.now


def send_kill(transition: Transition, job: JobRecord, member: Member, generation: int, reason: str, trace: str) -> None:
    """The end of one rank's process. Sent before the generation that replaces it, so that it is carried out first."""
    body = KillRank(
        job=job.job,
        generation=generation,
        rank=member.rank,
        local_rank=member.local_rank,
        reason=reason[:4096],
        trace=trace,
    )
    transition.send(member.node, body)


def send_stop(transition: Transition, job: JobRecord) -> None:
    """The job's end, to everybody concerned: vaults of former members still hold slots of it.

    Where no launcher is known one may be on its way, and one younger than the end begins the job anew
    (``joining.launcher_joined``): it is not meant.
    """
    for node in recipients(job, [*seats_of(job.outgoing_generation), *job.former_nodes]):
        launcher = job.launchers.get(node)
        transition.send(node, make_stop(job, launcher.incarnation if launcher is not None else int(job.since * 1000)))


def make_stop(job: JobRecord, launcher: int) -> StopJob:
    """What a launcher is told of a job that has ended; see StopJob."""
    ok = job.state is JobState.FINISHED
    return StopJob(job=job.job, ok=ok, reason=job.sentence[:4096], launcher=launcher)

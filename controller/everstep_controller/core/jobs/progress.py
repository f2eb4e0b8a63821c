"""Track the progress of ranks from heartbeats. Hot path: constant work per rank, no effects."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from everstep.ids import JobId, Rank
from everstep.vocabulary import JobState
from everstep.wire.v1.training import RankProgress
from everstep_controller.core.records import JobRecord
from everstep_controller.core.state import FleetState, JobProgress

MIN_STEP_S = 1e-6
"""Shorter reported step times, in seconds, are ignored: the steps per second would be no number that can be sent."""
MAX_SAMPLED_RANKS = 512
"""Maximum number of ranks in the median step time, because sorting ten thousand takes milliseconds."""


class StepRate(msgspec.Struct, frozen=True, tag=True):
    """Step rate of a job."""

    subject: JobId
    """The job."""
    step: int | None
    """Last finished step of the furthest rank; None if unknown."""
    at: float
    """Time at which ``step`` was reported."""
    step_s: float
    """Median step time in seconds, of a sample in large jobs, whose ranks step together; 0.0 if unknown."""

    def predict_step(self, now: float, max_unseen_s: float) -> int:
        """Return the extrapolated step of the furthest rank, for at most ``max_unseen_s`` seconds beyond the last
        report.

        Needs a known step and step time.
        """
        assert self.step is not None
        return self.step + int(min(now - self.at, max_unseen_s) / self.step_s)


def compute_step_rate(job: JobId, job_progress: JobProgress) -> StepRate:
    apart = 1 + len(job_progress.by_rank) // MAX_SAMPLED_RANKS
    some = itertools.islice(job_progress.by_rank.values(), 0, None, apart)
    times = sorted(progress.step_s for progress in some if progress.step_s >= MIN_STEP_S)
    return StepRate(
        job, job_progress.furthest_step, job_progress.furthest_step_at, times[len(times) // 2] if times else 0.0
    )


MIN_EXCESS_SHARE = 0.05
"""Minimum excess over the median, as a share of the step time. Less is noise of a loop that hardly computes."""


class Stragglers(msgspec.Struct, frozen=True, tag=True):
    """Ranks of a job whose own time per step stands out."""

    subject: JobId
    """The job."""
    measured_ranks: int
    """Number of ranks that report their own time."""
    median_s: float
    """Lower median of their own times in seconds."""
    slow: dict[Rank, float]
    """Seconds of the ranks that exceed the median by the factor, and enough to delay a step."""


def find_stragglers(job: JobId, job_progress: JobProgress, factor: float) -> Stragglers:
    """Return the ranks that need more than ``factor`` times the median."""
    busy = {rank: progress.busy_s for rank, progress in job_progress.by_rank.items() if progress.busy_s is not None}
    if not busy:
        return Stragglers(job, 0, 0.0, {})
    median = sorted(busy.values())[(len(busy) - 1) // 2]
    limit = max(factor * median, median + MIN_EXCESS_SHARE * compute_step_rate(job, job_progress).step_s)
    return Stragglers(job, len(busy), median, {rank: own for rank, own in busy.items() if own > limit})


def record_progress(state: FleetState, node: str, ranks: Iterable[RankProgress], now: float) -> None:
    """Record the progress of ranks of running generations; a node reports only its own ranks.

    Runs a hundred thousand times a second in a large fleet. Values common to all ranks of a job on the node are
    therefore looked up once.
    """
    name, job = "", None
    for progress in ranks:
        if progress.job != name:
            name = progress.job
            job = state.jobs.get(name)
            if job is not None and job.state is not JobState.RUNNING:
                job = None
            if job is not None:
                pace, coming, leaving = state.job_runtime[name].progress, job.generation, job.outgoing_generation
                ours = coming.ranks_on(node) if coming is not None else range(0)
                theirs = leaving.ranks_on(node) if leaving is not None else range(0)
        if job is None:
            continue
        if coming is not None and progress.generation == coming.number and progress.rank in ours:
            pace.entered_ranks.add(progress.rank)
            if leaving is not None:
                continue
        elif leaving is None or progress.generation != leaving.number or progress.rank not in theirs:
            continue
        pace.by_rank[progress.rank] = progress
        if pace.furthest_step is None or progress.step > pace.furthest_step:
            pace.record_step(progress.step, now)


def may_have_crossed_boundary(state: FleetState, ranks: Iterable[RankProgress]) -> bool:
    """Return whether one of the ranks may have crossed its job's boundary."""
    name = ""
    for progress in ranks:
        if progress.job != name:
            name = progress.job
            job = state.jobs.get(name)
            leaving = job is not None and job.outgoing_generation is not None
        if leaving and job is not None and is_beyond_boundary(job, progress):
            return True
    return False


def is_beyond_boundary(job: JobRecord, progress: RankProgress) -> bool:
    """Return whether a rank may have crossed the boundary, which is more than progress."""
    return (
        job.outgoing_generation is not None
        and job.generation is not None
        and progress.generation == job.generation.number
    )

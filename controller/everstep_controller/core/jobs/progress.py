"""Where ranks are, from heartbeats. The hot path: constant work for each rank, no effects."""

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
"""What is said to be shorter is no time for a step: how many of them fit in a second is no number that can be sent."""
MAX_SAMPLED_RANKS = 512
"""Ranks of whose step times the median is taken, at most: sorting those of ten thousand takes milliseconds."""


class StepRate(msgspec.Struct, frozen=True, tag=True):
    """How fast a job (``of``) steps: the furthest rank had finished ``step`` (None: not known yet) at ``at``;
    ``step_s`` is the median step time of its ranks (of some hundreds of them, where it has thousands: they step
    together), 0.0 while none is known."""

    subject: JobId
    step: int | None
    at: float
    step_s: float

    def predict_step(self, now: float, max_unseen_s: float) -> int:
        """The step that the furthest rank has finished by now, as its step time says of at most ``most_s`` unseen
        seconds. Needs a known step and step time."""
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
"""Of the time for a step: so much more than the median is worth a word. What lies below is noise of a loop that hardly
computes."""


class Stragglers(msgspec.Struct, frozen=True, tag=True):
    """Whose own time for a step stands out in job ``of``: of ``known`` ranks that measure it ``median_s`` is the
    (lower) median, and ``slow`` are those that need more than a factor of it, and enough for a step to be later, with
    their seconds."""

    subject: JobId
    measured_ranks: int
    median_s: float
    slow: dict[Rank, float]


def find_stragglers(job: JobId, job_progress: JobProgress, factor: float) -> Stragglers:
    """``factor``: times the median that are slow."""
    busy = {rank: progress.busy_s for rank, progress in job_progress.by_rank.items() if progress.busy_s is not None}
    if not busy:
        return Stragglers(job, 0, 0.0, {})
    median = sorted(busy.values())[(len(busy) - 1) // 2]
    limit = max(factor * median, median + MIN_EXCESS_SHARE * compute_step_rate(job, job_progress).step_s)
    return Stragglers(job, len(busy), median, {rank: own for rank, own in busy.items() if own > limit})


def record_progress(state: FleetState, node: str, ranks: Iterable[RankProgress], now: float) -> None:
    """Notes the progress of ranks of running generations; a node speaks only for its own.

    Runs a hundred thousand times a second in a large fleet: what is the same for all ranks of a job on the node is
    looked up once.
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
    """Whether one of the ranks may have left its running generation in order."""
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
    """Whether a rank may have left the running generation in order: that is no news of progress only."""
    return (
        job.outgoing_generation is not None
        and job.generation is not None
        and progress.generation == job.generation.number
    )

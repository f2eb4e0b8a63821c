"""Where ranks are, from heartbeats. The hot path: constant work for each rank, no effects."""

from __future__ import annotations

from collections.abc import Iterable

from controller.core.state import FleetState, JobLive
from controller.core.turn import push_deadline
from everstep.vocabulary import JobState
from everstep.wire.v1.training import RankProgress


def take_progress(state: FleetState, node: str, ranks: Iterable[RankProgress], now: float) -> None:
    """Notes the progress of ranks of running generations; a node speaks only for its own."""
    for progress in ranks:
        job = state.jobs.get(progress.job)
        if job is None or job.generation is None or job.state is not JobState.RUNNING:
            continue
        live = state.live_jobs[progress.job]
        spec = job.generation
        if progress.generation != spec.number and job.leaving is not None:
            spec = job.leaving
        if progress.generation != spec.number or progress.rank >= len(spec.roster):
            continue
        if spec.roster[progress.rank].node != node:
            continue
        if spec is job.generation:
            live.entered.add(progress.rank)
            if job.leaving is not None:
                push_deadline(state, now, "job", progress.job)
                continue
        live.progress[progress.rank] = progress
        if live.newest_step is None or progress.step > live.newest_step:
            live.newest_step, live.newest_at = progress.step, now


def step_seconds(live: JobLive) -> float:
    """The median of the ranks' step times; 0.0 while none is known."""
    times = sorted(progress.step_s for progress in live.progress.values() if progress.step_s > 0)
    return times[len(times) // 2] if times else 0.0


def step_by(live: JobLive, now: float, most_s: float) -> int:
    """The step that the furthest rank has finished by now, as its step time says of at most ``most_s`` unseen ones.

    Needs a known step and step time.
    """
    assert live.newest_step is not None
    return live.newest_step + int(min(now - live.newest_at, most_s) / step_seconds(live))

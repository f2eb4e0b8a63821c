"""Keep each job's progress over its whole life, in a bounded number of samples for charts.

Samples live in memory and begin again when another controller leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from everstep.wire.v1.operator import ProgressHistory, ProgressSample
from everstep_controller.core.state import FleetState
from everstep_controller.read_models.fleet_views import job_summary

SAMPLES_KEPT = 720
"""Samples of a job. When it has more, every second one is dropped and the interval doubles."""
INTERVAL_S = 1.0
"""Seconds between a job's first samples."""
RANKS_PER_SECOND = 1000
"""A job's interval grows by a second for each so many ranks, because a sample is linear in them."""


class _Track(msgspec.Struct):
    """One job's samples. ``created_at`` tells a new job of the same name from the old one."""

    created_at: float
    interval_s: float
    due_at: float = 0.0
    samples: list[ProgressSample] = []


class ProgressRecorder:
    """Samples the progress of running jobs.

    Args:
        state: the fleet's state, which is only read.
        now: wall seconds.
    """

    def __init__(self, state: FleetState, now: Callable[[], float]) -> None:
        self._state = state
        self._now = now
        self._tracks: dict[str, _Track] = {}

    def history(self, job: str, since: float = 0.0) -> ProgressHistory:
        """Return the job's samples after ``since`` (wall seconds), oldest first."""
        track = self._tracks.get(job)
        if track is None:
            return ProgressHistory(job=job, interval_s=INTERVAL_S)
        newer = tuple(sample for sample in track.samples if sample.at > since)
        return ProgressHistory(job=job, interval_s=track.interval_s, samples=newer)

    def due_jobs(self) -> list[str]:
        """Return the running jobs whose next sample is due, and forget deleted ones."""
        jobs, now = self._state.jobs, self._now()
        self._tracks = {name: track for name, track in self._tracks.items() if name in jobs}
        running = (name for name, job in jobs.items() if job.is_running)
        return [name for name in running if name not in self._tracks or now >= self._tracks[name].due_at]

    def sample(self, name: str) -> None:
        """Take one sample of a job, if it still exists."""
        job, now = self._state.jobs.get(name), self._now()
        if job is None:
            return
        track = self._tracks.get(name)
        if track is None or track.created_at != job.progress.created_at:
            track = self._tracks[name] = _Track(created_at=job.progress.created_at, interval_s=INTERVAL_S)
        one = job_summary(self._state, job)
        track.due_at = now + max(track.interval_s, one.world_size / RANKS_PER_SECOND)
        track.samples.append(
            ProgressSample(
                at=now,
                generation=one.generation,
                step=one.step,
                world_size=one.world_size,
                step_s=one.step_s,
                loss=one.loss,
            )
        )
        if len(track.samples) > SAMPLES_KEPT:
            track.samples = track.samples[::2]
            track.interval_s *= 2

    async def run(self) -> None:
        """Sample until cancelled, one job in each turn of the event loop."""
        while True:
            for name in self.due_jobs():
                self.sample(name)
                await asyncio.sleep(0)
            await asyncio.sleep(INTERVAL_S / 2)

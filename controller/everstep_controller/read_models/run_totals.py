"""Add up what each run has done since this controller leads: its seconds by activity, and its committed bytes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from everstep.vocabulary import JobState
from everstep_controller.core.records import JobRecord, VersionRecord


class RunActivity(StrEnum):
    """What a run spends its time on."""

    FORMING = "forming"
    """The first generation waits for nodes, or for its ranks' first step."""
    TRAINING = "training"
    """All ranks of the generation have finished a step."""
    RECOVERING = "recovering"
    """A later generation was decided, and not all of its ranks have finished a step."""
    PAUSED = "paused"
    """The run has fewer nodes than its minimum."""


def current_activity(job: JobRecord) -> RunActivity | None:
    """Return what the run does now; None if it has ended."""
    if job.is_ended:
        return None
    if job.status.state is JobState.PAUSED:
        return RunActivity.PAUSED
    if job.outgoing_generation is not None or (job.is_running and job.progress.resumed_at is not None):
        return RunActivity.TRAINING
    later = job.is_running and job.generation is not None and job.generation.number > 1
    return RunActivity.RECOVERING if later else RunActivity.FORMING


class _Totals(msgspec.Struct):
    """Totals of one run."""

    activity: RunActivity | None
    since: float
    seconds: dict[RunActivity, float] = msgspec.field(default_factory=lambda: dict.fromkeys(RunActivity, 0.0))
    committed_bytes: int = 0


class RunTotals:
    """Totals by run. They begin at 0 when another controller leads, as Prometheus expects of a counter."""

    def __init__(self) -> None:
        self._runs: dict[str, _Totals] = {}

    def record_state(self, job: JobRecord, now: float) -> None:
        """Record what the run does from ``now`` on."""
        activity, totals = current_activity(job), self._runs.get(job.job)
        if totals is None:
            self._runs[job.job] = _Totals(activity, now)
            return
        if totals.activity is not None:
            totals.seconds[totals.activity] += max(0.0, now - totals.since)
        totals.activity, totals.since = activity, max(now, totals.since)

    def record_version(self, version: VersionRecord) -> None:
        """Count the bytes of a version when it is committed."""
        self._runs.setdefault(version.job, _Totals(None, 0.0)).committed_bytes += version.bytes

    def forget(self, job: str) -> None:
        """Forget a deleted run."""
        self._runs.pop(job, None)

    def seconds(self, job: str) -> Mapping[RunActivity, float]:
        """Return the run's seconds by activity, up to the newest recorded state."""
        return self._runs[job].seconds

    def committed_bytes(self, job: str) -> int:
        """Return the bytes of the run's committed versions."""
        return self._runs[job].committed_bytes

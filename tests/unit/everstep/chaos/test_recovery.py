"""A job is followed over the controller's API: detection, decision, restore and repeated steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from everstep.chaos.recovery import JobWatch
from everstep.clock import ManualClock
from everstep.errors import Unavailable
from everstep.ids import Version
from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1 import operator as op
from everstep.wire.v1.training import JobSpec, Member

START = 1_700_000_000.0
AHEAD_S = 5.0
"""The controller's clock is ahead of this machine's."""


def summary(step: int, generation: int = 1, state: JobState = JobState.RUNNING, **more: Any) -> op.JobSummary:
    return op.JobSummary(job="llama", state=state, generation=generation, world_size=2, nodes=1, step=step, **more)


def recovery(generation: int, reason: GenerationReason, **more: Any) -> op.GenerationRecovery:
    known: dict[str, Any] = {"resumed_ranks": 2, "world_size": 2, "duration_s": 0.2, "decided_at": START, "trace": "t"}
    return op.GenerationRecovery(generation=generation, reason=reason, sentence="why", **known | more)


FORMED = recovery(1, GenerationReason.FORMED)


def detail(job: op.JobSummary, *recoveries: op.GenerationRecovery, steps: tuple[int, ...] = ()) -> op.JobDetail:
    members = tuple(Member(rank=rank, node="a", local_rank=rank) for rank in range(2))
    ranks = tuple(op.RankStatus(rank=rank, node="a", step=step) for rank, step in enumerate(steps))
    spec = JobSpec(job="llama", nproc_per_node=2)
    return op.JobDetail(summary=job, spec=spec, roster=members, ranks=ranks, recoveries=(FORMED, *recoveries))


def event(number: int, kind: str, at: float, **more: Any) -> op.Event:
    return op.Event(id=number, at=at, kind=kind, sentence=f"{kind} happened", job="llama", **more)


class PlayedController:
    """Answers with one job after another; after the last, again with that one. An exception is raised."""

    def __init__(self, clock: ManualClock, moments: Iterable[tuple[op.JobDetail | Exception, list[op.Event]]]) -> None:
        self.clock = clock
        self.moments = list(moments)
        self.events: list[op.Event] = []

    def get(self, url: str, kind: Any, **query: str | int) -> Any:
        if kind is op.FleetStatus:
            now = self.clock.wall() + AHEAD_S
            return op.FleetStatus(
                version="1", epoch=1, now=now, started_at=0.0, nodes={}, newest_event=len(self.events)
            )
        job, events = self.moments[0]
        if kind is op.EventList:
            self.events += events
            self.moments[0] = (job, [])
            newer = tuple(event for event in self.events if event.id > int(query["after"]))
            return op.EventList(events=newer, next_after=len(self.events))
        if len(self.moments) > 1:
            self.moments.pop(0)
        if isinstance(job, Exception):
            raise job
        return job


def watched(*moments: tuple[op.JobDetail | Exception, list[op.Event]]) -> JobWatch:
    clock = ManualClock(START, 0.0)
    return JobWatch(PlayedController(clock, moments).get, "/v1/jobs/llama", clock, clock.advance)


STRUCK = START + AHEAD_S
LOST = event(1, "rank.lost", STRUCK + 0.2, detail={"seen_at": repr(STRUCK + 0.1)})
DECIDED = event(2, "generation", STRUCK + 0.2, generation=2)
RESUMED = event(3, "resumed", STRUCK + 0.5, generation=2, detail={"step": "39"})
SECOND = recovery(
    2, GenerationReason.RANK_LOST, decided_at=STRUCK + 0.2, restored=Version(1, 38), phases_s={"restore": 0.1}
)


def test_recovery_is_reported_with_its_phases() -> None:
    before = detail(summary(40, loss=2.0, step_s=0.1), steps=(40, 41))
    watch = watched(
        (before, []),
        (before, []),
        (Unavailable("away"), []),
        (detail(summary(40, 2), msgspec.structs.replace(SECOND, resumed_ranks=1)), [LOST, DECIDED]),
        (detail(summary(39, 2), SECOND), [RESUMED]),
        (detail(summary(45, 2, loss=1.5), SECOND), []),
    )
    watch.strike()
    assert watch.await_recovery(60.0, regroups=True)
    report = watch.report("kill", "SIGKILL", recovered=True, conclusion="recovered")
    assert report.detection is not None
    assert report.detection.after_s == pytest.approx(0.1, abs=1e-3)
    assert (report.detection.kind, report.before.loss, report.after.loss) == ("rank.lost", 2.0, 1.5)
    (regroup,) = report.regroups
    assert (regroup.generation, regroup.steps_repeated, regroup.steps_skipped) == (2, 3, 0)
    assert regroup.decided_after_s == pytest.approx(0.2, abs=1e-3)
    assert (regroup.duration_s, regroup.phases_s) == (0.2, {"restore": 0.1})


def test_later_regroup_does_not_undo_a_recovery() -> None:
    before, third = detail(summary(40), steps=(40, 41)), recovery(3, GenerationReason.RANK_LOST, resumed_ranks=0)
    watch = watched(
        (before, []),
        (before, []),
        (detail(summary(39, 2), SECOND), [LOST, DECIDED]),
        (detail(summary(45, 2), SECOND), []),
        (detail(summary(45, 3), SECOND, third), []),
    )
    watch.strike()
    assert watch.await_recovery(60.0, regroups=True)


def test_job_that_never_regroups_has_not_recovered() -> None:
    watch = watched(*((detail(summary(step)), []) for step in (40, 50, 60)))
    watch.strike()
    assert not watch.await_recovery(5.0, regroups=True)
    assert watch.report("flip", "", recovered=False, conclusion="").detection is None


def test_paused_job_has_not_recovered() -> None:
    paused = summary(40, 1, JobState.PAUSED, reason="no node")
    watch = watched((detail(summary(40)), []), (detail(paused), []))
    watch.strike()
    assert not watch.await_recovery(5.0, regroups=False)


def test_job_may_survive_without_a_generation() -> None:
    watch = watched(*((detail(summary(step, step_s=1.0 / step)), []) for step in range(40, 50)))
    watch.strike()
    watch.observe(0.25)
    assert watch.await_recovery(5.0, regroups=False)
    report = watch.report("slow", "", recovered=True, conclusion="")
    assert report.regroups == ()
    assert report.during is not None
    assert report.during.step_s >= report.after.step_s


def test_verdicts_and_own_events_only_are_reported() -> None:
    verdict = event(1, "verdict.evict", STRUCK + 1)
    other = msgspec.structs.replace(event(2, "rank.lost", STRUCK + 1), job="gpt")
    watch = watched((detail(summary(40)), []), (detail(summary(41)), [verdict, other]))
    watch.strike()
    watch.poll()
    report = watch.report("flip", "", recovered=False, conclusion="")
    assert (report.verdicts, report.detection) == (("verdict.evict happened",), None)

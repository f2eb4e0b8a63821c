"""Follow a job over a controller's API while a fault strikes it, and report how it recovered."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from everstep.clock import Clock
from everstep.errors import Unavailable
from everstep.ids import Version
from everstep.vocabulary import JobState
from everstep.wire.v1 import operator as op

T = TypeVar("T")

POLL_S = 0.1
SETTLE_STEPS = 3
"""Steps that all ranks finish after a recovery before its loss is read."""
LOSS_WAIT_S = 2.0
"""Ranks send their progress about once a second."""
DETECTING = ("rank.", "node.", "finding", "corruption.", "launcher.left", "peer.lost", "fleet.correlated", "user_error")
"""Beginnings of the kinds of events that show that a fault was noticed."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A job's progress at one time: the last step of all ranks, its loss if it was reported, and its duration."""

    step: int
    loss: float | None
    step_s: float


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """The first event after the fault that shows that it was noticed, ``after_s`` seconds later."""

    after_s: float
    kind: str
    sentence: str


class RegroupOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One generation after the fault.

    Attributes:
        decided_after_s: Seconds from the fault to the decision.
        duration_s: Seconds from the decision to the first step of its last rank; None if a rank has not resumed.
        phases_s: The slowest rank's seconds, by phase.
        restored: The restored version; None: from scratch or from storage.
        steps_repeated: Steps that were finished before and are computed again, as surviving ranks and the controller
            know of them.
        steps_skipped: Steps between the restored one and the first one after it. Samples follow from the step, so 0
            means that no sample is lost; None if the first step is unknown.
    """

    generation: int
    reason: str
    sentence: str
    world_size: int
    decided_after_s: float
    duration_s: float | None
    phases_s: dict[str, float]
    restored: Version | None
    steps_repeated: int
    steps_skipped: int | None


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """One fault and what followed from it.

    Attributes:
        fault: Its name on the command line.
        action: What was done to which process, in words.
        at: When, in wall seconds of the controller.
        state: State of the job at the end.
        recovered: All ranks step again.
        conclusion: The outcome in a sentence.
        during: The slowest progress while a fault lasted that takes time; None for the others.
        verdicts: Sentences of verdicts on nodes.
    """

    fault: str
    action: str
    job: str
    at: float
    state: JobState
    recovered: bool
    conclusion: str
    before: Progress
    after: Progress
    during: Progress | None = None
    detection: Detection | None = None
    regroups: tuple[RegroupOutcome, ...] = ()
    verdicts: tuple[str, ...] = ()


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """All faults of one command."""

    recovered: bool
    faults: tuple[FaultReport, ...]


class JobWatch:
    """Polls one job. A controller that is away is asked again; its absence may follow from the fault.

    ``get(path, kind)`` asks the controller, ``url`` is the job's path, ``pause`` waits for some seconds. Raises as
    ``get``.
    """

    def __init__(
        self, get: Callable[..., object], url: str, clock: Clock, pause: Callable[[float], object] = time.sleep
    ) -> None:
        self._get, self._url, self._clock, self._pause = get, url, clock, pause
        fleet = self._ask("/v1/status", op.FleetStatus)
        self._clock_offset_s = fleet.now - clock.wall()
        self._after = fleet.newest_event
        self.detail = self._ask(url, op.JobDetail)
        self._first_generation = self.detail.summary.generation
        self._known_steps: dict[int, int] = {}
        self._goal: tuple[int, int] | None = None
        self._slowest: Progress | None = None
        self._events: list[op.Event] = []
        self._note_steps()
        self.before = self._progress()
        self.struck_at = 0.0

    def strike(self) -> None:
        """Note the moment of the fault."""
        self.struck_at = self._clock.wall() + self._clock_offset_s

    def poll(self) -> None:
        """Read the job and the events since the last poll, and wait a little."""
        self._pause(POLL_S)
        try:
            page = self._ask("/v1/events", op.EventList, after=self._after, limit=500)
            self.detail = self._ask(self._url, op.JobDetail)
        except Unavailable:
            return
        self._after = page.next_after
        self._events += [event for event in page.events if event.job in ("", self.detail.summary.job)]
        self._note_steps()

    def observe(self, seconds: float) -> None:
        """Poll for as long as a fault lasts, and keep the slowest progress."""
        end = self._clock.monotonic() + seconds
        while self._clock.monotonic() < end and not self.is_over:
            self.poll()
            now = self._progress()
            if self._slowest is None or now.step_s > self._slowest.step_s:
                self._slowest = now

    def await_recovery(self, timeout_s: float, *, regroups: bool) -> bool:
        """Poll until all ranks step again, with ``regroups`` in a generation after the fault.

        Returns:
            Whether they did within ``timeout_s``, or the job has finished. False if it has failed since.
        """
        end = self._clock.monotonic() + timeout_s
        self._goal, recovered = None, False
        while not (recovered or self.is_over) and self._clock.monotonic() < end:
            self.poll()
            recovered = self._has_recovered(regroups)
        self._await_loss()
        if self.is_over:
            return self.detail.summary.state is JobState.FINISHED
        return recovered  # whatever follows: a further regroup has a reason of its own

    def _await_loss(self) -> None:
        """Poll for a moment until a loss of the newest generation has come; scripts need not report one."""
        end = self._clock.monotonic() + LOSS_WAIT_S
        while self.detail.summary.loss is None and not self.is_over and self._clock.monotonic() < end:
            self.poll()

    @property
    def is_over(self) -> bool:
        return self.detail.summary.state in (JobState.FINISHED, JobState.FAILED)

    @property
    def regrouped(self) -> bool:
        """True if a generation was decided after the fault."""
        return self.detail.summary.generation > self._first_generation

    def report(self, fault: str, action: str, *, recovered: bool, conclusion: str) -> FaultReport:
        """Return the report of what was seen since the fault."""
        regroups = [
            self._regroup(recovery)
            for recovery in self.detail.recoveries
            if recovery.generation > self._first_generation
        ]
        return FaultReport(
            fault=fault,
            action=action,
            job=self.detail.summary.job,
            at=self.struck_at,
            state=self.detail.summary.state,
            recovered=recovered,
            conclusion=conclusion,
            before=self.before,
            after=self._progress(),
            during=self._slowest,
            detection=self._detection(),
            regroups=tuple(regroups),
            verdicts=tuple(event.sentence for event in self._events if event.kind.startswith("verdict.")),
        )

    def _ask(self, url: str, kind: type[T], **query: str | int) -> T:
        answer = self._get(url, kind, **query)
        assert isinstance(answer, kind)
        return answer

    def _progress(self) -> Progress:
        job = self.detail.summary
        return Progress(step=job.step, loss=job.loss, step_s=job.step_s)

    def _note_steps(self) -> None:
        """Remember the newest step of each generation that any rank is known to have finished."""
        job = self.detail.summary
        steps = [rank.step for rank in self.detail.ranks]
        steps += [job.committed.step] if job.committed and job.committed.generation == job.generation else []
        self._known_steps[job.generation] = max(steps, default=0)

    def _has_recovered(self, regroups: bool) -> bool:
        job, newest = self.detail.summary, next(reversed(self.detail.recoveries), None)
        if job.state is not JobState.RUNNING or newest is None or newest.resumed_ranks < newest.world_size:
            return False
        if regroups and not self.regrouped:
            return False
        if self._goal is None or self._goal[0] != job.generation:
            self._goal = job.generation, job.step + SETTLE_STEPS
        return job.step >= self._goal[1]

    def _detection(self) -> Detection | None:
        for event in self._events:
            if event.kind.startswith(DETECTING):
                seen_at = float(event.detail.get("seen_at", event.at))  # by the node, before the controller knew
                seen_at = min(event.at, max(self.struck_at, seen_at))
                after_s = max(0.0, seen_at - self.struck_at)
                return Detection(after_s=after_s, kind=event.kind, sentence=event.sentence)
        return None

    def _regroup(self, one: op.GenerationRecovery) -> RegroupOutcome:
        before = max((number for number in self._known_steps if number < one.generation), default=0)
        restored = one.restored.step if one.restored is not None else 0
        resumed = (
            int(event.detail["step"])
            for event in self._events
            if event.kind == "resumed" and event.generation == one.generation and "step" in event.detail
        )
        first = next(resumed, None)
        return RegroupOutcome(
            generation=one.generation,
            reason=str(one.reason),
            sentence=one.sentence,
            world_size=one.world_size,
            decided_after_s=max(0.0, one.decided_at - self.struck_at),
            duration_s=one.duration_s,
            phases_s=one.phases_s,
            restored=one.restored,
            steps_repeated=max(0, max(self._known_steps.get(before, 0), one.finished_step or 0) - restored),
            steps_skipped=None if first is None else first - restored - 1,
        )

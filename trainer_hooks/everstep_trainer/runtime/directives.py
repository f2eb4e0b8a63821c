"""Handle the agent's directives and watch the rank's progress, on the connection's thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from time import perf_counter

from everstep.clock import Clock
from everstep.vocabulary import GenerationReason, RankActivity
from everstep.wire.v1.directives import NewGeneration, StopJob, VersionNotice
from everstep.wire.v1.local import FromAgent, LauncherLost, RankHeartbeat, ToAgent
from everstep.wire.v1.training import GenerationSpec, Member, RankStalled
from everstep_trainer.base.interrupt import Interrupter
from everstep_trainer.base.progress import StepProgress
from everstep_trainer.config import HookSettings
from everstep_trainer.runtime.activity import MainThreadObserver, script_stack
from everstep_trainer.runtime.stalls import Observer, Stall, StallWatch, all_stacks, main_stack

# ---- received directives: the newest generation and the end of the job


class ReceivedDirectives:
    """The newest directives, written by the connection's thread, awaited by the main thread; older ones are ignored."""

    def __init__(self) -> None:
        # not taken through the condition where an interrupt may come; see the module interrupt
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._newest: GenerationSpec | None = None
        self._ended_through = 0
        self._stop: StopJob | None = None

    def add_generation(self, spec: GenerationSpec) -> bool:
        """Record a generation; return False if a newer or equal one is known."""
        with self._lock:
            if self._newest is not None and spec.number <= self._newest.number:
                return False
            self._newest = spec
            if spec.after_step is None:
                self._ended_through = spec.number
            self._changed.notify_all()
            return True

    def add_stop(self, stop: StopJob) -> None:
        with self._lock:
            self._stop = self._stop or stop
            self._changed.notify_all()

    def is_generation_over(self, number: int, step: int) -> bool:
        """Return whether a rank that finished ``step`` must leave generation ``number``, for the newest known one."""
        with self._lock:
            if self._stop is not None or self._ended_through > number:
                return True
            newest = self._newest
            if newest is None or newest.number <= number:
                return False
            return newest.after_step is None or step >= newest.after_step

    def is_superseded(self, number: int) -> bool:
        """Return whether a newer generation, or the end of the job, is known."""
        with self._lock:
            return self._next(number) is not None

    def wait_next(self, number: int, timeout_s: float | None = None) -> GenerationSpec | StopJob | None:
        """Wait for the directive after generation ``number``: a newer one or the end of the job; None on time-out."""
        with self._changed:
            self._changed.wait_for(lambda: self._next(number) is not None, timeout_s)
            return self._next(number)

    def _next(self, number: int) -> GenerationSpec | StopJob | None:
        newer = self._newest if self._newest is not None and self._newest.number > number else None
        return self._stop or newer


# ---- membership: the main thread's state in a generation, and how the signal thread gets it out


class MembershipState(Enum):
    NOT_A_MEMBER = auto()
    JOINING = auto()
    MEMBER = auto()


@dataclass(eq=False)
class GenerationMembership:
    """The main thread is outside of generations, joining, or inside; ``abort`` and transitions exclude each other."""

    directives: ReceivedDirectives
    progress: StepProgress
    interrupter: Interrupter
    abort_collectives: Callable[[], object]
    cut_store: Callable[[], object]
    end_process: Callable[[], object]  # the last resort of an abort
    settings: HookSettings

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.state = MembershipState.NOT_A_MEMBER
        self._number = 0
        self._abort_attempts = 0
        self._abort_started_at = 0.0
        self._regroup_started_at: float | None = None

    # --- for the main thread

    def join(self, number: int) -> None:
        """Begin to join a generation."""
        self._move(MembershipState.JOINING, number)

    def enter(self) -> None:
        """Enter the joined generation."""
        self._move(MembershipState.MEMBER, self._number)

    def leave(self) -> None:
        """Leave the generation; nothing is aborted from now on."""
        self._move(MembershipState.NOT_A_MEMBER, self._number)

    def _move(self, state: MembershipState, number: int) -> None:
        with self._lock:
            self.state, self._number, self._abort_attempts = state, number, 0

    def must_end(self) -> bool:
        """Return whether the generation joined or entered must be left."""
        step = self.progress.finished_step if self.state is MembershipState.MEMBER else -1
        return self.directives.is_generation_over(self._number, step)

    def take_regroup_start(self) -> float:
        """Return when the current regrouping began (perf_counter): when it was announced, or now if it was not."""
        with self._lock:
            began, self._regroup_started_at = self._regroup_started_at, None
        return perf_counter() if began is None else began

    # --- for the signal thread

    @property
    def is_aborting(self) -> bool:
        """True if the main thread was asked to leave and has not."""
        return self._abort_attempts > 0 and self.state is not MembershipState.NOT_A_MEMBER

    @property
    def must_leave(self) -> bool:
        """True if the training function runs in a generation that it was asked to leave."""
        return self._abort_attempts > 0 and self.state is MembershipState.MEMBER

    def abort(self) -> None:
        """Get the main thread out of a generation that is over: end collectives and ask it to leave; at the second call
        cut the store's connection too; later interrupt its Python code, and in the end give up the process."""
        with self._lock:
            if self.state is MembershipState.NOT_A_MEMBER or not self.must_end():
                return
            now = perf_counter()
            if self._abort_attempts == 0:
                self._abort_started_at = now
            if self._regroup_started_at is None:
                self._regroup_started_at = now
            self._abort_attempts += 1
            elapsed_s = now - self._abort_started_at
            self.abort_collectives()
            if self.state is MembershipState.JOINING or self._abort_attempts > 1:
                self.cut_store()
            if self.state is MembershipState.MEMBER:
                self.interrupter.request_regroup()
                if elapsed_s > self.settings.interrupt_after_s:
                    self.interrupter.interrupt()
            if elapsed_s > self.settings.leave_timeout_s:
                self.end_process()


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class DirectiveListener:
    """Listens to the agent. The main thread calls ``enter`` and ``leave``; the connection's thread calls the rest."""

    directives: ReceivedDirectives
    membership: GenerationMembership
    progress: StepProgress
    send: Callable[[ToAgent], None]
    settings: HookSettings
    clock: Clock
    observer: Observer | None = None  # of the main thread

    def __post_init__(self) -> None:
        observer = self.observer or MainThreadObserver(self.settings, self.clock, self.progress)
        self._stalls = StallWatch(self.settings, self.clock, self.progress, observer)
        self._spec: GenerationSpec | None = None
        self._member: Member | None = None
        self._position = (0, 0)  # generation and finished step at the last tick
        self._is_moving = False
        self.on_versions: Callable[[VersionNotice], None] | None = None  # receives the committed version and candidate

    def enter(self, spec: GenerationSpec, member: Member) -> None:
        """Begin to take part in ``spec``, from its rendezvous on. The agent learns it before the training function may
        take Python's lock and keep it: a rank that has never ticked is not judged by its silence."""
        self._stalls.enter(spec.spec.hang_threshold_s)
        self._spec, self._member = spec, member
        self.send(self._build_tick(spec, member))

    def leave(self) -> None:
        self._spec = self._member = self.on_versions = None

    # --- for the connection's thread

    def handle_message(self, message: FromAgent) -> None:
        if isinstance(message, NewGeneration):
            spec, stack = message.spec, ""
            if spec.reason is GenerationReason.RANK_HUNG and self.membership.state is MembershipState.MEMBER:
                stack, full = script_stack(), main_stack(self.settings.max_stack_bytes)  # before anything is aborted
            if self.directives.add_generation(spec):
                self.membership.abort()
                if stack:  # the agent may report a stopped rank before this rank reports that it waits
                    logger.warning(
                        "%s; rank %d was after step %d, in the last of %d collectives, at\n%s",
                        spec.sentence,
                        self._member.rank if self._member is not None else -1,
                        self.progress.finished_step,
                        self.progress.collective_count,
                        stack,
                        extra={"job": spec.job, "generation": spec.number, "trace": spec.trace, "stack": full},
                    )
        elif isinstance(message, StopJob):
            self.directives.add_stop(message)
            self.membership.abort()
        elif isinstance(message, VersionNotice) and (on_versions := self.on_versions) is not None:
            on_versions(message)
        elif isinstance(message, LauncherLost):
            logger.warning("the launcher ended, so this rank will not be replaced: %s", message.detail)

    def is_aborting(self) -> bool:
        return self.membership.is_aborting

    def may_tick_rarely(self) -> bool:
        """Return whether training moves on, on full cores: a tick takes one from it, and there is no stall to see."""
        return self._is_moving and self.progress.are_cores_full

    def make_tick(self) -> RankHeartbeat | None:
        self.membership.abort()
        spec, member = self._spec, self._member
        before, self._position = self._position, (self.progress.generation, self.progress.finished_step)
        self._is_moving = before != self._position and self.membership.state is MembershipState.MEMBER
        if spec is None or member is None:
            return None
        if self.membership.state is MembershipState.MEMBER and (stall := self._stalls.check()) is not None:
            self._report_stall(stall, spec, member)
        tick = self._build_tick(spec, member)
        return tick if self._spec is spec else None  # the main thread may count steps of the next generation already

    def _build_tick(self, spec: GenerationSpec, member: Member) -> RankHeartbeat:
        progress = self.progress
        return RankHeartbeat(
            generation=spec.number,
            rank=member.rank,
            step=progress.finished_step,
            step_s=progress.median_step_s,
            collectives=progress.collective_count,
            loss=progress.loss.value(),
            busy_s=progress.median_busy_s,
            snapshot_every=progress.snapshot_every,
            started_step=self._begun(spec),
            until_step=progress.until_step,
        )

    def _begun(self, spec: GenerationSpec) -> int:
        """Return the last step begun in ``spec``: the main thread may still count steps of the previous generation."""
        return self.progress.begun_step if self.progress.generation == spec.number else 0

    def _report_stall(self, stall: Stall, spec: GenerationSpec, member: Member) -> None:
        """Report where the rank stands. The controller knows the other ranks too, and decides and says it."""
        state, limit = stall.state, self.settings.max_stack_bytes
        waits = state.activity in (RankActivity.COLLECTIVE, RankActivity.MOVING)
        self.send(
            RankStalled(
                job=spec.job,
                at=self.clock.wall(),
                generation=spec.number,
                rank=member.rank,
                step=self.progress.finished_step,
                collectives=self.progress.collective_count,
                stalled_s=stall.stalled_s,
                threshold_s=stall.threshold_s,
                begun=self._begun(spec),
                stacks=main_stack(limit) if waits else all_stacks(limit),
                activity=state.activity,
                activity_s=state.activity_s,
                doing=state.doing,
                place=state.place,
                place_s=state.place_s,
                operation=state.operation,
                section=state.section.name if state.section is not None else "",
                limit_s=state.section.limit_s if state.section is not None else None,
                waits_for_all=state.waits_for_all,
                transfers=state.transfers,
                may_wait=state.may_wait,
            )
        )

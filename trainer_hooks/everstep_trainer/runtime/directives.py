"""What the link's thread does for a rank: hears directives, looks after its progress, tells of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import Enum, auto
from time import perf_counter
from typing import Protocol

from everstep.clock import Clock
from everstep.vocabulary import GenerationReason
from everstep.wire.v1.directives import NewGeneration, StopJob, VersionNotice
from everstep.wire.v1.local import FromAgent, LauncherLost, Tick, ToAgent
from everstep.wire.v1.training import GenerationSpec, Member, RankStalled
from everstep_trainer.config import HookSettings
from everstep_trainer.runtime.interrupt import Interrupter
from everstep_trainer.runtime.progress import Progress, Stall, Watchdog, all_stacks, main_stack

# ---- orders
# What the agent has told this process: the newest generation, and the end of the job.


class Orders:
    """Written by the link's thread, read and waited for by the main thread. Older generations are dropped by rule."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never taken through the condition where an interrupt may come: see interrupt
        self._changed = threading.Condition(self._lock)
        self._newest: GenerationSpec | None = None
        self._urgent_through = 0
        self._stop: StopJob | None = None

    def hear_generation(self, spec: GenerationSpec) -> bool:
        """Takes a generation; False where it is not newer than what is known."""
        with self._lock:
            if self._newest is not None and spec.number <= self._newest.number:
                return False
            self._newest = spec
            if spec.after_step is None:
                self._urgent_through = spec.number
            self._changed.notify_all()
            return True

    def hear_stop(self, stop: StopJob) -> None:
        with self._lock:
            self._stop = self._stop or stop
            self._changed.notify_all()

    @property
    def stop(self) -> StopJob | None:
        with self._lock:
            return self._stop

    def is_over(self, number: int, step: int) -> bool:
        """Whether generation ``number`` must be left by a rank that finished ``step``.

        A generation with ``after_step`` leaves its predecessor in order, at that boundary; one without ends every
        older generation at once, whatever boundary had been set before.
        """
        with self._lock:
            if self._stop is not None or self._urgent_through > number:
                return True
            newest = self._newest
            if newest is None or newest.number <= number:
                return False
            return newest.after_step is None or step >= newest.after_step

    def superseded(self, number: int) -> bool:
        """Whether a newer generation, or the end of the job, is known."""
        with self._lock:
            return self._next(number) is not None

    def wait_next(self, number: int, timeout_s: float | None = None) -> GenerationSpec | StopJob | None:
        """What follows generation ``number``: a newer one or the end of the job; None when the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._next(number) is not None, timeout_s)
            return self._next(number)

    def _next(self, number: int) -> GenerationSpec | StopJob | None:
        if self._stop is not None:
            return self._stop
        if self._newest is not None and self._newest.number > number:
            return self._newest
        return None


# ---- presence
# Where the main thread is with respect to generations, and how the signal thread gets it out of one.


class Where(Enum):
    OUT = auto()
    JOINING = auto()
    INSIDE = auto()


class Presence:
    """Three places: out of any generation, joining one, inside one (the training function runs).

    The lock makes ``press`` and the moves exclude each other, so that what is aborted is never the generation that
    the main thread has gone on to.

    Args:
        abort: ends the collectives of this process.
        cut: breaks the connection to the rendezvous store, for a thread that waits on it.
        give_up: ends the process, when nothing else has helped.
    """

    def __init__(
        self,
        orders: Orders,
        progress: Progress,
        interrupter: Interrupter,
        abort: Callable[[], object],
        cut: Callable[[], object],
        give_up: Callable[[], object],
        settings: HookSettings,
    ) -> None:
        self._orders = orders
        self._progress = progress
        self._interrupter = interrupter
        self._abort = abort
        self._cut = cut
        self._give_up = give_up
        self._settings = settings
        self._lock = threading.Lock()
        self._where = Where.OUT
        self._number = 0
        self._presses = 0
        self._pressed_at = 0.0
        self._disturbed_at: float | None = None

    # --- the main thread

    def join(self, number: int) -> None:
        """Begins to join a generation."""
        self._move(Where.JOINING, number)

    def enter(self) -> None:
        """The generation joined is entered."""
        self._move(Where.INSIDE, self._number)

    def leave(self) -> None:
        """Out of it; nothing is aborted any more."""
        self._move(Where.OUT, self._number)

    def _move(self, where: Where, number: int) -> None:
        with self._lock:
            self._where, self._number, self._presses = where, number, 0

    def is_over(self) -> bool:
        """Whether the generation joined or entered must be left."""
        step = self._progress.step if self._where is Where.INSIDE else -1
        return self._orders.is_over(self._number, step)

    def disturbance(self) -> float:
        """When the present regrouping began (perf_counter): with the news of it, or now if there was none."""
        with self._lock:
            began, self._disturbed_at = self._disturbed_at, None
        return perf_counter() if began is None else began

    # --- the signal thread

    @property
    def where(self) -> Where:
        return self._where

    @property
    def pressing(self) -> bool:
        """Whether the main thread was told to leave and has not."""
        return self._presses > 0 and self._where is not Where.OUT

    @property
    def unwelcome(self) -> bool:
        """Whether the training function runs in a generation that it was told to leave."""
        return self._presses > 0 and self._where is Where.INSIDE

    def press(self) -> None:
        """Gets the main thread out where its generation is over. Called with the news, and again until it is out.

        At first the collectives are ended and the thread is asked to leave. One that is still there at the next call
        may be waiting on the store, whose connection is worth keeping otherwise; then its Python code is interrupted;
        in the end the process is given up.
        """
        with self._lock:
            if self._where is Where.OUT or not self.is_over():
                return
            now = perf_counter()
            if self._presses == 0:
                self._pressed_at = now
            if self._disturbed_at is None:
                self._disturbed_at = now
            self._presses += 1
            self._push(now - self._pressed_at)

    def _push(self, pressed_s: float) -> None:
        """One more attempt, ``pressed_s`` after the first."""
        self._abort()
        if self._where is Where.JOINING or self._presses > 1:
            self._cut()
        if self._where is Where.INSIDE:
            self._interrupter.ask()
            if pressed_s > self._settings.interrupt_after_s:
                self._interrupter.interrupt()
        if pressed_s > self._settings.leave_within_s:
            self._give_up()


logger = logging.getLogger(__name__)


class VersionListener(Protocol):
    def note_versions(self, notice: VersionNotice) -> None:
        """What is committed, and what may be next."""


class Attendant:
    """The link's listener. ``enter`` and ``leave`` are the main thread's, the rest is called from the link's."""

    def __init__(
        self,
        orders: Orders,
        presence: Presence,
        progress: Progress,
        send: Callable[[ToAgent], None],
        settings: HookSettings,
        clock: Clock,
    ) -> None:
        self._orders = orders
        self._presence = presence
        self._progress = progress
        self._send = send
        self._settings = settings
        self._clock = clock
        self._watchdog = Watchdog(settings, clock)
        self._spec: GenerationSpec | None = None
        self._member: Member | None = None
        self.keeper: VersionListener | None = None

    def enter(self, spec: GenerationSpec, member: Member) -> None:
        """The main thread takes part in ``spec`` from here on, beginning with its rendezvous."""
        self._watchdog.enter(spec.spec.hang_threshold_s)
        self._spec, self._member = spec, member

    def leave(self) -> None:
        """It takes part in nothing."""
        self._spec = self._member = self.keeper = None

    # --- the link's thread

    def hear(self, message: FromAgent) -> None:
        if isinstance(message, NewGeneration):
            stood = self._stack_in_a_hang(message.spec)
            if self._orders.hear_generation(message.spec):
                self._presence.press()
                if stood:
                    self._log_hang(message.spec, stood)
        elif isinstance(message, StopJob):
            self._orders.hear_stop(message)
            self._presence.press()
        elif isinstance(message, VersionNotice):
            if (keeper := self.keeper) is not None:
                keeper.note_versions(message)
        elif isinstance(message, LauncherLost):
            logger.warning("the launcher is gone, this rank will not be replaced: %s", message.detail)

    def pressing(self) -> bool:
        return self._presence.pressing

    def pulse(self) -> Tick | None:
        self._presence.press()
        spec, member, progress = self._spec, self._member, self._progress
        if spec is None or member is None:
            return None
        if self._presence.where is Where.INSIDE and (stall := self._watchdog.check(progress)) is not None:
            self._tell(stall, spec, member)
        return Tick(
            generation=spec.number,
            rank=member.rank,
            step=progress.step,
            step_s=progress.step_s,
            collectives=progress.collectives,
            loss=progress.loss.value(),
            busy_s=progress.busy_s,
            snapshot_every=progress.snapshot_every,
            begun=self._begun(spec),
        )

    def _begun(self, spec: GenerationSpec) -> int:
        """The last step begun in ``spec``: the main thread may still count those of the generation before."""
        return self._progress.begun if self._progress.generation == spec.number else 0

    def _stack_in_a_hang(self, following: GenerationSpec) -> str:
        """Where the main thread waits when a hang ends its generation; taken before anything is aborted."""
        hung = following.reason is GenerationReason.RANK_HUNG and self._presence.where is Where.INSIDE
        return main_stack(self._settings.stacks_bytes) if hung else ""

    def _log_hang(self, spec: GenerationSpec, stood: str) -> None:
        """The agent may name a stopped rank long before anybody's watchdog looks: so every rank says where it stood."""
        logger.warning(
            "%s; until then this rank stood after step %d, in the last of %d collectives, at\n%s",
            spec.sentence,
            self._progress.step,
            self._progress.collectives,
            stood,
            extra={"job": spec.job, "generation": spec.number, "trace": spec.trace},
        )

    def _tell(self, stall: Stall, spec: GenerationSpec, member: Member) -> None:
        step, collectives = self._progress.step, self._progress.collectives
        logger.warning(
            "no step finished for %.1f s (threshold %.1f s) after step %d: taken for a hang. Who evaluates or "
            "saves there for so long says how long by --hang-threshold-s",
            stall.stalled_s,
            stall.threshold_s,
            step,
            extra={"node": member.node, "job": spec.job, "generation": spec.number, "trace": spec.trace},
        )
        self._send(
            RankStalled(
                job=spec.job,
                at=self._clock.wall(),
                generation=spec.number,
                rank=member.rank,
                step=step,
                collectives=collectives,
                stalled_s=stall.stalled_s,
                threshold_s=stall.threshold_s,
                begun=self._begun(spec),
                stacks=all_stacks(self._settings.stacks_bytes),
            )
        )

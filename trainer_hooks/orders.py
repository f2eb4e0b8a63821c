"""What the agent has told this process: the newest generation, and the end of the job."""

from __future__ import annotations

import threading

from everstep.wire.v1.directives import StopJob
from everstep.wire.v1.training import GenerationSpec


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

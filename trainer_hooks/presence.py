"""Where the main thread is with respect to generations, and how the signal thread gets it out of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum, auto
from time import perf_counter

from trainer_hooks.config import HookSettings
from trainer_hooks.interrupt import Interrupter
from trainer_hooks.orders import Orders
from trainer_hooks.progress import Progress


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

"""Where the main thread is with respect to generations, and how the signal thread gets it out of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum, auto
from time import perf_counter

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
    """

    def __init__(
        self,
        orders: Orders,
        progress: Progress,
        interrupter: Interrupter,
        abort: Callable[[], object],
        cut: Callable[[], object],
    ) -> None:
        self._orders = orders
        self._progress = progress
        self._interrupter = interrupter
        self._abort = abort
        self._cut = cut
        self._lock = threading.Lock()
        self._where = Where.OUT
        self._number = 0
        self._presses = 0
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

    def press(self) -> None:
        """Gets the main thread out where its generation is over. Called with the news, and again until it is out.

        The first time only the collectives are ended and the exception set: the store's connection is worth keeping.
        A main thread that is still there at the next call may be waiting on the store.
        """
        with self._lock:
            if self._where is Where.OUT or not self.is_over():
                return
            self._presses += 1
            if self._disturbed_at is None:
                self._disturbed_at = perf_counter()
            self._abort()
            if self._where is Where.JOINING or self._presses > 1:
                self._cut()
            if self._where is Where.INSIDE:
                self._interrupter.interrupt()

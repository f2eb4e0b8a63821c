"""The first plan of a generation, for jobs that would rather not train than train without checkpoints."""

from __future__ import annotations

import threading

from everstep.errors import OutOfSlotMemory
from trainer_hooks.interrupt import SLICE_S


class FirstPlan:
    """Whether the generation has slots. The copier thread tells, the training thread asks.

    Args:
        required: whether the lack of memory for them is the training script's to hear of. Once there are slots, what
            fails later is told in the log alone, as for every job.
    """

    def __init__(self, required: bool) -> None:
        self._required = required
        self._tried = threading.Event()
        self._error: OutOfSlotMemory | None = None

    def made(self) -> None:
        self._error, self._required = None, False

    def failed(self, error: Exception) -> None:
        if self._required and isinstance(error, OutOfSlotMemory):
            self._error = error

    def tried(self) -> None:
        """As soon as can be: with a plan, without one, or where what is to be stored is not known yet."""
        self._tried.set()

    def wait(self) -> None:
        """Before the first step. Raises OutOfSlotMemory."""
        while self._required and not self._tried.wait(SLICE_S):
            pass
        self.check()

    def check(self) -> None:
        """Raises OutOfSlotMemory where it was what the plan failed for."""
        if self._error is not None:
            raise self._error

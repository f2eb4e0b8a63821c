"""Storage that fails for a moment is asked again; what is damaged is read once more, and what is gone is gone."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from time import sleep
from typing import TypeVar

from everstep.backoff import Backoff
from everstep.object_storage import storage_errors
from trainer_hooks.archive_checks import Damaged
from trainer_hooks.interrupt import SLICE_S

log = logging.getLogger(__name__)

T = TypeVar("T")

AGAIN = Backoff(floor_s=0.5, ceiling_s=8.0)
MOST_TRIES = 5
"""Of what fails: 0.5, 1, 2 and 4 s at most lie between them. A job that goes back a checkpoint loses many minutes."""

_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that say what is there, not that nobody could look."""


def pause(seconds: float) -> None:
    """Waits, in slices."""
    for _ in range(round(seconds / SLICE_S)):
        sleep(SLICE_S)


def patiently(read: Callable[[], T], wait: Callable[[float], None] = pause) -> T:
    """What ``read`` returns, which is called again where a storage failed it (a time-out is that too), and once more
    where it raised Damaged: a bit may have flipped on its way.

    Raises what it raised last, and OSError for what only the storage's package has a name for.
    """
    failed, damaged = 0, False
    while True:
        try:
            return read()
        except _FINAL:
            raise
        except Damaged as error:
            if damaged:
                raise
            damaged = True
            log.warning("storage is read once more: %s", error)
        except storage_errors() as error:
            failed += 1
            if failed == MOST_TRIES:
                raise error if isinstance(error, OSError) else OSError(str(error)) from error
            log.warning("storage fails, try %d of %d: %s", failed, MOST_TRIES, error)
            wait(AGAIN.delay_s(failed - 1, random.random()))

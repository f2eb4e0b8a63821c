"""Learn of a rank's death at once, whatever memory its process has.

Each rank holds a mutex (``everstep.host.robust_mutex``) in a page that the agent made for its connection. A thread
of the agent waits for each. The kernel gives the mutex up before it frees the memory of a killed process, and closes
its sockets only afterwards: 0.2 to 0.6 s later for each GiB.

A mutex may also be given up by a thread that ends in a process that lives on, by ``exec``, or by a rank that
overwrites it. So the mutex alone is no death: every thread of the process must be exiting or have SIGKILL pending. If
they are not, the watch ends, and the end of the connection tells of the death as it does without this module.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL

from everstep.host.processes import PROC, is_exiting, read_stat
from everstep.host.robust_mutex import OWNER_DIED, FutexWord, is_held, is_supported, make_memory
from everstep_agent.jobs.local_processes import ProcessEnd

log = logging.getLogger(__name__)

RECHECK_S = 5.0
"""Seconds after which a waiting thread looks at its word again, in case another process took the wake-up."""
SPURIOUS_PAUSE_S = 0.001
"""Seconds that a thread sleeps after a wake-up for nothing, so that a rank cannot keep the agent busy."""
CONFIRM_PAUSES_S = (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Seconds before each look at a process whose mutex was given up: the last of its threads may end a little later."""

_KILL_PENDING = 1 << (SIGKILL - 1)
_PENDING_SIGNALS, _WAIT_STATUS = 28, 49
"""Fields of /proc/PID/stat, counted from the state."""


class DeathWatch:
    """Wait for the death of one connected process.

    Args:
        pid: The process, as this agent's /proc numbers it.
        pidfd: A pidfd of the process; the watch copies it.
        descriptor: Memory of ``make_memory``, which now belongs to the watch. The process makes its mutex there.
        on_death: Called once, in the thread of the watch, when the process is known to be ending.

    Raises:
        OSError: The memory cannot be mapped.
    """

    def __init__(self, pid: int, pidfd: int, descriptor: int, on_death: Callable[[ProcessEnd], None]) -> None:
        self._pid, self._on_death = pid, on_death
        self._word = FutexWord(descriptor)
        self.descriptor = descriptor
        try:
            self._pidfd = os.dup(pidfd)
        except OSError:
            self._word.close()
            raise
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start_if_locked(self) -> None:
        """Start to wait if the process has locked its mutex, or lost it already. Cheap; call it at each message."""
        if self._thread is not None or self._closed.is_set():
            return
        held = self._word.read()
        if is_held(held) or held & OWNER_DIED:
            thread = threading.Thread(target=self._run, args=(held,), name="everstep-death-watch", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the limit of threads is reached
                log.warning("pid %d: its death will be known by its connection only: %s", self._pid, error)
                self.close()
            else:
                self._thread = thread

    def close(self) -> None:
        """End the watch. ``on_death`` may be called once more if the process ends at this moment."""
        if self._thread is not None:
            self._closed.set()
            self._word.wake()
        elif not self._closed.is_set():
            self._closed.set()
            self._release()

    def _run(self, held: int) -> None:
        try:
            if self._was_given_up(held) and (end := self._confirm()) is not None:
                self._on_death(end)
        except OSError as error:
            log.warning("pid %d: its death will be known by its connection only: %s", self._pid, error)
        finally:
            self._release()

    def _was_given_up(self, held: int) -> bool:
        """Wait until the word changes. Return False if the watch was closed, or the word tells nothing any more."""
        while not self._closed.is_set():
            word = self._word.read()
            if word & OWNER_DIED:
                return True
            if word != held:
                log.debug("pid %d released or overwrote its mutex", self._pid)
                return False
            self._word.wait(held, RECHECK_S)
            if self._word.read() == held:
                self._closed.wait(SPURIOUS_PAUSE_S)
        return False

    def _confirm(self) -> ProcessEnd | None:
        """Return how the process ends; None if it does not."""
        for pause_s in CONFIRM_PAUSES_S:
            if self._closed.wait(pause_s):
                return None
            if (end := read_end(self._pid, self._pidfd)) is not None:
                return end
        log.info("pid %d gave up its mutex and lives on: its connection is watched alone", self._pid)
        return None

    def _release(self) -> None:
        self._word.close()
        os.close(self._pidfd)


def open_watch(pid: int, pidfd: int, on_death: Callable[[ProcessEnd], None]) -> DeathWatch | None:
    """Return a watch of the process; None where the machine has no such memory or the process is not in /proc here,
    as in another container."""
    if pid <= 0 or not is_supported():
        return None
    try:
        return DeathWatch(pid, pidfd, make_memory(), on_death)
    except OSError as error:
        log.warning("pid %d: its death will be known by its connection only: %s", pid, error)
        return None


def read_end(pid: int, pidfd: int, processes: Path = PROC) -> ProcessEnd | None:
    """Return how a process ends, or None if one of its threads may go on.

    Args:
        pid: Its number in ``processes``.
        pidfd: A pidfd of it. If it tells that the process has ended, ``processes`` may show another one.
        processes: Where the kernel's files of processes are.
    """
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    if ended.poll(0):
        return ProcessEnd()
    folder = processes / str(pid)
    try:
        found = [_fields_of(folder / "task" / thread) for thread in os.listdir(folder / "task")]
    except OSError:
        return None  # a /proc of other processes, or the process ended just now: its pidfd tells
    threads = [fields for fields in found if fields]
    if not threads or not all(map(_is_ending, threads)):
        return None
    fields = _fields_of(folder)
    return _describe_status(int(fields[_WAIT_STATUS])) if fields else ProcessEnd()


def _fields_of(folder: Path) -> list[str]:
    """Return the fields from the state on; none of a thread that is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return read_stat(folder)
    return []


def _is_ending(fields: list[str]) -> bool:
    return is_exiting(fields) or bool(int(fields[_PENDING_SIGNALS]) & _KILL_PENDING)


def _describe_status(status: int) -> ProcessEnd:
    """Return what a wait status says. 0 is left open: the kernel shows it also to those who may not know the status."""
    if not status:
        return ProcessEnd()
    code = os.waitstatus_to_exitcode(status)
    return ProcessEnd(exit_code=code) if code >= 0 else ProcessEnd(signal=-code)

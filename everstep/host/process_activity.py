"""Tell from /proc whether a process works or stands still (Linux).

A process works if it uses a processor or waits for one, reads or writes, has child processes that do, wakes up
regularly, or is debugged. A sample costs some 0.2 ms, so only processes that say nothing of themselves are sampled.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path

import msgspec

from everstep.host.processes import PROC, read_stat

BUSY_SHARE = 0.05
"""Share of the time for which a process that works uses processors, or waits for one. Background threads of a process
that stands still (progress bars, metrics, NCCL's watchdog) stay below 0.02."""
IO_BYTES_PER_S = 16_384
"""Bytes per second that a process that works reads and writes. Log lines of background threads stay below it."""
WAKE_UPS_PER_S = 4.0
"""Wake-ups per second of a main thread that works: a slow download or a loop of polls. A wait for a lock has none, and
Python's and torch's own waits with a time-out have one in a few seconds."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NS = 1e-9


class Work(StrEnum):
    """What a process that works does, in words that follow the process's name."""

    DEBUGGED = "is debugged"
    COMPUTES = "computes"
    STARVED = "waits for a processor"
    TRANSFERS = "reads or writes"
    CHILDREN = "waits for its child processes, which work"
    POLLS = "waits in short intervals"
    MOVES = "runs through its code"


class ProcessSample(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernel says of one process at one time.

    Attributes:
        at: Monotonic time in seconds.
        state: State letter of the main thread.
        cpu_s: Processor time of all threads.
        starved_s: Time in which threads were ready to run and had no processor. In a sample from inside, of the main
            thread: background threads that wake up now and then wait too on a busy machine.
        io_bytes: Bytes read and written, from the page cache too.
        children_cpu_s: Processor time of all descendants, ended ones too.
        children_io_bytes: Bytes that living descendants have read and written.
        wake_ups: How often the main thread slept and was woken.
        main_cpu_s: Processor time of the main thread.
        others_cpu_s: Processor time of the living threads but the main one, the sampling one and ``background``.
        is_traced: A debugger is attached.
    """

    at: float
    state: str
    cpu_s: float = 0.0
    starved_s: float = 0.0
    io_bytes: int = 0
    children_cpu_s: float = 0.0
    children_io_bytes: int = 0
    wake_ups: int = 0
    main_cpu_s: float = 0.0
    others_cpu_s: float = 0.0
    is_traced: bool = False


def sample_process(
    pid: int, at: float, *, without_thread: int = 0, background: Collection[int] = (), proc: Path = PROC
) -> ProcessSample | None:
    """Return a sample of a process, or None if it is gone or a zombie.

    Args:
        pid: The process.
        at: Monotonic time of the sample.
        without_thread: For a sample from inside: the sampling thread, whose own work does not count. 0 from outside.
        background: For a sample from inside: kernel ids of threads whose work says nothing about the program.
        proc: Where the proc file system is.
    """
    folder = proc / str(pid)
    stat = _stat_fields(folder)
    if stat is None or stat[0] in "ZX":
        return None
    threads = {tid: _schedule(folder / "task" / str(tid)) for tid in _threads(folder)}
    nothing = (0.0, 0.0)
    main_cpu_s, main_starved_s = threads.get(pid, nothing)
    own_io = _io_bytes(folder / "task" / str(without_thread)) if without_thread else 0
    status = _status(folder)
    children_cpu_s, children_io_bytes = _descendants(folder, proc)
    return ProcessSample(
        at=at,
        state=stat[0],
        cpu_s=(int(stat[11]) + int(stat[12])) / _TICKS_PER_S - threads.get(without_thread, nothing)[0],
        starved_s=main_starved_s if without_thread else sum(starved for _, starved in threads.values()),
        io_bytes=_io_bytes(folder) - own_io,
        children_cpu_s=children_cpu_s + (int(stat[13]) + int(stat[14])) / _TICKS_PER_S,
        children_io_bytes=children_io_bytes,
        wake_ups=int(status.get("voluntary_ctxt_switches", "0")),
        main_cpu_s=main_cpu_s,
        others_cpu_s=sum(
            cpu_s for tid, (cpu_s, _) in threads.items() if tid not in (pid, without_thread) and tid not in background
        ),
        is_traced=status.get("TracerPid", "0") != "0",
    )


def find_work(before: ProcessSample, after: ProcessSample) -> Work | None:
    """Return what a process did between two samples; None if it stood still."""
    seconds = max(after.at - before.at, 1e-3)
    cpu_s = after.cpu_s - before.cpu_s
    io_bytes = after.io_bytes - before.io_bytes
    children_io_bytes = after.children_io_bytes - before.children_io_bytes
    if after.is_traced:
        return Work.DEBUGGED
    if cpu_s >= BUSY_SHARE * seconds:
        return Work.COMPUTES
    if cpu_s + after.starved_s - before.starved_s >= BUSY_SHARE * seconds:
        return Work.STARVED
    if io_bytes >= IO_BYTES_PER_S * seconds:
        return Work.TRANSFERS
    if after.children_cpu_s - before.children_cpu_s >= BUSY_SHARE * seconds:
        return Work.CHILDREN
    if children_io_bytes >= IO_BYTES_PER_S * seconds:
        return Work.CHILDREN
    if after.wake_ups - before.wake_ups >= WAKE_UPS_PER_S * seconds:
        return Work.POLLS
    return None


class ActivityWindow:
    """The samples of the last seconds of one process."""

    def __init__(self, *, min_s: float, max_s: float) -> None:
        """Judge over at least ``min_s`` and at most ``max_s`` seconds."""
        self._min_s, self._max_s = min_s, max_s
        self._samples: deque[ProcessSample] = deque()

    def add(self, sample: ProcessSample) -> None:
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at <= sample.at - self._max_s:
            self._samples.popleft()

    def clear(self) -> None:
        self._samples.clear()

    @property
    def is_filled(self) -> bool:
        """Whether the samples cover ``min_s``, so that ``work`` means something."""
        return len(self._samples) > 1 and self._samples[-1].at - self._samples[0].at >= self._min_s

    @property
    def ends(self) -> tuple[ProcessSample, ProcessSample]:
        """The oldest and the newest sample."""
        return self._samples[0], self._samples[-1]

    def work(self) -> Work | None:
        """Return what the process does; None if it stands still."""
        return find_work(*self.ends)


def _threads(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder / "task")]
    except OSError:
        return []


def _stat_fields(folder: Path) -> list[str] | None:
    """Return the fields of ``stat`` after the name: state, parent, ..."""
    try:
        return read_stat(folder)
    except OSError:
        return None


def _schedule(task: Path) -> tuple[float, float]:
    """Return seconds on a processor and seconds of waiting for one; zeros where the kernel does not count them."""
    try:
        on_cpu, waiting = (task / "schedstat").read_text().split()[:2]
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(on_cpu) * _NS, int(waiting) * _NS


def _io_bytes(folder: Path) -> int:
    """Return the bytes read and written; 0 where they may not be read."""
    try:
        lines = (folder / "io").read_text().splitlines()
    except OSError:
        return 0
    values = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return sum(values.get(name, 0) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))


def _status(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / "status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _descendants(folder: Path, proc: Path) -> tuple[float, int]:
    """Return the processor seconds, with those of ended children, and the bytes of all descendants."""
    cpu_s, io_bytes, waiting = 0.0, 0, _children(folder)
    while waiting:
        child = proc / waiting.pop()
        stat = _stat_fields(child)
        if stat is not None:
            cpu_s += sum(int(field) for field in stat[11:15]) / _TICKS_PER_S
            io_bytes += _io_bytes(child)
            waiting += _children(child)
    return cpu_s, io_bytes


def _children(folder: Path) -> list[str]:
    found: list[str] = []
    for tid in _threads(folder):
        try:
            found += (folder / "task" / str(tid) / "children").read_text().split()
        except OSError:
            continue
    return found

"""Read the processes of this machine from /proc, and signal one of them without hitting another (Linux)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

PROC = Path("/proc")


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process, as it was when it was read. ``name`` is its ``comm``; ``started`` tells it from a later process of
    the same pid, in clock ticks since the boot."""

    pid: int
    parent: int
    user: int
    name: str
    state: str
    started: int
    arguments: tuple[str, ...] = ()


_PF_EXITING = 0x4


def read_stat(folder: Path) -> list[str]:
    """Return the fields of ``stat`` from the state on, of a process or a thread; proc_pid_stat(5) has them as 3 and on.

    Raises:
        OSError: It is gone.
    """
    return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()  # a name may contain anything


def is_exiting(fields: list[str]) -> bool:
    """Return whether a thread with these fields of ``stat`` runs no more of its program."""
    return bool(int(fields[6]) & _PF_EXITING) or fields[0] in "ZX"


def read_process(pid: int, proc: Path = PROC) -> Process | None:
    """Return a process, or None if it is gone or a zombie."""
    folder = proc / str(pid)
    try:
        stat = (folder / "stat").read_text(errors="replace")
        user = folder.stat().st_uid
        arguments = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return None
    head, _, tail = stat.rpartition(")")  # a name may contain anything
    fields = tail.split()
    if fields[0] in "ZX":
        return None
    return Process(
        pid=pid,
        parent=int(fields[1]),
        user=user,
        name=head.partition("(")[2],
        state=fields[0],
        started=int(fields[19]),
        arguments=tuple(os.fsdecode(argument) for argument in arguments),
    )


def read_processes(proc: Path = PROC) -> dict[int, Process]:
    """Return all processes that can be read, by pid."""
    pids = (int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())
    return {pid: found for pid in pids if (found := read_process(pid, proc)) is not None}


def read_environment(pid: int, proc: Path = PROC) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it is gone or another user's."""
    try:
        lines = (proc / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(line).partition("=") for line in lines if b"=" in line)
    return {name: value for name, _, value in pairs}


def status_field(pid: int, name: str, proc: Path = PROC) -> str:
    """Return the first word of a field in /proc/PID/status; "0" if the process is gone."""
    try:
        for line in (proc / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return line.split()[1]
    except OSError:
        pass
    return "0"


def has_signal_handler(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; False if it is gone."""
    return bool(int(status_field(pid, "SigCgt"), 16) >> (number - 1) & 1)


def send_signal(process: Process, number: int) -> bool:
    """Signal a process; return False if it has ended. A later process of the same pid is not signalled.

    Raises PermissionError for a process of another user.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        now = read_process(process.pid)  # after the descriptor: what it names cannot change any more
        if now is None or now.started != process.started:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


@contextmanager
def continued_at_end(process: Process) -> Iterator[None]:
    """Send SIGCONT to a process at the end of the block, also if this process is killed inside the block.

    A forked child waits for that in a session of its own, where Ctrl-C does not reach it.
    """
    reading, writing = os.pipe()
    guard = os.fork()
    if guard == 0:
        try:
            os.setsid()
            os.close(writing)
            os.read(reading, 1)
            send_signal(process, signal.SIGCONT)
        finally:
            os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        os.waitpid(guard, 0)
        send_signal(process, signal.SIGCONT)  # should the guard have been killed

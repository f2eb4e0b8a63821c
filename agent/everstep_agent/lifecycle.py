"""Start and end an agent process: run directory, locks, leftover segments, child processes, logs."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from everstep.errors import ConfigurationError
from everstep.host.private_files import private_directory, write_private
from everstep.log_lines import SEARCH_FIELDS, JsonLineFormatter, PlainLineFormatter, StderrHandler


def write_atomically(path: Path, content: Any) -> None:
    """Write ``content`` as JSON, mode 0600; a reader sees either the whole new file or the previous one."""
    write_private(path, msgspec.json.encode(content) + b"\n")


def acquire_lock(lock_file: Path, error_message: str) -> int:
    """Lock ``lock_file`` exclusively and return its descriptor; the lock ends with the process.

    The holder may unlink the file as its last act before closing the descriptor. Raises ConfigurationError if another
    process holds the lock (message: ``error_message``).
    """
    lock = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigurationError(error_message) from None
    if lock_file.exists() and os.path.samestat(lock_file.stat(), os.fstat(lock)):
        return lock
    os.close(lock)
    return acquire_lock(lock_file, error_message)  # the former holder unlinked the file at this moment


class AgentRunDirectory:
    """The run directory, held by a lock so that two agents never serve the same sockets. Raises ConfigurationError if
    another agent holds the directory."""

    def __init__(self, path: Path) -> None:
        self.path = private_directory(path.absolute())
        self._lock_file = self.path / "agent.lock"
        refusal = f"another agent runs in {self.path}; stop it, or use another --run-dir"
        self._lock = acquire_lock(self._lock_file, refusal)

    def next_incarnation(self, wall: float, state_dir: Path | None = None) -> int:
        """Return this run's number: ``wall`` in milliseconds, but above earlier numbers even if the clock went back.

        A reboot empties the run directory, and an agent may start before the clock is set. So the number is kept in
        ``state_dir`` as well.
        """
        file = self.path / "incarnation"
        kept = file if state_dir is None else state_dir / "incarnation"
        now = max(int(wall * 1000), *(_read_number(each) + 1 for each in (file, kept)))
        write_atomically(file, now)
        if kept != file:
            with contextlib.suppress(OSError):  # read-only or full: the run directory has it until the next boot
                write_atomically(kept, now)
        return now

    def release(self, *names: str) -> None:
        """Remove ``names`` and the lock; the directory stays, with the incarnation for the next run."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        self._lock_file.unlink(missing_ok=True)
        os.close(self._lock)


def _read_number(file: Path) -> int:
    """Return the number in a file; -1 if there is none."""
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return -1
    return int(text) if text.isdecimal() else -1


def delete_segments(directory: Path) -> None:
    """Delete a vault's segment directory, and the user's directory above it once it is empty. Call only if no vault
    uses the directory: the ranks of a live vault would lose their slots."""
    if directory.is_symlink():
        return
    shutil.rmtree(directory, ignore_errors=True)
    if directory.parent.name.startswith("everstep-"):
        with contextlib.suppress(OSError):  # another node's vault still uses it
            directory.parent.rmdir()


_UCRED = struct.Struct("iII")


def peer_credentials(connected: socket.socket) -> tuple[int, int]:
    """Return pid and user id of the process at the other end of a unix socket."""
    pid, uid, _ = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


async def wait_readable(descriptor: int) -> None:
    """Wait until the descriptor is readable; a pidfd is when its process has ended."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def start_child(module: str, *descriptors: int, **environment: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run ``module`` with a socket to this process, the other ``descriptors`` and our pid as arguments.

    Returns the process and our non-blocking end. Start it from the main thread: the child ends with that thread.
    """
    ours, theirs = socket.socketpair()
    passed = (theirs.fileno(), *descriptors)
    command = [sys.executable, "-P", "-m", module, *map(str, passed), str(os.getpid())]
    nothing, variables = subprocess.DEVNULL, {**os.environ, **environment}
    try:
        process = subprocess.Popen(command, pass_fds=passed, stdin=nothing, stdout=nothing, env=variables)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    ours.setblocking(False)
    return process, ours


async def end_child(process: subprocess.Popen[bytes], timeout_s: float, *, is_ending: bool = False) -> str:
    """End a child process and describe how it ended; one that ``is_ending`` may first end by itself."""
    if is_ending:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, timeout_s)
    killed = process.poll() is None
    if killed:
        process.kill()
    try:
        await asyncio.to_thread(process.wait, timeout_s)
    except subprocess.TimeoutExpired:
        return f"pid {process.pid} was killed but is blocked in the kernel"
    return "killed" if killed else f"exit status {process.returncode}"


class TextLines(PlainLineFormatter):
    """Time, level, message, and the fields that are set."""

    def text(self, record: logging.LogRecord) -> str:
        values = {name: getattr(record, name, None) for name in SEARCH_FIELDS}
        known = " ".join(f"{name}={value}" for name, value in values.items() if value not in (None, ""))
        line = super().text(record)
        return f"{line} [{known}]" if known else line


def log_to_stderr(log_format: str, level: str) -> None:
    """Send the whole process's log to stderr as ``text`` or ``json``."""
    handler = StderrHandler()
    handler.setFormatter(JsonLineFormatter() if log_format == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)

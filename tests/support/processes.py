"""Processes of tests: one that lives as long as its test, and looks at others by their numbers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def ended(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Starts ``command`` and ends it afterwards: asked first, killed where it does not listen."""
    process = subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def is_running(pid: int) -> bool:
    """Whether a process lives; one that waits to be collected does not."""
    return state_and_parent(pid)[0] not in ("", "Z", "X")


def state_and_parent(pid: int) -> tuple[str, int]:
    """The kernel's letter for a process and its parent's number; empty and 0 for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    return fields[0], int(fields[1])


def parents_of_all() -> dict[int, int]:
    """The parent of each process that there is."""
    return {int(name): state_and_parent(int(name))[1] for name in os.listdir("/proc") if name.isdigit()}


def comm(pid: int) -> str:
    """What a process calls itself; empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def command_line(pid: int) -> bytes:
    """With a zero byte after each word; empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""

"""State, parents and descendants of processes, and a process that is terminated after a block."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def terminated_after(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``command``, and terminate it afterwards. It is killed if it does not end."""
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
    """Return whether a process lives and is no zombie."""
    return state_and_parent(pid)[0] not in ("", "Z", "X")


def state_and_parent(pid: int) -> tuple[str, int]:
    """Return a process's state letter and its parent's pid, or an empty string and 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    return fields[0], int(fields[1])


def parents_of_all() -> dict[int, int]:
    """Return the parent of each process."""
    return {int(name): state_and_parent(int(name))[1] for name in os.listdir("/proc") if name.isdigit()}


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process, the nearest first."""
    parents = parents_of_all()
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def comm(pid: int) -> str:
    """Return a process's name, or an empty string if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def command_line(pid: int) -> bytes:
    """Return a process's arguments, each with a zero byte after it; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""

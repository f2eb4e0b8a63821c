"""Run a program with a deadline and bounded output, in a thread of its own: no program may hold the poll up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

Start = Callable[[Callable[[], None]], None]
"""Starts a piece of work: ``in_thread``, or ``at_once`` where nothing can block."""


def in_thread(work: Callable[[], None]) -> None:
    """Run the work in a thread that does not keep the process alive."""
    threading.Thread(target=work, daemon=True).start()


def at_once(work: Callable[[], None]) -> None:
    """Run the work before returning."""
    work()


def run_bounded(command: Sequence[str], timeout_s: float, max_bytes: int) -> str | None:
    """Return what the command writes, up to ``max_bytes``; None if it is not there, fails or takes too long.

    The command is killed at the deadline. One that not even that ends blocks the calling thread only.
    """
    import subprocess  # few nodes run commands: the module costs memory

    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"LC_ALL": "C"},
        )
    except OSError:
        return None
    deadline = threading.Timer(timeout_s, process.kill)
    deadline.daemon = True
    deadline.start()
    with process:
        assert process.stdout is not None
        output = process.stdout.read(max_bytes)
        is_cut = len(output) == max_bytes
        if is_cut:
            process.kill()
        process.wait()
    deadline.cancel()
    return output.decode("utf-8", "replace") if is_cut or process.returncode == 0 else None

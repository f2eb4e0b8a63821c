"""The project's own programs for tests: started by their command lines, or forked from a server that imported them.

A controller's imports take 1.3 s of CPU, a vault's 0.25 s. What is forked runs the same ``main`` with the same
arguments, environment and working directory; that the command lines work as well is for a few tests to show.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from everstep_trainer.launch.forking.fork_messages import Exited

from tests.support.forked import DEADLINE_S, ForkPool

MODULES = (
    "everstep_agent.vault.process",
    "everstep_agent.vault.parity",
    "everstep_controller.main",
    "everstep_controller.serve_command",
    "everstep_controller.store.database",
    "httptools",
    "psycopg",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite",
)
OF_NODES = (
    "everstep_agent.main",
    "everstep_agent.command",
    "everstep_agent.sensors.sampler",
    "everstep_trainer.launch.command",
)


class Forked:
    """What Popen has, of a program that was forked."""

    def __init__(self, forks: ForkPool, module: str, arguments: Sequence[str], output: Path | None = None) -> None:
        """Calls ``main`` of ``module``. ``output``: where it appends what it says; without it, as the server's."""
        self._child = forks.start(
            run,
            module,
            list(arguments),
            os.getcwd(),
            str(output or ""),
            environment=forks.changed_environment(),
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        end = self._child.ended()
        return None if end is None else self._status(end)

    def wait(self, timeout: float = DEADLINE_S) -> int:
        return self._status(self._child.wait(timeout))

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _status(self, end: Exited) -> int:
        self._child.close()
        return -end.signal if end.signal is not None else end.code or 0


def run(module: str, arguments: Sequence[str], folder: str, output: str) -> None:
    """In a forked process: what ``python -m module`` does."""
    os.chdir(folder)
    show_command(sys.executable, "-m", module, *arguments)
    show_environment()
    if output:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    sys.argv[1:] = arguments
    importlib.import_module(module).main()


def show_command(*words: str) -> None:
    """Makes ``/proc/PID/cmdline`` of this process what it would be had it been started so: there is the room of the
    fork server's own, which names all that it imports."""
    _show(45, words)


def show_environment() -> None:
    """Make ``/proc/PID/environ`` of this process show its environment, in the room of the fork server's own."""
    for name, value in os.environ.items():
        os.putenv(name, value)  # moves what the C library knows out of the way
    _show(47, [f"{name}={value}" for name, value in os.environ.items()])


def _show(field: int, words: Sequence[str]) -> None:
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[field : field + 2])
    text = b"\0".join(map(os.fsencode, words))
    assert len(text) < end - begin, "more than the fork server's own command line or environment"
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)

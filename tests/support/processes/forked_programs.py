"""Everstep's programs, forked from a server that has imported them.

The imports of a controller take 1.3 s of CPU, those of a vault 0.25 s. A forked program runs the same ``main`` with the
same arguments, environment and working directory. A few tests start the programs by their command lines.
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
from tests.support.processes.fork_pool import DEADLINE_S, ForkPool

MODULES = (
    "everstep_agent.vault.process",
    "everstep_agent.vault.parity",
    "everstep_controller.main",
    "everstep_controller.app.serve_command",
    "everstep_controller.store.database",
    "httptools",
    "psycopg",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite",
)
NODE_MODULES = (
    "everstep_agent.main",
    "everstep_agent.command",
    "everstep_agent.sensors.sampler",
    "everstep_trainer.launch.command",
)


class ForkedProgram:
    """The interface of Popen for a forked program."""

    def __init__(self, forks: ForkPool, module: str, arguments: Sequence[str], output: Path | None = None) -> None:
        """Call ``main`` of ``module``. ``output``: file for its output; by default the fork server's."""
        self._child = forks.start(
            run_program,
            module,
            list(arguments),
            os.getcwd(),
            str(output or ""),
            environment=forks.environment_changes(),
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


def run_program(module: str, arguments: Sequence[str], folder: str, output: str) -> None:
    """Run a module's ``main`` in a forked process as ``python -m`` does."""
    os.chdir(folder)
    set_command_line(sys.executable, "-m", module, *arguments)
    set_environment()
    if output:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    sys.argv[1:] = arguments
    importlib.import_module(module).main()


def set_command_line(*words: str) -> None:
    """Write the command line that ``/proc/PID/cmdline`` shows over that of the fork server."""
    _overwrite(45, words)


def set_environment() -> None:
    """Write the environment that ``/proc/PID/environ`` shows over that of the fork server."""
    for name, value in os.environ.items():
        os.putenv(name, value)  # moves the strings of the C library elsewhere
    _overwrite(47, [f"{name}={value}" for name, value in os.environ.items()])


def _overwrite(field: int, words: Sequence[str]) -> None:
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[field : field + 2])
    text = b"\0".join(map(os.fsencode, words))
    assert len(text) < end - begin, "longer than the command line or environment of the fork server"
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)

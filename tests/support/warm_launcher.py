"""``everstep-launch``, forked from a server that has everything imported, and what it starts forked from it.

A fork server imports torch otherwise, which takes two seconds of CPU, a controller takes one, agent, vault and sensors
half of one. What runs is the same ``main`` with the same arguments, environment and working directory, and
``/proc/PID/cmdline`` says so; that the command lines work as well is for some tests to show (``warm=False``).
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from everstep_trainer.launch.process_setup import reset_signals

from tests.support.forked import ChildFailed, leave, torch_forks
from tests.support.programs import Forked, show_command

PROGRAMS = {
    "everstep_trainer.launch.forkserver",
    "everstep_controller.main",
    "everstep_agent.main",
    "everstep_agent.vault.process",
    "everstep_agent.sensors.sampler",
}
"""What is forked, by the modules that command lines name. A spill's writer is not: it must hold nothing of its vault's,
and a probe's process is one that imports torch."""


class WarmLauncher(Forked):
    """What Popen has, of a launcher. ``out`` and ``err``: files that it writes to."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], out: Path, err: Path
    ) -> None:
        self._arguments = list(arguments)
        forks = torch_forks()
        paths = (str(folder), str(out), str(err))
        changed = forks.changed_environment(environment)
        self._child = forks.start(launch, self._arguments, *paths, environment=changed)

    def wait(self, timeout: float = 60.0) -> int:
        try:
            return super().wait(timeout)
        except ChildFailed:
            raise subprocess.TimeoutExpired(self._arguments, timeout) from None


def launch(arguments: Sequence[str], folder: str, out: str, err: str) -> None:
    """In a forked process: what ``python -m everstep_trainer.launch`` does."""
    from everstep_trainer.launch.command import main

    os.chdir(folder)
    show_command(sys.executable, "-m", "everstep_trainer.launch", *arguments)
    for path, descriptor in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv[1:] = arguments
    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    sys.exit(main())


_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_execute_child)


def execute_child(process: Any, *arguments: Any) -> None:
    """In place of Popen's own: forks a program of ``PROGRAMS``, starts everything else as ever."""
    call = _signature.bind(process, *arguments).arguments
    command = [os.fspath(word) for word in call["args"]]
    if command[0] != sys.executable or not PROGRAMS & {*command}:
        _execute_child(process, *arguments)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(command, call)
    process.pid = pid
    process._child_created = True
    process._close_pipe_fds(*(call[name] for name in PIPES))


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _become(command: list[str], call: Mapping[str, Any]) -> NoReturn:
    """In what was just forked: the program's ``main``, with nothing of its parent's."""
    gc.freeze()  # a parent's garbage must not be collected here: it may own descriptors by their numbers
    gc.enable()
    atexit._clear()
    asyncio._set_running_loop(None)
    for handler in logging.root.handlers[:]:
        logging.root.removeHandler(handler)
    if call["start_new_session"]:
        os.setsid()
    reset_signals()
    for name, descriptor in (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2)):
        if call[name] != -1:
            os.dup2(call[name], descriptor)
    _close_all_but(call["pass_fds"])
    if call["env"] is not None:
        os.environ.clear()
        os.environ.update(call["env"])
    at = next(at for at, word in enumerate(command) if word in PROGRAMS)
    sys.argv[1:] = command[at + 1 :]
    show_command(*command)
    try:
        sys.exit(importlib.import_module(command[at]).main())
    except SystemExit as end:
        leave(end.code)
    except BaseException:  # noqa: BLE001 - as the interpreter would
        sys.excepthook(*sys.exc_info())
        leave(1)


def _close_all_but(kept: Sequence[int]) -> None:
    below = 3
    for descriptor in sorted(kept):
        os.closerange(below, descriptor)
        below = descriptor + 1
    os.closerange(below, os.sysconf("SC_OPEN_MAX"))

"""``everstep-launch`` and other programs, forked from a server that has everything imported, and what they start forked
from them.

A fork server imports torch otherwise, which takes two seconds of CPU, a controller takes one, agent, vault and sensors
half of one. What runs is the same ``main`` with the same arguments, environment and working directory, and
``/proc/PID/cmdline`` says so; that the command lines work as well is for some tests to show (``warm=False``).
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import functools
import gc
import importlib
import inspect
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from everstep_trainer.launch.forking.process_setup import reset_signals, set_process_name

from examples.demo.world import World
from tests.support import dying
from tests.support.forked import ChildFailed, leave, torch_forks
from tests.support.programs import Forked, show_command, show_environment

PROGRAMS = {
    "everstep_trainer.launch",
    "everstep_trainer.launch.forking.forkserver",
    "everstep_controller.main",
    "everstep_agent.main",
    "everstep_agent.vault.process",
    "everstep_agent.sensors.sampler",
}
"""What is forked, by the modules that command lines name. A spill's writer is not: it must hold nothing of its vault's,
and a probe's process is one that imports torch."""
INHERITED = (signal.SIGHUP,)
"""Signals that a program goes on ignoring if its parent does."""


class WarmProgram(Forked):
    """What Popen has, of ``python COMMAND``, where the command begins with ``-m``."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        out: Path,
        err: Path,
        *,
        namespace: str = "",
    ) -> None:
        """``out`` and ``err``: files that it writes to. ``namespace``: the name of its network namespace."""
        self.args = [sys.executable, *command]
        paths = (str(folder), str(out), str(err))
        ignored = [number for number in INHERITED if signal.getsignal(number) is signal.SIG_IGN]
        self._child = torch_forks().start(run_command, list(command), *paths, dict(environment), ignored, namespace)

    def wait(self, timeout: float = 60.0) -> int:
        try:
            return super().wait(timeout)
        except ChildFailed:
            raise subprocess.TimeoutExpired(self.args, timeout) from None


class WarmWorld(World):
    """A world of the demonstration whose controller, agents and launchers are forked."""

    def start(self, name: str, arguments: list[str], environment: dict[str, str] | None = None) -> Any:
        log = self.logs / f"{name}.log"
        wanted = {**os.environ, "XDG_STATE_HOME": str(self.folder / "state"), **(environment or {})}
        process: Any = WarmProgram(arguments, Path.cwd(), wanted, log, log)
        self.processes.append(process)
        return process


def run_command(
    command: Sequence[str],
    folder: str,
    out: str,
    err: str,
    environment: Mapping[str, str],
    ignored: Sequence[signal.Signals],
    namespace: str,
) -> None:
    """In a forked process: what ``python COMMAND`` does."""
    os.environ.clear()  # some of the modules that the fork server imports set variables
    os.environ.update(environment)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    os.chdir(folder)
    _ignore(ignored)
    if namespace:
        _enter(namespace)
    set_process_name("python")
    show_command(sys.executable, *command)
    show_environment()
    for path, descriptor in ((os.devnull, 0), (out, 1), (err, 2)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    tempfile.tempdir = None
    sys.argv[1:] = command[2:]
    sys.orig_argv = [sys.executable, *command]
    dying.install()
    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    sys.exit(_main_of(command[1])())


def _ignore(numbers: Iterable[signal.Signals]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def _enter(namespace: str) -> None:
    """Move this process into a network namespace of ``ip netns``."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"no entry into the namespace {namespace}")


def _main_of(name: str) -> Callable[[], Any]:
    """Return what ``python -m NAME`` calls."""
    module: Any = importlib.import_module(name)
    if hasattr(module, "__path__"):
        return functools.partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
    main: Callable[[], Any] = module.main
    return main


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
    ignored = [number for number in INHERITED if signal.getsignal(number) is signal.SIG_IGN]
    reset_signals()
    _ignore(ignored)
    set_process_name("python")
    for name, descriptor in (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2)):
        if call[name] != -1:
            os.dup2(call[name], descriptor)
    _close_all_but(call["pass_fds"])
    if call["env"] is not None:
        os.environ.clear()
        os.environ.update(call["env"])
    at = next(at for at, word in enumerate(command) if word in PROGRAMS)
    tempfile.tempdir = None
    sys.argv[1:] = command[at + 1 :]
    sys.orig_argv = command
    dying.install()
    show_command(*command)
    show_environment()
    try:
        sys.exit(_main_of(command[at])())
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

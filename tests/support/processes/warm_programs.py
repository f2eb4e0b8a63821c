"""``everstep-launch`` and other programs, forked from a server with all imports, as are the programs that they start.

The imports of a fork server take two seconds of CPU, those of a controller one second, and those of agent, vault and
sensors half a second. A forked program runs the same ``main`` with the same arguments, environment and working
directory, and ``/proc/PID/cmdline`` shows its command line. Some tests start the programs by their command lines
(``warm=False``).
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
from tests.support.processes import kill_points
from tests.support.processes.fork_pool import ChildFailed, exit_child, torch_forks
from tests.support.processes.forked_programs import ForkedProgram, set_command_line, set_environment

PROGRAMS = {
    "everstep_trainer.launch",
    "everstep_trainer.launch.forking.forkserver",
    "everstep_controller.main",
    "everstep_agent.main",
    "everstep_agent.vault.process",
    "everstep_agent.sensors.sampler",
}
"""Programs that are forked, by the modules in their command lines.

The writer of a spill is started, since it must not inherit memory of its vault, and so is a probe, which imports torch.
"""
INHERITED = (signal.SIGHUP,)
"""Signals that a program ignores if its parent ignores them."""


class WarmProgram(ForkedProgram):
    """The interface of Popen for ``python COMMAND`` with a command that begins with ``-m``."""

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
        """``out`` and ``err``: files for its output. ``namespace``: the name of its network namespace."""
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
    """A world of the demonstration with a forked controller, agents and launchers."""

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
    """Run a command in a forked process as ``python COMMAND`` does."""
    os.environ.clear()  # some of the modules that the fork server imports set variables
    os.environ.update(environment)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    os.chdir(folder)
    _ignore(ignored)
    if namespace:
        _enter(namespace)
    set_process_name("python")
    set_command_line(sys.executable, *command)
    set_environment()
    for path, descriptor in ((os.devnull, 0), (out, 1), (err, 2)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    tempfile.tempdir = None
    sys.argv[1:] = command[2:]
    sys.orig_argv = [sys.executable, *command]
    kill_points.install()
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
    """Return the function that ``python -m NAME`` calls."""
    module: Any = importlib.import_module(name)
    if hasattr(module, "__path__"):
        return functools.partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
    main: Callable[[], Any] = module.main
    return main


_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_execute_child)


def execute_child(process: Any, *arguments: Any) -> None:
    """Replace Popen's method: fork a program of ``PROGRAMS``, and start all others as before."""
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
    """Run the program's ``main`` in the forked process, without its parent's state."""
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
    kill_points.install()
    set_command_line(*command)
    set_environment()
    try:
        sys.exit(_main_of(command[at])())
    except SystemExit as end:
        exit_child(end.code)
    except BaseException:  # noqa: BLE001 - as the interpreter would
        sys.excepthook(*sys.exc_info())
        exit_child(1)


def _close_all_but(kept: Sequence[int]) -> None:
    below = 3
    for descriptor in sorted(kept):
        os.closerange(below, descriptor)
        below = descriptor + 1
    os.closerange(below, os.sysconf("SC_OPEN_MAX"))

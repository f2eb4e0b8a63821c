"""``everstep-launch``, forked from a server that has torch imported, and its own fork server from the launcher.

That imports torch otherwise: two seconds of CPU for each launcher. What runs is the same ``main`` with the same
arguments, environment and working directory; that the command lines work as well is for some tests to show.
"""

from __future__ import annotations

import gc
import inspect
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.forked import ChildFailed, leave, torch_forks
from tests.support.programs import Forked, show_command

FORK_SERVER = "trainer_hooks.launch.forkserver"


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
    """In a forked process: what ``python -m trainer_hooks.launch`` does."""
    from trainer_hooks.launch.main import main

    os.chdir(folder)
    show_command(sys.executable, "-m", "trainer_hooks.launch", *arguments)
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
    """In place of Popen's own: what is to be a fork server is forked, everything else started as ever."""
    call = _signature.bind(process, *arguments).arguments
    command = call["args"]
    if FORK_SERVER not in command:
        _execute_child(process, *arguments)
        return
    assert call["start_new_session"]
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _serve(command, call["pass_fds"], call["env"])
    process.pid = pid
    process._child_created = True


def _serve(command: Sequence[str], kept: Sequence[int], environment: Mapping[str, str]) -> None:
    """In what was just forked: the fork server's ``main``, with nothing of the launcher's."""
    from trainer_hooks.launch.forkserver import main
    from trainer_hooks.launch.process import fresh_signals

    gc.freeze()  # the launcher's garbage must not be collected here: it may own descriptors by their numbers
    os.setsid()
    fresh_signals()
    below = 3
    for descriptor in sorted(kept):
        os.closerange(below, descriptor)
        below = descriptor + 1
    os.closerange(below, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = command[command.index(FORK_SERVER) + 1 :]
    show_command(*command)
    try:
        main()
    except SystemExit as end:
        leave(end.code)
    except BaseException:  # noqa: BLE001 - as the interpreter would
        sys.excepthook(*sys.exc_info())
        leave(1)
    leave(0)

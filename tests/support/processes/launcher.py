"""``everstep-launch`` processes and their descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.processes.process_table import comm, descendants, is_running
from tests.support.processes.warm_programs import WarmProgram

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 120.0
LAUNCH = ("-m", "everstep_trainer.launch")
SLOW_RANKS = {"EVERSTEP_AGENT_UNRESPONSIVE_AFTER_S": "60"}
"""Environment for ranks whose imports keep the interpreter for seconds on a busy machine."""


class LauncherProcess:
    """A running launcher. Its output goes to files, so that it never waits for a reader."""

    def __init__(
        self,
        directory: Path,
        argv: list[str],
        environment: dict[str, str],
        *,
        warm: bool = True,
        namespace: str = "",
    ) -> None:
        self._out, self._err = directory / "launcher.out", directory / "launcher.err"
        excluded = ("EVERSTEP_", "PET_", "OMP_NUM_THREADS")  # the launcher sets the last one
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(excluded)}
        inherited |= {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(directory / "state")}
        inherited |= {"EVERSTEP_LAUNCH_VERBOSE": "true"} | environment  # tests wait for lines of its log
        self._out.write_bytes(b"")
        self._err.write_bytes(b"")
        self.process: subprocess.Popen[bytes] | WarmProgram
        if warm:
            self.process = WarmProgram(
                [*LAUNCH, *argv], directory, inherited, self._out, self._err, namespace=namespace
            )
            return
        with self._out.open("ab") as out, self._err.open("ab") as err:
            command = [sys.executable, *LAUNCH, *argv]
            self.process = subprocess.Popen(
                command, env=inherited, stdout=out, stderr=err, cwd=directory, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait(self) -> int:
        """Wait for the launcher's exit status."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher did not end; its output:\n{self.err}\n{self.out}") from None

    def descendants(self) -> list[int]:
        """Return the processes below the launcher, the nearest first."""
        return descendants(self.pid)

    def kill_all(self) -> None:
        """Kill the launcher and its descendants, as the loss of its machine does."""
        below = self.descendants()
        self.process.kill()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):  # the process has ended with its parent
                os.kill(pid, signal.SIGKILL)

    def child_named(self, name: str) -> int:
        """Wait for a descendant with the process name ``name`` (see ``call_process``), and return its pid."""

        def found() -> int | None:
            return next((pid for pid in self.descendants() if comm(pid) == name), None)

        return self.eventually(found, f"a process called {name}")

    def eventually(self, condition: Callable[[], object], expected: str) -> int:
        """Wait until ``condition`` is true, and return its value if it is an int. Fail with the launcher's output."""
        deadline = time.perf_counter() + DEADLINE_S
        while not (result := condition()):
            if time.perf_counter() > deadline:
                raise AssertionError(f"not seen: {expected}; output of the launcher:\n{self.err}\n{self.out}")
            time.sleep(0.02)
        return int(result) if isinstance(result, int) else 0


@contextlib.contextmanager
def launched(
    directory: Path, *argv: str, warm: bool = True, namespace: str = "", **environment: str
) -> Iterator[LauncherProcess]:
    """Start ``everstep-launch`` with these arguments in ``directory``, and kill it and its descendants at the end.

    ``warm``: fork it from a process with its imports (warm_programs.py), in the network ``namespace``; otherwise start
    it by its command.
    """
    launcher = LauncherProcess(directory, list(argv), environment, warm=warm, namespace=namespace)
    try:
        yield launcher
    finally:
        below = launcher.descendants()
        if launcher.process.poll() is None:
            launcher.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.process.wait(60)
        launcher.process.kill()
        launcher.process.wait()
        for pid in filter(is_running, below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

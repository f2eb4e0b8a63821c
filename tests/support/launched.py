"""``everstep-launch`` under test: a real launcher process, and a look at all that hangs below it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.processes import comm, is_running, parents_of_all
from tests.support.warm_launcher import WarmProgram

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
LAUNCH = ("-m", "everstep_trainer.launch")
PATIENT = {"EVERSTEP_AGENT_UNRESPONSIVE_AFTER_S": "60"}
"""Environment for ranks whose imports keep the interpreter for seconds on a busy machine."""


class Launched:
    """A running launcher; its output goes to files, so that nobody has to read it."""

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
        ours = ("EVERSTEP_", "PET_", "OMP_NUM_THREADS")  # the last is the launcher's to set
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        inherited |= {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(directory / "state")}
        inherited |= {"EVERSTEP_LAUNCH_VERBOSE": "true"} | environment  # its log is what tests wait for
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
        """The launcher's exit status."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher did not end; it said:\n{self.err}\n{self.out}") from None

    def descendants(self) -> list[int]:
        """Everything below the launcher, the nearest first."""
        parents = parents_of_all()
        found = [self.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found[1:]

    def kill_all(self) -> None:
        """Kill the launcher and everything below it, as the loss of its machine does."""
        below = self.descendants()
        self.process.kill()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):  # it has ended with its parent
                os.kill(pid, signal.SIGKILL)

    def child_named(self, name: str) -> int:
        """The pid of the descendant that calls itself ``name`` (see ``call_process``), once there is one."""

        def there() -> int | None:
            return next((pid for pid in self.descendants() if comm(pid) == name), None)

        return self.eventually(there, f"a process called {name}")

    def eventually(self, condition: Callable[[], object], what: str) -> int:
        """Waits until ``condition`` is true; returns what it said. Fails with the launcher's output."""
        deadline = time.perf_counter() + DEADLINE_S
        while not (result := condition()):
            if time.perf_counter() > deadline:
                raise AssertionError(f"never: {what}; the launcher said:\n{self.err}\n{self.out}")
            time.sleep(0.02)
        return int(result) if isinstance(result, int) else 0


@contextlib.contextmanager
def launched(
    directory: Path, *argv: str, warm: bool = True, namespace: str = "", **environment: str
) -> Iterator[Launched]:
    """Starts ``everstep-launch`` with these arguments in ``directory``; kills it and its children at the end.

    ``warm``: forked, and all below it, with what that imports (tests/support/warm_launcher.py), in the network
    namespace; else by its command.
    """
    launcher = Launched(directory, list(argv), environment, warm=warm, namespace=namespace)
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

"""Kill processes of a launcher and its services by a plan that is drawn from a seed.

A plan is a list of rounds. ``4:vault+rank1`` means: after four more steps of all ranks, SIGKILL the vault and rank 1
together. A round with 0 steps strikes during the recovery from the round before. A killed launcher is started again at
once, as by a supervisor. The fork server and the ranks are not killed before the job has formed, since an earlier exit
counts as a failure of the script.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from everstep.layout.vault_status import is_locked, read_status
from tests.support.processes.launcher import DEADLINE_S, LauncherProcess
from tests.support.processes.process_table import comm, command_line, is_running

WORLD = 3
RANKS = tuple(f"rank{n}" for n in range(WORLD))
KINDS = (*RANKS, "spare", "forks", "zygote", "store", "vault", "agent", "controller", "launcher")
WEIGHTS = (2, 2, 2, 1, 2, 1, 1, 4, 3, 3, 4)
MOST_IN_ONE_ROUND, MOST_STEPS = 3, 12
STEPS_A_ROUND = MOST_STEPS + 8
"""Steps after which the training waits for the next round."""
LONGEST_STEP_S = 0.2
"""Longest average step in seconds, on a busy machine."""
JOB = "torture"


@dataclass(frozen=True)
class Round:
    """``victims`` die once every rank has finished ``after`` more steps."""

    after: int
    victims: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Round:
        after, _, victims = text.partition(":")
        return cls(int(after), tuple(victims.split("+")))

    def __str__(self) -> str:
        return f"{self.after}:{'+'.join(self.victims)}"


def draw_plan(seed: int, rounds: int) -> list[Round]:
    """Draw rounds with mostly one victim and sometimes two or three. A third of them strike during a recovery."""
    chance = random.Random(seed)
    plan = []
    for _ in range(rounds):
        after = 0 if chance.random() < 0.33 else chance.randint(1, MOST_STEPS)
        count = chance.choices((1, 2, MOST_IN_ONE_ROUND), (6, 3, 1))[0]
        victims = dict.fromkeys(chance.choices(KINDS, WEIGHTS, k=count))
        plan.append(Round(after, tuple(victims)))
    return plan


class Progress:
    """The progress of the ranks that write their step logs into ``folder``."""

    def __init__(self, folder: Path, world: int) -> None:
        self._folder = folder
        self._world = world
        self._read: dict[Path, int] = {}
        self._ranks_at: dict[int, set[int]] = {}
        self._finished = 0

    def finished(self) -> int:
        """Return the last step that every rank has finished."""
        for path in self._folder.glob("steps-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = [line for line in file.readlines() if line.endswith(b"\n")]
            self._read[path] = self._read.get(path, 0) + sum(map(len, lines))
            for row in map(json.loads, lines):
                self._ranks_at.setdefault(row["step"], set()).add(row["rank"])
        steps = self._ranks_at
        self._finished = max([self._finished, *(step for step in steps if len(steps[step]) == self._world)])
        self._ranks_at = {step: ranks for step, ranks in steps.items() if step > self._finished}
        return self._finished


class Torture:
    """A training in ``folder`` with consecutive launchers. A socket's path has at most 107 bytes."""

    def __init__(self, folder: Path, until: int) -> None:
        self.folder = folder
        self.until = until
        self.launchers = 0
        self.launcher = self._launch()
        self._progress = Progress(folder, WORLD)

    def _launch(self) -> LauncherProcess:
        self.launchers += 1
        folder = self.folder / f"launcher-{self.launchers}"
        folder.mkdir()
        argv = ["--nproc-per-node", str(WORLD), "--standby-delay-s", "0.1", "--max-restarts", "1000", "--job", JOB]
        argv += ["--hang-threshold-s", "60", "--state-dir", str(self.folder / "state")]
        argv += ["-m", "tests.support.ranks.exact_training", str(self.folder), str(self.until)]
        return LauncherProcess(folder, argv, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})

    def run_plan(self, plan: Sequence[Round]) -> None:
        """Run all rounds, then the rest of the steps, until the job has finished."""
        for planned in plan:
            self._allow(self.finished() + STEPS_A_ROUND)
            due = self.finished() + planned.after
            self.launcher.eventually(partial(self._has_finished, due), f"{due} steps")
            self.strike(planned.victims)
        self._allow(self.until)
        assert self.launcher.process.wait(DEADLINE_S + LONGEST_STEP_S * self.until) == 0, self.logs()

    def strike(self, victims: Sequence[str]) -> None:
        """Kill the victims together, once all of them run."""
        pids = [self.launcher.eventually(partial(self._pid, name), f"a {name}") for name in victims]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # the process has ended together with another victim
                os.kill(pid, signal.SIGKILL)
        if "launcher" in victims:
            self.launcher.process.wait()
            self.launcher = self._launch()

    def is_over(self) -> bool:
        """Return False, but fail if the launcher has ended without being killed."""
        assert self.launcher.process.poll() is None, self.logs()
        return False

    def finished(self) -> int:
        return self._progress.finished()

    def _has_finished(self, step: int) -> bool:
        return self.finished() >= step or self.is_over()

    def logs(self) -> str:
        """Return the logs of all launchers and of their services, the newest last."""
        errors = sorted(self.folder.glob("launcher-*/launcher.err"), key=lambda path: path.stat().st_mtime)
        logs = sorted((self.folder / "state" / "logs").glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in [*logs, *errors])

    def _pid(self, name: str) -> int:
        """Return the pid of the process of that name, or 0 if there is none now."""
        if name == "launcher":
            return self.launcher.pid
        if name == "vault":
            return next(iter(self.vaults()), 0)
        below = self.launcher.descendants()
        if name in ("agent", "controller"):
            return next((pid for pid in below if f"{name}.main".encode() in command_line(pid)), 0)
        if ": generation " not in self.launcher.err:
            return 0  # a process that ends before the script came to everstep.main is the script's failure
        return next((pid for pid in below if comm(pid) == f"everstep-{name}"), 0)

    def vaults(self) -> list[int]:
        """Return the running vaults of this run, under any parent."""
        statuses = [read_status(folder) for folder in self.memory() if is_locked(folder)]
        return [status.pid for status in statuses if status is not None and is_running(status.pid)]

    def memory(self) -> list[Path]:
        """Return this run's directories in shared memory."""
        runs = [run.name for run in (self.folder / "state").glob("run-*")]
        return [folder for name in runs if (folder := Path(f"/dev/shm/everstep-{os.getuid()}") / name).exists()]

    def left(self) -> list[str]:
        """Return files and shared memory that a finished run should have removed."""
        return [*map(str, (self.folder / "state").glob("run-*")), *map(str, self.memory())]

    def _allow(self, step: int) -> None:
        draft = self.folder / "gate.draft"
        draft.write_text(str(min(step, self.until)))
        draft.rename(self.folder / "gate")

    def end(self) -> None:
        """Kill all remaining processes, and free their shared memory."""
        below, folders = self.launcher.descendants(), self.memory()
        self.launcher.process.kill()
        self.launcher.process.wait()
        while left := [pid for pid in {*below, *self._services()} if is_running(pid)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _services(self) -> list[int]:
        """Return all processes with this run's folder on their command line, under any parent."""
        every = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [pid for pid in every if str(self.folder).encode() in command_line(pid)]


@contextlib.contextmanager
def tortured(until: int) -> Iterator[Torture]:
    """Yield a run of ``until`` steps, and remove its processes and memory afterwards."""
    with tempfile.TemporaryDirectory(prefix="everstep-") as name:
        torture = Torture(Path(name), until)
        try:
            yield torture
        finally:
            torture.end()


def lost_or_repeated(rows: Sequence[dict[str, Any]], samples: int) -> list[int]:
    """Return the samples that an epoch lacks or repeats. ``rows`` must contain every rank's row of each step."""
    by_step: dict[int, dict[int, list[int]]] = {}
    for row in rows:
        by_step.setdefault(row["step"], {})[row["rank"]] = row["samples"]
    order = [sample for step in sorted(by_step) for rank in sorted(by_step[step]) for sample in by_step[step][rank]]
    epochs = [order[at : at + samples] for at in range(0, len(order), samples)]
    return [sample for epoch in epochs for sample in set(epoch) if epoch.count(sample) > 1] + [
        sample for epoch in epochs[:-1] for sample in set(range(samples)) - set(epoch)
    ]

"""Kills, drawn from a seed, of the processes that one launcher with services of its own consists of.

A plan is a list of rounds; ``4:vault+rank1`` means: when four more steps are finished by all ranks, SIGKILL the vault
and rank 1 in the same moment. With 0 steps a round follows upon the one before, in the middle of its recovery. A
launcher that was killed is started again at once, as whoever watches over it would; its fork server and what that
makes are left alone until the job has formed, since before that their end counts as the script's own.
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
from pathlib import Path
from typing import Any

from everstep.layout.vault_status import is_locked, read_status
from tests.support.launched import DEADLINE_S, Launched
from tests.support.processes import comm, command_line, is_running

WORLD = 3
RANKS = tuple(f"rank{n}" for n in range(WORLD))
KINDS = (*RANKS, "spare", "forks", "zygote", "store", "vault", "agent", "controller", "launcher")
WEIGHTS = (2, 2, 2, 1, 2, 1, 1, 4, 3, 3, 4)
MOST_IN_ONE_ROUND, MOST_STEPS = 3, 12
STEPS_A_ROUND = MOST_STEPS + 8
"""So many may be made until the next round strikes; training waits for it then."""
LONGEST_STEP_S = 0.2
"""On average, on a machine that has other work."""
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
    """Mostly one victim, sometimes two or three; a third of the rounds while the one before is being recovered from."""
    chance = random.Random(seed)
    plan = []
    for _ in range(rounds):
        after = 0 if chance.random() < 0.33 else chance.randint(1, MOST_STEPS)
        count = chance.choices((1, 2, MOST_IN_ONE_ROUND), (6, 3, 1))[0]
        victims = dict.fromkeys(chance.choices(KINDS, WEIGHTS, k=count))
        plan.append(Round(after, tuple(victims)))
    return plan


class Progress:
    """How far the ranks that write diaries into ``folder`` are."""

    def __init__(self, folder: Path, world: int) -> None:
        self._folder = folder
        self._world = world
        self._read: dict[Path, int] = {}
        self._ranks_at: dict[int, set[int]] = {}
        self._finished = 0

    def finished(self) -> int:
        """The last step that every rank has finished."""
        for path in self._folder.glob("diary-*.jsonl"):
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
    """One run in ``folder`` (short: a socket's path has 107 bytes at most): its launcher's lives, and what it steps."""

    def __init__(self, folder: Path, until: int) -> None:
        self.folder = folder
        self.until = until
        self.lives = 0
        self.launcher = self._launch()
        self._progress = Progress(folder, WORLD)

    def _launch(self) -> Launched:
        self.lives += 1
        place = self.folder / f"life-{self.lives}"
        place.mkdir()
        argv = ["--nproc-per-node", str(WORLD), "--standby-delay-s", "0.1", "--max-restarts", "1000", "--job", JOB]
        argv += ["--hang-threshold-s", "60", "--state-dir", str(self.folder / "state")]
        argv += ["-m", "tests.support.exact_training", str(self.folder), str(self.until)]
        return Launched(place, argv, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})

    # --- what it does ------------------------------------------------------------------------------------------------

    def play(self, plan: Sequence[Round]) -> None:
        """All rounds, then the rest of the steps; returns when the job has finished."""
        for one in plan:
            self._allow(self.finished() + STEPS_A_ROUND)
            due = self.finished() + one.after
            self.launcher.eventually(lambda due=due: self.finished() >= due or self.is_over(), f"{due} steps")
            self.strike(one.victims)
        self._allow(self.until)
        assert self.launcher.process.wait(DEADLINE_S + LONGEST_STEP_S * self.until) == 0, self.said()

    def strike(self, victims: Sequence[str]) -> None:
        """Kills them together, when all of them are there."""
        pids = [self.launcher.eventually(lambda name=name: self._pid(name), f"a {name}") for name in victims]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # with another victim, or for one
                os.kill(pid, signal.SIGKILL)
        if "launcher" in victims:
            self.launcher.process.wait()
            self.launcher = self._launch()

    def is_over(self) -> bool:
        """Fails where the launcher has ended though nobody killed it."""
        assert self.launcher.process.poll() is None, self.said()
        return False

    def finished(self) -> int:
        return self._progress.finished()

    def said(self) -> str:
        """What all lives of the launcher and their services said, the newest last."""
        errors = sorted(self.folder.glob("life-*/launcher.err"), key=lambda path: path.stat().st_mtime)
        logs = sorted((self.folder / "state" / "logs").glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in [*logs, *errors])

    # --- who is there ------------------------------------------------------------------------------------------------

    def _pid(self, name: str) -> int:
        """The process of that name, 0 where there is none now."""
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
        """Living vaults of this run, whoever's children they are now."""
        notes = [read_status(place) for place in self.memory() if is_locked(place)]
        return [note.pid for note in notes if note is not None and is_running(note.pid)]

    def memory(self) -> list[Path]:
        """Directories in shared memory of this run."""
        runs = [run.name for run in (self.folder / "state").glob("run-*")]
        return [place for name in runs if (place := Path(f"/dev/shm/everstep-{os.getuid()}") / name).exists()]

    def left(self) -> list[str]:
        """What a run leaves behind that it should not."""
        return [*map(str, (self.folder / "state").glob("run-*")), *map(str, self.memory())]

    def _allow(self, step: int) -> None:
        draft = self.folder / "gate.draft"
        draft.write_text(str(min(step, self.until)))
        draft.rename(self.folder / "gate")

    def end(self) -> None:
        """Kills whatever is left, and frees its memory."""
        below, places = self.launcher.descendants(), self.memory()
        self.launcher.process.kill()
        self.launcher.process.wait()
        while left := [pid for pid in {*below, *self._services()} if is_running(pid)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for place in places:
            shutil.rmtree(place, ignore_errors=True)

    def _services(self) -> list[int]:
        """All that were started over this run's folder, whoever's children they are now."""
        every = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [pid for pid in every if str(self.folder).encode() in command_line(pid)]


@contextlib.contextmanager
def tortured(until: int) -> Iterator[Torture]:
    """A run of ``until`` steps, whose processes and memory are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="everstep-") as name:
        torture = Torture(Path(name), until)
        try:
            yield torture
        finally:
            torture.end()


def lost_or_repeated(rows: Sequence[dict[str, Any]], samples: int) -> list[int]:
    """Samples that an epoch of the sequence of steps lacks or has twice: ``rows`` of one step hold it in whole."""
    by_step: dict[int, dict[int, list[int]]] = {}
    for row in rows:
        by_step.setdefault(row["step"], {})[row["rank"]] = row["samples"]
    order = [one for step in sorted(by_step) for rank in sorted(by_step[step]) for one in by_step[step][rank]]
    epochs = [order[at : at + samples] for at in range(0, len(order), samples)]
    return [one for epoch in epochs for one in set(epoch) if epoch.count(one) > 1] + [
        one for epoch in epochs[:-1] for one in set(range(samples)) - set(epoch)
    ]

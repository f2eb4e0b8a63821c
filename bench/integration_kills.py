"""Kills of random ranks under each framework: does every run end as the undisturbed one?

    python -m bench.integration_kills [--quick] [--kills 30] [--seed 1] [--json FILE] [FRAMEWORK ...]

Runs ``examples/train_FRAMEWORK.py`` twice with the same arguments: undisturbed, and with ``--kills`` SIGKILLs of random
ranks, each a random number of steps after the recovery from the one before. Both runs print the loss of their last
update and a digest of the final parameters; the table says how many kills the run survived, whether it finished all
steps, and whether loss and parameters are equal to the last bit. The examples sleep ``--pace`` seconds in each step, so
that there is a time to kill at.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.table import Row, finish, parser_of
from everstep.cli.context import local_runs, state_dir
from everstep.client import Client, read_token
from everstep.errors import EverstepError
from everstep.processes import Process as ProcessOnMachine
from everstep.processes import read_environment, read_processes, send_signal
from everstep.vocabulary import JobState
from everstep.wire.v1.operator import JobDetail

KILLS, QUICK_KILLS = 30, 3
STEPS_APART = (3, 12)
"""Fewest and most steps between a recovery and the next kill."""
STEPS_PER_KILL = 80
"""Steps of a run for each kill, unless its steps take longer than others."""
MIN_APART_S = 2.5
"""Seconds between two kills: a node that loses 30 ranks within 60 s is given up."""
PATIENCE_S = 900.0
"""Longest wait for a recovery, and for a run to start or end."""
MARK = "EVERSTEP_BENCH_RUN"
"""Variable in the environment of all processes of a run: the ranks of Ray's actors are no descendants of its driver."""
FINAL_LINE = re.compile(r"final step=(\d+) loss=(\S+) parameters=([0-9a-f]{16})")


@dataclass(frozen=True)
class Example:
    """A framework's example script.

    Attributes:
        ranks: Ranks that train.
        pace_s: Seconds that each step sleeps.
        preload: Module that the launcher imports before it forks ranks.
        arguments: Further arguments of the script.
        starts_ranks: The script starts the ranks itself, without everstep-launch.
        script: ``FRAMEWORK`` of the script's name, where several examples share one.
        steps_per_kill: Steps of a run for each kill.
    """

    ranks: int = 2
    pace_s: float = 0.03
    preload: str = "torch"
    arguments: tuple[str, ...] = ()
    starts_ranks: bool = False
    script: str = ""
    steps_per_kill: int = STEPS_PER_KILL


EXAMPLES = {
    "lightning": Example(preload="lightning.pytorch"),
    "fabric": Example(preload="lightning.fabric"),
    "transformers": Example(preload="transformers.trainer"),
    "accelerate": Example(preload="accelerate"),
    "deepspeed": Example(preload="deepspeed"),
    "deepspeed_zero0": Example(preload="deepspeed", script="deepspeed", arguments=("--stage", "0")),
    "deepspeed_zero3": Example(preload="deepspeed", script="deepspeed", arguments=("--stage", "3")),
    "torchtitan": Example(preload="everstep_trainer.integrations.torchtitan", steps_per_kill=25),
    "megatron": Example(preload="megatron.core"),
    "jax": Example(),
    "ray": Example(starts_ranks=True, arguments=("--workers", "1", "--ranks", "2")),
    "dcp": Example(steps_per_kill=240),
}


@dataclass(frozen=True)
class Result:
    """What a run left: its final line, and the kills that it survived."""

    step: int
    loss: str
    parameters: str
    kills: int


class Process:
    """A run of an example in a folder of its own; a context manager that ends all its processes."""

    def __init__(self, name: str, steps: int, folder: Path) -> None:
        example = EXAMPLES[name]
        self.name = name
        self._mark = uuid.uuid4().hex
        self._environment = {
            **os.environ,
            MARK: self._mark,
            "XDG_STATE_HOME": str(folder),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "EVERSTEP_LAUNCH_MAX_RESTARTS": "1000",
            "EVERSTEP_LAUNCH_STANDBY_DELAY_S": "0.1",
            "EVERSTEP_LAUNCH_HANG_THRESHOLD_S": "60",
        }
        script = [f"examples/train_{example.script or name}.py", "--steps", str(steps), "--pace", str(example.pace_s)]
        script += example.arguments
        launch = ["-m", "everstep_trainer.launch", "--nproc-per-node", str(example.ranks)]
        launch += ["--preload", example.preload]
        self._command = [sys.executable, *([] if example.starts_ranks else launch), *script]
        self._log = folder / f"{name}.log"

    def __enter__(self) -> Process:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        for process in self._marked():
            send_signal(process, signal.SIGKILL)
        self._process.wait()

    @property
    def ended(self) -> bool:
        """Whether the first process of the run has ended."""
        return self._process.poll() is not None

    def job(self) -> JobDetail | None:
        """Return the job as the run's own controller knows it; None while it has none."""
        for run in local_runs(state_dir(self._environment)):
            try:
                with Client(run.url, read_token(run.token_file)) as client:
                    return client.job(run.job)
            except EverstepError:
                continue
        return None

    def ranks(self) -> list[int]:
        """Return the pids of the processes that are ranks now."""
        return [process.pid for process in self._marked() if process.name.startswith("everstep-rank")]

    def result(self, kills: int) -> Result:
        """Wait for the end and return what the run printed. Raises RuntimeError if it failed."""
        try:
            status = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self.name} did not end within {PATIENCE_S:g} s\n{self._tail()}") from None
        found = FINAL_LINE.findall(self._log.read_text(errors="replace"))
        if status != 0 or not found:
            raise RuntimeError(f"{self.name} ended with status {status} after {kills} kills\n{self._tail()}")
        step, loss, parameters = found[-1]
        return Result(int(step), loss, parameters, kills)

    def _marked(self) -> Iterator[ProcessOnMachine]:
        for pid, process in read_processes().items():
            if read_environment(pid).get(MARK) == self._mark:
                yield process

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])


def kill_ranks(run: Process, kills: int, chance: random.Random) -> int:
    """Kill random ranks, one after another, and return after how many kills the run regrouped and stepped on."""
    survived, generation, first_step, changed = -1, 0, 0, time.monotonic()
    apart, is_killed, killed_at, killed_step = chance.randint(*STEPS_APART), False, 0.0, 0
    while not run.ended and time.monotonic() - changed < PATIENCE_S:
        time.sleep(0.05)
        job = run.job()
        if job is None or job.summary.state is not JobState.RUNNING:
            continue
        if job.summary.generation > generation:
            # A new generation may show no step until its first one, so the kill's step counts as well.
            survived, generation = survived + 1, job.summary.generation
            first_step = max(killed_step, job.summary.step)
            changed = time.monotonic()
            is_killed = False
        is_due = job.summary.step >= first_step + apart and time.monotonic() >= killed_at + MIN_APART_S
        if is_killed or not is_due:
            continue
        if survived >= kills:
            break
        victims = run.ranks()
        if victims:
            os.kill(chance.choice(victims), signal.SIGKILL)
            is_killed, killed_at, killed_step = True, time.monotonic(), job.summary.step
            apart = chance.randint(*STEPS_APART)
            print(f"{run.name}: kill {survived + 1} of {kills} after step {job.summary.step}", flush=True)
    return max(survived, 0)


def measure(name: str, kills: int, seed: int) -> list[Row]:
    """Run one example undisturbed and with kills, and return its rows of the table."""
    steps = kills * EXAMPLES[name].steps_per_kill
    with tempfile.TemporaryDirectory(prefix="ev-") as folder, Process(name, steps, Path(folder)) as run:
        undisturbed = run.result(0)
    with tempfile.TemporaryDirectory(prefix="ev-") as folder, Process(name, steps, Path(folder)) as run:
        disturbed = run.result(kill_ranks(run, kills, random.Random(seed)))
    same = (undisturbed.loss, undisturbed.parameters) == (disturbed.loss, disturbed.parameters)
    print(f"{name}: undisturbed {undisturbed}, with kills {disturbed}", flush=True)
    return [
        Row(f"{name}: kills survived", disturbed.kills, "kills", kills, kills, smaller_is_better=False),
        Row(f"{name}: last step", disturbed.step, "steps", steps, steps, smaller_is_better=False),
        Row(f"{name}: loss and parameters equal to the last bit", int(same), "", 1, 1, smaller_is_better=False),
    ]


def main() -> int:
    """Run the bench and return its exit status."""
    parser = parser_of("integration_kills", __doc__)
    parser.add_argument("--kills", type=int, help=f"kills in each run (default {KILLS}, quick {QUICK_KILLS})")
    parser.add_argument("--seed", type=int, default=1, help="of the ranks and times of the kills")
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help=f"of {', '.join(EXAMPLES)}")
    options = parser.parse_args()
    unknown = set(options.frameworks) - set(EXAMPLES)
    if unknown:
        parser.error(f"unknown frameworks: {', '.join(sorted(unknown))}; known: {', '.join(EXAMPLES)}")
    kills = options.kills or (QUICK_KILLS if options.quick else KILLS)
    rows = [row for name in options.frameworks or EXAMPLES for row in measure(name, kills, options.seed)]
    return finish("kills under each framework", rows, options.json)


if __name__ == "__main__":
    sys.exit(main())

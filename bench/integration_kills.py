"""Kills of random ranks under many styles of training scripts: does every run end as the undisturbed one?

    python -m bench.integration_kills [--quick] [--kills 6] [--seed 1] [--only PATTERN ...] [--logs FOLDER]
                                      [--json FILE]

Runs each script twice: undisturbed, and with ``--kills`` SIGKILLs of random ranks. A kill comes a random number of
steps after the recovery from the one before, at a random moment of the step. Both runs print a digest of the final
state of all ranks, and the table says whether these are equal to the last bit. A script that is refused with a sentence
is named as such.

By default the styles of `bench.kills` are run, with models, optimizers, schedules, averages and logs in the digest.
``--only 'example/*'`` runs ``examples/train_FRAMEWORK.py``, whose digest is of the parameters alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.kills import rank as rank_script
from bench.kills.style import FOLDER_VARIABLE, HOLD, LAST_STEPS, STYLES
from bench.table import WIDTH_IN_A_FILE, Row, parser_of, write_json
from everstep.cli.context import local_runs, state_dir
from everstep.client import Client, read_token
from everstep.errors import EverstepError
from everstep.processes import Process as ProcessOnMachine
from everstep.processes import read_environment, read_processes, send_signal
from everstep.vocabulary import JobState

ROOT = Path(__file__).parents[1]
KILLS, QUICK_KILLS = 6, 2
QUICK = ("replicate", "fsdp2")
STEPS_APART = (3, 9)
"""Fewest and most steps between a recovery and the next kill."""
STYLE_STEPS_PER_KILL, STEPS_PER_KILL = 12, 80
"""Steps of a run for each kill. The job of an example shows its step with a delay."""
MANY_KILLS, MIN_APART_S = 30, 2.5
"""A node that loses 30 ranks within 60 s is given up."""
PATIENCE_S = 900.0
"""Longest wait for a recovery, and for a run to start or end."""
POLL_S = 0.01
MARK = "EVERSTEP_BENCH_RUN"
"""Variable in the environment of all processes of a run: the ranks of Ray's actors are no descendants of its driver."""
RANK_NAME = re.compile(r"everstep-rank(\d+)")
FINAL_LINE = re.compile(r"final step=(\d+)(?: loss=(\S+))? parameters=([0-9a-f]{16})")
REFUSAL = re.compile(r"everstep\.errors\.\w+: (.+)")


@dataclass(frozen=True)
class Script:
    """A training script.

    Attributes:
        ranks: Ranks that train.
        pace_s: Seconds that each step sleeps in the run with kills.
        preload: Module that the launcher imports before it forks ranks.
        arguments: What Python runs, with its arguments.
        starts_ranks: The script starts the ranks itself, without everstep-launch.
        steps_per_kill: Steps of a run for each kill.
    """

    arguments: tuple[str, ...]
    ranks: int = 2
    pace_s: float = 0.03
    preload: str = "torch"
    starts_ranks: bool = False
    steps_per_kill: int = STEPS_PER_KILL


def _example(framework: str, *arguments: str, **options: object) -> Script:
    script = Script((str(ROOT / f"examples/train_{framework}.py"), *arguments))
    return replace(script, **options)


EXAMPLES = {
    "lightning": _example("lightning", preload="lightning.pytorch"),
    "fabric": _example("fabric", preload="lightning.fabric"),
    "transformers": _example("transformers", preload="transformers.trainer"),
    "accelerate": _example("accelerate", preload="accelerate"),
    "deepspeed": _example("deepspeed", preload="deepspeed"),
    "deepspeed_zero0": _example("deepspeed", "--stage", "0", preload="deepspeed"),
    "deepspeed_zero3": _example("deepspeed", "--stage", "3", preload="deepspeed"),
    "torchtitan": _example("torchtitan", preload="everstep_trainer.integrations.torchtitan", steps_per_kill=25),
    "megatron": _example("megatron", preload="megatron.core"),
    "jax": _example("jax"),
    "ray": _example("ray", "--workers", "1", "--ranks", "2", starts_ranks=True),
    "dcp": _example("dcp", steps_per_kill=240),
}
STYLE_SCRIPTS = {
    name: Script(("-m", rank_script.__name__, name), one.ranks, 0.05, one.preload, steps_per_kill=STYLE_STEPS_PER_KILL)
    for name, one in STYLES.items()
}
SCRIPTS = {**STYLE_SCRIPTS, **{f"example/{name}": one for name, one in EXAMPLES.items()}}


@dataclass(frozen=True)
class Final:
    """The final line of a run."""

    step: int
    loss: str
    parameters: str


class RunFailed(RuntimeError):
    """A run did not end well. ``sentence`` is its last error of Everstep's own; empty if it has none."""

    def __init__(self, message: str, sentence: str = "") -> None:
        super().__init__(message)
        self.sentence = sentence


class Process:
    """A run of a script in a folder of its own; a context manager that ends all its processes.

    Args:
        name: Of the script.
        steps: Updates in all.
        folder: Empty folder of the run.
        is_paced: Whether steps sleep.
    """

    def __init__(self, name: str, steps: int, folder: Path, *, is_paced: bool) -> None:
        script = SCRIPTS[name]
        self.name, self.steps = name, steps
        self._mark = uuid.uuid4().hex
        self._folder = folder
        self._notes = folder / "notes" if name in STYLES else None
        (folder / "notes").mkdir()
        if is_paced:
            (folder / "notes" / HOLD).touch()
        self._environment = {
            **os.environ,
            MARK: self._mark,
            FOLDER_VARIABLE: str(folder / "notes"),
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(folder),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "EVERSTEP_LAUNCH_MAX_RESTARTS": "1000",
            "EVERSTEP_LAUNCH_STANDBY_DELAY_S": "0.1",
            "EVERSTEP_LAUNCH_HANG_THRESHOLD_S": "60",
        }
        launch = ["-m", "everstep_trainer.launch", "--nproc-per-node", str(script.ranks), "--preload", script.preload]
        pace_s = script.pace_s if is_paced else 0.0
        self._command = [sys.executable, *([] if script.starts_ranks else launch), *script.arguments]
        self._command += ["--steps", str(steps), "--pace", str(pace_s)]
        self._log = folder / "run.log"

    def __enter__(self) -> Process:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,
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
    def has_ended(self) -> bool:
        """Whether the first process of the run has ended."""
        return self._process.poll() is not None

    @property
    def log(self) -> str:
        """What the run printed."""
        return self._log.read_text(errors="replace")

    def position(self) -> tuple[int, int]:
        """Return the newest generation, and the newest step in it that a rank has begun; zeros while there is none."""
        if self._notes is not None:
            return max(((generation, step) for _, generation, step in self._begun_steps()), default=(0, 0))
        for local in local_runs(state_dir(self._environment)):
            try:
                with Client(local.url, read_token(local.token_file)) as client:
                    job = client.job(local.job)
            except EverstepError:
                continue
            if job is not None and job.summary.state is JobState.RUNNING:
                return job.summary.generation, job.summary.step
        return 0, 0

    def release(self) -> None:
        """Let the run go on to its end."""
        (self._folder / "notes" / HOLD).unlink(missing_ok=True)

    def ranks(self) -> dict[int, int]:
        """Return the pids of the processes that are ranks now, by rank."""
        if self._notes is not None:
            newest: dict[int, tuple[int, int]] = {}
            for path, generation, _ in self._begun_steps():
                rank, pid = map(int, path.stem.split("-")[1:])
                newest[rank] = max(newest.get(rank, (0, 0)), (generation, pid))
            return {rank: pid for rank, (_, pid) in newest.items()}
        named = {
            process.pid: (match, process) for process in self._marked() if (match := RANK_NAME.match(process.name))
        }
        # A loader's worker has its rank's name.
        return {int(match[1]): pid for pid, (match, process) in named.items() if process.parent not in named}

    def steps_again(self) -> int | None:
        """Return how many finished steps were computed again; None for a script that does not write its steps down."""
        if self._notes is None:
            return None
        begun: dict[int, list[int]] = defaultdict(list)
        for _, generation, step in self._begun_steps():
            begun[generation].append(step)
        order = sorted(begun)
        return sum(max(0, max(begun[a]) - min(begun[b])) for a, b in itertools.pairwise(order))

    def final(self) -> Final:
        """Wait for the end and return the final line. Raises RunFailed if there is none."""
        try:
            status = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{self.name} did not end within {PATIENCE_S:g} s") from None
        found = FINAL_LINE.findall(self.log)
        if status != 0 or not found:
            sentences = REFUSAL.findall(self.log)
            tail = "\n".join(self.log.splitlines()[-30:])
            raise RunFailed(f"{self.name} ended with status {status}\n{tail}", sentences[-1] if sentences else "")
        step, loss, parameters = found[-1]
        return Final(int(step), loss, parameters)

    def _begun_steps(self) -> Iterator[tuple[Path, int, int]]:
        """Yield path, generation and step, from all ranks' notes."""
        assert self._notes is not None
        for path in self._notes.glob("steps-*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a rank was killed while it wrote
                    generation, step = json.loads(line)
                    yield path, generation, step

    def _marked(self) -> Iterator[ProcessOnMachine]:
        for pid, process in read_processes().items():
            if read_environment(pid).get(MARK) == self._mark:
                yield process


@dataclass(frozen=True)
class Outcome:
    """What kills did to a script.

    Attributes:
        name: Of the script.
        exact: "yes", "no", "refused" or "failed".
        kills: Kills that the run survived.
        again: Finished steps that were computed again; None if unknown.
        seconds: Both runs.
        text: What is wrong, or the refusal.
    """

    name: str
    exact: str
    kills: int = 0
    again: int | None = None
    seconds: float = 0.0
    text: str = ""


def kill_ranks(run: Process, kills: int, chance: random.Random) -> int:
    """Kill random ranks, one after another, and return after how many kills the run regrouped and stepped on.

    Args:
        run: The run.
        kills: How many.
        chance: Chooses ranks and moments.
    """
    ranks, pace_s = SCRIPTS[run.name].ranks, SCRIPTS[run.name].pace_s
    apart_s = MIN_APART_S if kills >= MANY_KILLS else 0.0
    survived, generation, first_step, changed = -1, 0, 0, time.monotonic()
    apart, is_killed, killed_at, killed_step = chance.randint(*STEPS_APART), False, 0.0, 0
    while not run.has_ended and time.monotonic() - changed < PATIENCE_S:
        time.sleep(POLL_S)
        now, step = run.position()
        if now > generation:
            # A new generation may show no step until its first one, so the kill's step counts as well.
            survived, generation, first_step = survived + 1, now, max(killed_step, step)
            changed, is_killed = time.monotonic(), False
        due_step = min(first_step + apart, run.steps - LAST_STEPS + 1)  # the ranks wait there
        is_due = now and step >= due_step and time.monotonic() >= killed_at + apart_s
        if survived >= kills:
            break
        if is_killed or not is_due:
            continue
        time.sleep(chance.uniform(0.0, 1.5 * pace_s))
        victim = chance.randrange(ranks)
        pid = run.ranks().get(victim)
        if pid is None:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        is_killed, killed_at, killed_step = True, time.monotonic(), step
        apart = chance.randint(*STEPS_APART)
        print(f"{run.name}: kill {survived + 1} of {kills}: rank {victim} in step {step}", flush=True)
    run.release()
    return max(survived, 0)


def measure(name: str, kills: int, seed: int, logs: Path) -> Outcome:
    """Run one script undisturbed and with kills.

    Args:
        name: Of the script.
        kills: How many.
        seed: Of the ranks and moments of the kills.
        logs: Folder that gets the output of both runs.
    """
    began = time.monotonic()
    steps = kills * SCRIPTS[name].steps_per_kill + LAST_STEPS
    survived, again = 0, None
    runs: list[Process] = []
    with contextlib.ExitStack() as folders:
        try:
            for is_paced in (False, True):
                folder = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="ev-")))
                with Process(name, steps, folder, is_paced=is_paced) as run:
                    runs.append(run)
                    if not is_paced:
                        undisturbed = run.final()
                        continue
                    survived = kill_ranks(run, kills, random.Random(f"{seed}:{name}"))
                    disturbed, again = run.final(), run.steps_again()
        except RunFailed as failure:
            is_refused = len(runs) == 1 and failure.sentence
            outcome = Outcome(name, "refused" if is_refused else "failed", survived, text=failure.sentence)
            print(failure, flush=True)
        else:
            outcome = _compare(name, kills, survived, undisturbed, disturbed)
        for run, kind in zip(runs, ("undisturbed", "killed"), strict=False):
            (logs / f"{name.replace('/', '-')}-{kind}.log").write_text(run.log)
    return replace(outcome, again=again, seconds=time.monotonic() - began)


def _compare(name: str, kills: int, survived: int, undisturbed: Final, disturbed: Final) -> Outcome:
    if undisturbed != disturbed:
        return Outcome(name, "no", survived, text=f"undisturbed {undisturbed}, with kills {disturbed}")
    text = "" if survived >= kills else "the run was over before the last kill"
    return Outcome(name, "yes", survived, text=text)


def show(outcomes: list[Outcome]) -> None:
    """Print the table."""
    table = Table(title="kills of random ranks under each style")
    for column in ("style", "kills", "exact", "steps again", "seconds", "remarks"):
        table.add_column(column, justify="left" if column in {"style", "exact", "remarks"} else "right")
    colour = {"yes": "green", "refused": "yellow"}
    for one in outcomes:
        exact = f"[{colour.get(one.exact, 'red')}]{one.exact}[/]"
        again = "-" if one.again is None else str(one.again)
        table.add_row(one.name, str(one.kills), exact, again, f"{one.seconds:.0f}", one.text)
    Console(width=None if sys.stdout.isatty() else WIDTH_IN_A_FILE).print(table)
    equal, refused = (sum(one.exact == kind for one in outcomes) for kind in ("yes", "refused"))
    print(f"{equal} of {len(outcomes)} are equal to the last bit, {refused} were refused with a sentence")


def rows_of(outcome: Outcome, kills: int) -> list[Row]:
    """Return the rows of a script for machines."""
    good = int(outcome.exact in ("yes", "refused"))
    return [
        Row(f"{outcome.name}: kills survived", outcome.kills, "kills", kills, kills, smaller_is_better=False),
        Row(f"{outcome.name}: exact or refused", good, "", 1, 1, outcome.text, smaller_is_better=False),
        Row(f"{outcome.name}: finished steps computed again", outcome.again, "steps"),
    ]


def choose(patterns: list[str]) -> list[str]:
    """Return the names of the scripts that match a pattern; without any, those of all styles."""
    if not patterns:
        return list(STYLE_SCRIPTS)
    return [name for name in SCRIPTS if any(fnmatchcase(name, pattern) for pattern in patterns)]


def main() -> int:
    """Run the bench and return its exit status: 1 if a run ended with other bits, or failed."""
    parser = parser_of("integration_kills", __doc__)
    parser.add_argument("--kills", type=int, help=f"kills in each run (default {KILLS}, quick {QUICK_KILLS})")
    parser.add_argument("--seed", type=int, default=1, help="of the ranks and moments of the kills")
    parser.add_argument("--only", nargs="*", default=[], metavar="PATTERN", help="styles, or example/FRAMEWORK")
    parser.add_argument("--logs", type=Path, default=Path("out/kills"), help="folder of the runs' output")
    options = parser.parse_args()
    names = choose(options.only or (list(QUICK) if options.quick else []))
    if not names:
        parser.error(f"no script matches; there are {', '.join(SCRIPTS)}")
    kills = options.kills or (QUICK_KILLS if options.quick else KILLS)
    options.logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the runs end with the bench
    print(f"seed {options.seed}", flush=True)
    outcomes = []
    for name in names:
        outcomes.append(measure(name, kills, options.seed, options.logs))
        print(f"{name}: {outcomes[-1]}", flush=True)
    show(outcomes)
    if options.json is not None:
        write_json(options.json, [row for one in outcomes for row in rows_of(one, kills)])
    return int(any(one.exact not in ("yes", "refused") for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())

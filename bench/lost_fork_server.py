"""``python -m bench.lost_fork_server``: from the kill of agent, rank and fork server to the next step of all ranks.

Two ranks on one node train under a launcher with a private controller and agent. The three processes are killed at once
with SIGKILL; with the fork server all ranks and standbys of the node end. A recovery ends when both ranks have finished
another step. ``--repeats`` of them are made in one run, at the load that the machine has.

``--while-starting N`` kills the fork server's first process in N jobs of 20 steps each, at a random moment of its
imports or of the ranks' start, and counts the jobs that end well.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from examples.demo.world import descendants, wait_for

MAX_START_S = 4.0
"""Latest moment of a kill, after the process appeared: the ranks then have joined the job, or are about to."""
JOB_S = 180.0
CALM_S = 4.0
"""Between two recoveries: the standby and its imports are there again."""
SCRIPT = """
import os, pathlib, time, torch
import everstep

STEPS = pathlib.Path(__file__).parent / "steps"

def train(run):
    torch.manual_seed(0)
    model = run.replicate(torch.nn.Linear(64, 64).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=int(os.environ.get("STEPS", "1000000"))):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).pow(2).sum().backward()
        optimizer.step()
        with STEPS.open("a") as file:
            file.write(f"{run.rank} {os.getpid()}\\n")
        time.sleep(0.02)

everstep.main(train)
"""


def rows(log: Path, start: int = 0) -> list[tuple[int, int]]:
    """(rank, pid) of every finished step, from byte ``start`` of the log on."""
    if not log.exists():
        return []
    lines = log.read_bytes()[start:].splitlines(keepends=True)
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines if line.endswith(b"\n")]


def named(pids: list[int], name: str) -> int:
    """The process that calls itself ``name``, or runs the module of that name."""
    for pid in pids:
        try:
            called = Path(f"/proc/{pid}/comm").read_text().strip()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if called == name or name.encode() in command:
            return pid
    raise RuntimeError(f"no process {name}")


def recovery_s(launcher: int, log: Path) -> float:
    """Seconds from the kills until both ranks have finished a step in new processes."""
    before = descendants(launcher)
    start = log.stat().st_size
    victims = (named(before, "everstep_agent.main"), rows(log)[-1][1], named(before, "everstep-forks"))
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    began = time.perf_counter()
    wait_for(lambda: {rank for rank, pid in rows(log, start) if pid not in before} == {0, 1}, "both ranks step again")
    return time.perf_counter() - began


def _start(folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "everstep_trainer.launch", "--nproc-per-node", "2", "--max-restarts", "1000"]
    command += ["--state-dir", str(folder / "state"), str(folder / "train.py")]
    with (folder / "launcher.err").open("wb") as output:
        return subprocess.Popen(
            command, env=os.environ | environment, stdout=output, stderr=output, start_new_session=True
        )


def ends_well(delay_s: float) -> bool:
    """Return whether a job ends well whose fork server is killed ``delay_s`` after it appeared."""
    with tempfile.TemporaryDirectory(prefix="ev-") as name:
        folder = Path(name)
        launcher = _start(folder, STEPS="20")
        try:
            wait_for(lambda: _fork_server(launcher.pid) is not None, "the fork server")
            time.sleep(delay_s)
            victim = _fork_server(launcher.pid)
            if victim is None:
                raise RuntimeError("the fork server ended by itself")
            os.kill(victim, signal.SIGKILL)
            status = launcher.wait(JOB_S)
        finally:
            launcher.kill()
            launcher.wait()
        if status:
            print((folder / "launcher.err").read_text()[-2000:], flush=True)
        return status == 0


def _fork_server(launcher: int) -> int | None:
    try:
        return named(descendants(launcher), "everstep_trainer.launch.forking.forkserver")
    except RuntimeError:
        return None


def kill_while_starting(jobs: int) -> int:
    """Return how many of ``jobs`` end well."""
    random_moments = random.Random(0)
    good = 0
    for number in range(1, jobs + 1):
        delay_s = random_moments.uniform(0.0, MAX_START_S)
        good += ends_well(delay_s)
        print(f"{good} of {number} jobs ended well; killed {delay_s:.2f} s after it appeared", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lost_fork_server", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--while-starting", type=int, metavar="N", help="kill the fork server at the start of N jobs")
    options = parser.parse_args()
    if options.while_starting:
        good = kill_while_starting(options.while_starting)
        raise SystemExit(0 if good == options.while_starting else 1)
    with tempfile.TemporaryDirectory(prefix="ev-") as name:
        folder = Path(name)
        launcher, log = _start(folder), folder / "steps"
        try:
            wait_for(lambda: len(rows(log)) > 100, "the training steps")
            took = []
            for _ in range(options.repeats):
                time.sleep(CALM_S)
                took.append(recovery_s(launcher.pid, log))
                print(f"{took[-1]:.2f} s at load {os.getloadavg()[0]:.1f}", flush=True)
            print(f"median {statistics.median(took):.2f} s, from {min(took):.2f} to {max(took):.2f} s")
        finally:
            launcher.terminate()
            launcher.wait()


if __name__ == "__main__":
    main()

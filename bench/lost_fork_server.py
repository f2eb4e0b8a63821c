"""``python -m bench.lost_fork_server``: from the kill of agent, rank and fork server to the next step of all ranks.

Two ranks on one node train under a launcher with a private controller and agent. The three processes are killed at once
with SIGKILL; with the fork server all ranks and standbys of the node end. A recovery ends when both ranks have finished
another step. ``--repeats`` of them are made in one run, at the load that the machine has.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from examples.demo.world import descendants, wait_for

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
    for step in run.steps(until=1_000_000):
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lost_fork_server", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ev-") as name:
        folder = Path(name)
        script, log = folder / "train.py", folder / "steps"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "everstep_trainer.launch", "--nproc-per-node", "2", "--max-restarts", "1000"]
        command += ["--state-dir", str(folder / "state"), str(script)]
        with (folder / "launcher.err").open("wb") as output:
            launcher = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
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

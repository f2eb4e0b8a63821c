"""A rank that works while the others wait is left alone, and one that hangs is found, under the real programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.processes.launcher import LauncherProcess, launched

pytestmark = pytest.mark.slow

TRAIN = """
import os, re, signal, threading, time, torch
import torch.distributed as dist
import everstep

LOCK = threading.Lock()
N = 4_000_003

def train(run):
    torch.manual_seed(0)
    model = run.replicate(torch.nn.Linear(8, 8).to(run.device))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=20):
        is_odd = step == 10 and run.rank == 1
        {before}
        model(torch.ones(2, 8)).pow(2).sum().backward()
        {inside}
        optimizer.step()
        optimizer.zero_grad()
    print(f"done {{run.rank}} in generation {{run.generation}}", flush=True)

everstep.main(train)
"""
ONCE = "if is_odd and run.generation == 1: "


def run_script(folder: Path, *flags: str, before: str = "pass", inside: str = "pass") -> LauncherProcess:
    (folder / "train.py").write_text(TRAIN.format(before=before, inside=inside))
    argv = ["--nproc-per-node", "2", "--standby-delay-s", "0.1", "--state-dir", str(folder / "state"), *flags]
    with launched(folder, *argv, "train.py") as launcher:
        launcher.wait()
        return launcher


def recoveries(launcher: LauncherProcess) -> int:
    found = re.search(r"(\d+) recover(?:y|ies),", launcher.err)
    assert found, launcher.err
    return int(found[1])


@pytest.mark.promise("working-rank-kept")
@pytest.mark.parametrize(
    "work",
    [
        pytest.param(
            "[sorted(NUMBERS) for NUMBERS in [[(7 * i) % 4_000_003 for i in range(4_000_003)]] * 3]", id="gil"
        ),
        pytest.param("time.sleep(5)", id="sleep"),
    ],
)
def test_rank_that_works_alone_is_not_replaced(short_path: Path, work: str) -> None:
    launcher = run_script(short_path, inside=f"if is_odd: {work}")
    assert launcher.process.returncode == 0, launcher.err
    assert recoveries(launcher) == 0, launcher.err


def test_program_that_a_rank_starts_runs_alone(short_path: Path) -> None:
    """Rank 1 starts the same script as an evaluation would be started, and the others wait for it."""
    child = "import subprocess, sys; subprocess.run([sys.executable, __file__], check=True)"
    launcher = run_script(short_path, inside=f"if is_odd: {child}")
    assert launcher.process.returncode == 0, launcher.err
    assert recoveries(launcher) == 0, launcher.err
    assert re.search(r"rank 1 of job \S+ started this program: it runs alone, as under plain python", launcher.err)
    assert sorted(re.findall(r"done \d in generation \d", launcher.out)) == [
        "done 0 in generation 0",
        "done 0 in generation 1",
        "done 1 in generation 1",
    ]


@pytest.mark.promise("working-rank-kept")
def test_declared_section_outlasts_the_threshold(short_path: Path) -> None:
    inside = 'with run.alone("validation"): time.sleep(5 if is_odd else 0)'
    launcher = run_script(short_path, "--hang-threshold-s", "2", inside=inside)
    assert launcher.process.returncode == 0, launcher.err
    assert recoveries(launcher) == 0, launcher.err


@pytest.mark.promise("stuck-rank-named")
@pytest.mark.parametrize(
    ("hang", "text"),
    [
        ("LOCK.acquire(), LOCK.acquire()", r"rank 1 stands still at train.py:\d+ for \d+ s; rank 0 waits"),
        ("exec('while True: pass')", "rank 1 runs a loop in which nothing changes"),
        ("__import__('ctypes').PyDLL(None).pause()", r"rank 1 stands still for \d+ s; rank 0 waits"),
        (
            "os.kill(os.getpid(), signal.SIGSTOP)",
            r"rank 1 on \S+ has sent no heartbeat for .* \(its process is",
        ),
    ],
    ids=["lock", "loop", "python lock", "stopped"],
)
def test_rank_that_hangs_is_replaced(short_path: Path, hang: str, text: str) -> None:
    launcher = run_script(short_path, "--hang-threshold-s", "3", inside=ONCE + hang)
    assert launcher.process.returncode == 0, launcher.err
    assert recoveries(launcher) == 1, launcher.err
    assert re.search(text, launcher.err), launcher.err


@pytest.mark.promise("uneven-steps")
def test_return_inside_a_step_ends_the_job_by_name(short_path: Path) -> None:
    launcher = run_script(short_path, before="if is_odd: break")
    assert launcher.process.returncode == 1
    assert "rank 1 returned from the training function, and rank 0 waits for it in" in launcher.err


@pytest.mark.promise("uneven-steps")
def test_return_in_a_job_with_subgroups_ends_it_by_name(short_path: Path) -> None:
    before = "if step == 1: everstep.group = dist.new_group()\n        if is_odd: break"
    launcher = run_script(short_path, "--hang-threshold-s", "3", before=before)
    assert launcher.process.returncode == 1
    assert "rank 1 returned from the training function, and rank 0 waits in" in launcher.err

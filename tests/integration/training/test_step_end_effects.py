"""What a script does at the end of a step, or after its last one, is made again if a rank dies in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.launcher import launched

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, time, torch
import everstep

def train(run):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    replicas = run.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=replicas, optimizer=optimizer)
    for step in run.steps(until=24, seed=1):
        loss = replicas(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if step % 8 == 0 and run.rank == 0:
            if step == 16 and run.generation == 1 and "in-step" in sys.argv:
                time.sleep(1.0)  # the other rank has finished the step, and stored its version
                os.kill(os.getpid(), 9)
            with open("saved", "a") as saved:
                print(step, model.weight.double().sum().item(), file=saved)
    if run.rank == 1 and run.generation == 1 and "after-loop" in sys.argv:
        time.sleep(1.0)  # the last version is committed
        os.kill(os.getpid(), 9)
    mean = run.mean(loss)
    if run.rank == 0:
        with open("mean", "a") as saved:
            print(step, mean.item(), file=saved)

everstep.main(train)
"""


def saves(folder: Path, *arguments: str) -> str:
    """Run the script in a folder of its own and return what it saved."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    argv = ["--nproc-per-node", "2", "--state-dir", str(folder / "state"), "train.py", *arguments]
    with launched(folder, *argv, GLOO_SOCKET_IFNAME="lo") as launcher:
        assert launcher.wait() == 0, launcher.err
    assert ("ended with SIGKILL" in launcher.err) is bool(arguments)
    return (folder / "saved").read_text() + (folder / "mean").read_text()


def test_work_of_a_killed_rank_is_made_again(short_path: Path) -> None:
    calm = saves(short_path / "calm")
    assert saves(short_path / "killed", "in-step") == calm
    repeated = saves(short_path / "after", "after-loop")  # the last step and its save once more
    assert set(repeated.splitlines()) == set(calm.splitlines())

"""A job whose memory is gone goes on from what was written to storage, and from memory once there is some."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest
import torch
from everstep_agent.spill.__main__ import execute
from everstep_trainer.state.tracked_state import TrackedState

from everstep.ids import Version
from tests.support.launched import launched
from tests.support.spilling import fill_slots

pytestmark = pytest.mark.slow

TRAIN = """
import os, pathlib, time, torch
import everstep

STEPS = pathlib.Path(__file__).parent / "steps"

def train(run):
    model = run.replicate(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=120):
        with STEPS.open("a") as file:
            print(os.environ["RANK"], step, os.getpid(), f"{model.module.bias.sum().item():.6f}", file=file)
        optimizer.zero_grad()
        model(torch.ones(2, 8)).pow(2).sum().backward()
        optimizer.step()
        time.sleep(0.02)

everstep.main(train)
"""


def test_a_job_starts_from_storage_and_goes_on_from_memory(short_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    torch.nn.init.constant_(model.bias, 0.25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = TrackedState({"model": model, "optimizer": optimizer})
    order = fill_slots(short_path / "slots", state, Version(5, 40), world=3)
    execute(msgspec.structs.replace(order, url=str(short_path / "stored")))
    script, steps = short_path / "train.py", short_path / "steps"
    script.write_text(TRAIN)

    def lines() -> list[list[str]]:
        return [line.split() for line in steps.read_text().splitlines()] if steps.exists() else []

    argv = ["--nproc-per-node", "2", "--hang-threshold-s", "60", "--state-dir", str(short_path / "state")]
    argv += ["--start-from", str(short_path / "stored")]
    with launched(short_path, *argv, str(script)) as launcher:
        pid = launcher.eventually(
            lambda: next((int(p) for rank, step, p, _ in lines() if (rank, int(step) >= 80) == ("1", True)), None),
            "rank 1 at step 80",
        )
        os.kill(pid, signal.SIGKILL)
        assert launcher.wait() == 0, launcher.err
    for rank in ("0", "1"):
        mine = [(int(step), bias) for r, step, _, bias in lines() if r == rank]
        assert mine[0] == (41, f"{model.bias.sum().item():.6f}"), "the step and the state are those of the checkpoint"
        assert mine[-1][0] == 120
        assert sum(step == 41 for step, _ in mine) == 1, "after the loss, memory is newer than storage"

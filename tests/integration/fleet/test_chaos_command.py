"""``everstep chaos`` against a real private run: a killed rank and a flipped bit, found and recovered from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.launcher import ROOT, launched

pytestmark = pytest.mark.slow

TRAIN = """
import time, torch
import everstep

def train(run):
    torch.manual_seed(0)
    model = run.replicate(torch.nn.Linear(16, 16).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=100_000):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        run.report(loss=loss)
        time.sleep(0.05)

everstep.main(train)
"""


def chaos(directory: Path, *arguments: str) -> tuple[int, Any, str]:
    """Run the command as a user would, beside the launcher; return its exit status, report and errors."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")}
    environment["XDG_STATE_HOME"] = str(directory / "state")
    command = [sys.executable, "-m", "everstep.cli.main", "chaos", *arguments, "--job", "shaken", "--json"]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    return ended.returncode, json.loads(ended.stdout) if ended.stdout else None, ended.stderr


def test_killed_rank_and_flipped_bit_are_recovered_from(short_path: Path) -> None:
    (short_path / "train.py").write_text(TRAIN)
    flags = ["--nproc-per-node", "3", "--standby-delay-s", "0.1", "--digest-interval", "5", "--hang-threshold-s", "120"]
    with launched(short_path, *flags, "--job", "shaken", "train.py") as launcher:
        launcher.eventually(lambda: "generation 1, 3 ranks" in launcher.err, "the job runs")
        status, killed, errors = chaos(short_path, "kill", "--rank", "1")
        assert status == 0, f"{errors}\n{killed}\n{launcher.err}"
        (report,) = killed["faults"]
        assert report["detection"]["kind"] == "rank.lost"
        (regroup,) = report["regroups"]
        assert (regroup["reason"], regroup["world_size"], regroup["steps_skipped"]) == ("rank_lost", 3, 0)
        assert regroup["phases_s"]["restore"] > 0
        assert report["after"]["step"] >= regroup["restored"][1]
        status, refused, errors = chaos(short_path, "node")
        assert (status, refused) == (1, None)
        assert "the only node of job shaken" in errors
        status, flipped, errors = chaos(short_path, "flip", "--rank", "2")
        assert status == 0, f"{errors}\n{flipped}\n{launcher.err}"
        (report,) = flipped["faults"]
        assert report["detection"]["kind"] == "finding"
        assert [regroup["reason"] for regroup in report["regroups"]] == ["corruption"]
        assert report["after"]["loss"] is not None
        assert "the digest of rank 2 on local differs from the majority" in report["verdicts"][0]

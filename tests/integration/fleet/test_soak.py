"""A soak: random faults while a job trains, and everything that must hold afterwards (see ``soak/__init__.py``)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo.world import descendants

ROOT = Path(__file__).parents[3]
FAULTS_S, SEED = 60, 11

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # test_exactness.py is the smaller one


@pytest.mark.promise("soak")
@pytest.mark.timeout(900)
def test_soak_job_survives_random_faults_exactly(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.integration.fleet.soak",
        "--seconds",
        str(FAULTS_S),
        "--seed",
        str(SEED),
        "--pace",
        "0.1",
    ]
    soak = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = soak.communicate(timeout=880)
    finally:
        for pid in reversed(descendants(soak.pid)):
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        soak.wait()
    story = (tmp_path / "story.txt").read_text()
    assert soak.returncode == 0, f"{output}\n{story}"
    assert len(story.splitlines()) >= 3

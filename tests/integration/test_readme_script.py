"""The script that README.md prints, run as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launched import ROOT, launched

pytestmark = pytest.mark.slow


@pytest.fixture
def script(short_path: Path) -> Path:
    """``train.py``, extracted from the page."""
    (printed,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    path = short_path / "train.py"
    path.write_text(printed)
    return path


def last_loss(output: str) -> float:
    """What the script says at its end: the step of ``run.steps`` and the loss."""
    (said,) = re.findall(r"step 200: loss ([0-9.]+)", output)
    return float(said)


def test_readme_script_trains_on_two_ranks(script: Path) -> None:
    argv = ["--nproc-per-node", "2", "--state-dir", str(script.parent / "state"), "train.py"]
    with launched(script.parent, *argv, GLOO_SOCKET_IFNAME="lo") as launcher:
        assert launcher.wait() == 0, launcher.err
    assert last_loss(launcher.out) < 5.0, "it began at about 16"
    assert "nothing is tracked" not in launcher.err


def test_readme_script_runs_under_plain_python(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert last_loss(done.stdout) < 5.0

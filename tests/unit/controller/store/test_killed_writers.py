from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.promise("sqlite-durable")
@pytest.mark.parametrize("kills", [40, pytest.param(400, marks=pytest.mark.nightly)])
def test_repeatedly_killed_writer_loses_and_repeats_no_batch(tmp_path: Path, kills: int) -> None:
    """tests/unit/controller/store/killed_writer.py checks the file after each kill."""
    command = [
        sys.executable,
        "-m",
        "tests.unit.controller.store.killed_writer",
        str(tmp_path / "c.db"),
        str(kills),
        "7",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > kills

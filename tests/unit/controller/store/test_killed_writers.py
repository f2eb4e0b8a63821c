from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.promise("sqlite-durable")
@pytest.mark.parametrize("kills", [40, pytest.param(400, marks=pytest.mark.nightly)])
def test_repeatedly_killed_writer_loses_and_repeats_no_batch(tmp_path: Path, kills: int) -> None:
    """What is checked after each kill is in tests/support/killed_writer.py."""
    command = [sys.executable, "-m", "tests.support.killed_writer", str(tmp_path / "c.db"), str(kills), "7"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > kills

"""A real controller's journal, killed in the middle, replays to the decisions that were made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.controllers import ControllerProcess
from tests.support.eventful import EventfulFleet
from tests.support.forked import ForkPool


def _replayed(journal: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "everstep_controller.main", "replay", str(journal), "--differences"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_journal_of_killed_controller_replays_identically(program_forks: ForkPool, tmp_path: Path) -> None:
    settings, journal = tmp_path / "settings.toml", tmp_path / "journal"
    settings.write_text(f'journal_dir = "{journal}"\n')
    process = ControllerProcess(tmp_path, program_forks, arguments=("--settings", str(settings)))
    try:
        process.start()
        EventfulFleet(process.ask, process)
        process.kill()
        process.start()
        process.terminate()
    finally:
        process.end()
    done = _replayed(journal)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all decisions are the same as recorded" in done.stdout
    assert len(list(journal.glob("*.journal"))) == 2

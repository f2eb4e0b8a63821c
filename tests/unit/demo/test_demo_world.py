"""The demonstration's own housekeeping."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from examples.demo.world import OWNER, PREFIX, World, descendants, sweep, wait_for
from tests.support.processes import is_running


def test_sweep_removes_only_directories_of_dead_worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name, owner in (("dead", gone.pid), ("alive", os.getpid())):
        (tmp_path / f"{PREFIX}{name}").mkdir()
        (tmp_path / f"{PREFIX}{name}" / OWNER).write_text(str(owner))
    sweep()
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}alive"]


@pytest.mark.slow
def test_world_ends_all_descendant_processes(tmp_path: Path) -> None:
    child = "import subprocess, sys, signal; signal.signal(15, signal.SIG_IGN); subprocess.run(['sleep', '600'])"
    with World(tmp_path, []) as world:
        folder = world.folder
        process = world.start("stubborn", ["-c", child])
        wait_for(lambda: len(descendants(process.pid)) == 2, "its child")
        below = descendants(process.pid)
    wait_for(lambda: not any(map(is_running, below)), "the end of both")
    assert not folder.exists()


def test_killed_machine_ends_its_orphaned_processes(tmp_path: Path) -> None:
    orphan = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    with World(tmp_path, ["n1", "n2"]) as world:
        mine, others = world.nodes["n1"], world.nodes["n2"]
        for node in (mine, others):
            world.start(node.name, ["-c", orphan], node.environment).wait()
        wait_for(lambda: len(mine.processes()) == len(others.processes()) == 1, "only the orphans are left")
        mine.kill()
        assert mine.processes() == []
        assert len(others.processes()) == 1
        left = others.processes()
    wait_for(lambda: not any(map(is_running, left)), "the end of what the other machine ran")


def test_world_secrets_are_owner_only(tmp_path: Path) -> None:
    with World(tmp_path, []) as world:
        assert world.secret_file.stat().st_mode & 0o777 == 0o600
        assert world.folder.stat().st_mode & 0o777 == 0o700

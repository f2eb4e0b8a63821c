"""Start and end of the agent's processes, and the files and log lines that its daemons write."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

import pytest

from everstep.errors import ConfigurationError
from everstep.host.private_files import private_directory
from everstep_agent.lifecycle import (
    AgentRunDirectory,
    TextLines,
    delete_segments,
)


def test_two_agents_never_share_a_run_directory(tmp_path: Path) -> None:
    first = AgentRunDirectory(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="another agent runs in"):
        AgentRunDirectory(tmp_path / "run")
    first.release()
    AgentRunDirectory(tmp_path / "run").release()
    assert list((tmp_path / "run").iterdir()) == []


def test_run_directory_lock_is_retried_after_holder_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = AgentRunDirectory(tmp_path)
    flock = fcntl.flock
    tried: list[int] = []

    def flock_after_the_holder_has_left(descriptor: int, operation: int) -> None:
        if not tried:
            first.release()
        tried.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_the_holder_has_left)
    second = AgentRunDirectory(tmp_path)
    assert len(tried) == 2
    with pytest.raises(ConfigurationError, match="another agent runs in"):
        AgentRunDirectory(tmp_path)
    second.release()


def test_run_directory_is_private_to_its_owner(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    AgentRunDirectory(tmp_path / "run").release()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("subfolder", ["everstep-0/run", "everstep-0/everstep/run"])
def test_directory_inside_a_foreign_directory_is_refused(tmp_path: Path, subfolder: str) -> None:
    """The owner of ``/tmp/everstep-1000`` can replace everything in that directory."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "everstep-0").mkdir(mode=0o777)
    os.chown(shared / "everstep-0", 65534, 65534)
    with pytest.raises(ConfigurationError, match="everstep-0 belongs to another user: give another --run-dir"):
        private_directory(shared / subfolder)
    assert list((shared / "everstep-0").iterdir()) == []  # the owner is checked before any file is created


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_directory_behind_a_foreign_symlink_is_refused(tmp_path: Path) -> None:
    shared, precious = tmp_path / "shared", tmp_path / "home"
    shared.mkdir()
    shared.chmod(0o1777)
    precious.mkdir(mode=0o755)
    (shared / "everstep-0").symlink_to(precious)
    os.lchown(shared / "everstep-0", 65534, 65534)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        private_directory(shared / "everstep-0")
    assert precious.stat().st_mode & 0o777 == 0o755


def test_incarnation_grows_even_if_the_clock_went_back(tmp_path: Path) -> None:
    directory = AgentRunDirectory(tmp_path)
    first = directory.next_incarnation(1000.0)
    assert first == 1_000_000
    assert directory.next_incarnation(2000.0) == 2_000_000
    assert directory.next_incarnation(500.0) == 2_000_001
    (tmp_path / "incarnation").write_text("not a number")
    assert directory.next_incarnation(3000.0) == 3_000_000
    directory.release("incarnation", "never-there")
    assert not (tmp_path / "incarnation").exists()


def test_incarnation_grows_after_a_reboot_with_a_late_clock(tmp_path: Path) -> None:
    run_dir, state_dir = tmp_path / "run", tmp_path / "state"
    state_dir.mkdir()
    directory = AgentRunDirectory(run_dir)
    assert directory.next_incarnation(2000.0, state_dir) == 2_000_000
    directory.release("incarnation")  # as a reboot does
    assert AgentRunDirectory(run_dir).next_incarnation(500.0, state_dir) == 2_000_001


def test_incarnation_is_made_though_it_cannot_be_kept(tmp_path: Path) -> None:
    assert AgentRunDirectory(tmp_path).next_incarnation(1.0, tmp_path / "missing") == 1000


def test_segments_of_a_killed_vault_are_unlinked(tmp_path: Path) -> None:
    segments = tmp_path / "everstep-0" / "n1"
    (segments / "job").mkdir(parents=True)
    (segments / "job" / "rank0").write_bytes(b"x")
    (segments / ".lock").write_bytes(b"")
    delete_segments(segments)
    assert list(tmp_path.iterdir()) == []
    delete_segments(segments)


def record(**extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "agent", "levelname": "INFO", "levelno": 20, "msg": "rank %d", "args": (3,)})
    made.__dict__.update(extra)
    return made


def test_log_text_cannot_forge_lines_or_control_terminals() -> None:
    """A node chooses texts such as its agent's version and its trace."""
    forged = record(node="n1", trace="t\n12:00:00 INFO    olga ordered to evict n2")
    forged.msg, forged.args = "agent %s", ("1\x1b[2J\r\n12:00:00 INFO    all is well",)
    first, *others = TextLines().format(forged).split("\n")
    assert len(others) == 2
    assert all(line.startswith("  ") for line in others)
    assert not any(sign in first + "".join(others) for sign in "\x1b\r")

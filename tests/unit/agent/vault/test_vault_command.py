"""`everstep vault` lists the slots in memory, and drops only those of an unused vault."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everstep.cli.main import app
from everstep.ids import Version
from everstep.layout.vault_status import LOCK_FILE, VaultStatusFile, read_status, write_status
from everstep_agent.lifecycle import acquire_lock
from tests.support.processes.waiting import until
from tests.support.vaults.vault_process import JOB, RankMemory, VaultProcess, Vaults, process_gone

command = CliRunner()


@pytest.fixture
def vault(fleet: Vaults) -> VaultProcess:
    """A vault with a slot and a connected rank."""
    vault = fleet.start("n1", "--linger-s", "3600", "--scrub-interval-s", "0")
    RankMemory(vault.client(), rank=0).fill(0, Version(1, 1), b"x")
    return vault


def listed(vault: VaultProcess) -> dict[str, object]:
    result = command.invoke(app, ["vault", "list", "--json", "--dir", str(vault.segment_dir.parent)])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.output)
    assert isinstance(row, dict)
    return row


def drop(vault: VaultProcess, name: str = "n1") -> tuple[int, str]:
    result = command.invoke(app, ["vault", "drop", name, "--dir", str(vault.segment_dir.parent)])
    return result.exit_code, result.output


def wait_until_alone(vault: VaultProcess) -> None:
    for client in vault._clients:
        client.close()
    until(lambda: listed(vault)["idle_since"] is not None, "the vault notices")


def test_vault_in_use_is_listed_and_not_dropped(vault: VaultProcess) -> None:
    until(lambda: listed(vault)["idle_since"] is None, "the vault notices the rank")
    row = listed(vault)
    assert (row["name"], row["jobs"], row["pid"]) == ("n1", [JOB], vault.process.pid)
    status, result = drop(vault)
    assert status == 2
    assert "n1 is in use: stop its job's launcher" in result
    assert vault.process.poll() is None


def test_idle_vault_is_ended_and_its_memory_freed(vault: VaultProcess) -> None:
    wait_until_alone(vault)
    row = listed(vault)
    assert isinstance(row["ends_at"], float)
    assert isinstance(row["idle_since"], float)
    assert row["ends_at"] - row["idle_since"] == pytest.approx(3600)
    shown = command.invoke(app, ["vault", "list", "--dir", str(vault.segment_dir.parent)])
    assert "ends in 59 min" in " ".join(shown.output.split())
    status, result = drop(vault)
    assert (status, "MiB freed" in result) == (0, True), result
    vault.process.wait(60)
    assert process_gone(vault.process.pid)
    assert not vault.segment_dir.exists()
    assert list(vault.run_dir.iterdir()) == []


def test_segments_of_a_killed_vault_are_listed_and_freed(vault: VaultProcess) -> None:
    vault.kill()
    assert (listed(vault)["pid"], listed(vault)["jobs"]) == (0, [JOB])
    assert drop(vault)[0] == 0
    assert not vault.segment_dir.exists()


def test_unknown_vault_name_is_refused_with_a_hint(vault: VaultProcess) -> None:
    status, result = drop(vault, "n2")
    assert status == 2
    assert "there is no vault 'n2' in" in result


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_foreign_vault_note_ends_no_process(tmp_path: Path) -> None:
    """In a directory of another user, the status file may name any process."""
    place = tmp_path / "n1"
    place.mkdir()
    lock = acquire_lock(place / LOCK_FILE, "held by another process")
    with subprocess.Popen(["sleep", "60"]) as ours:
        try:
            write_status(lock, VaultStatusFile(pid=ours.pid, run_dir="/", idle_since=1.0))
            assert read_status(place) is not None
            os.fchown(lock, 65534, 65534)
            assert read_status(place) is None
            result = command.invoke(app, ["vault", "drop", "n1", "--dir", str(tmp_path)])
            assert (result.exit_code, "in use" in result.output) == (2, True)
            assert ours.poll() is None
            for group in (0, -1, -ours.pid):
                write_status(lock, VaultStatusFile(pid=group, run_dir="/", idle_since=1.0))
                assert read_status(place) is None
        finally:
            ours.kill()
    os.close(lock)


def test_unreadable_directory_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> list[Path]:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    result = command.invoke(app, ["vault", "list", "--dir", str(tmp_path)])
    assert isinstance(result.exception, PermissionError)

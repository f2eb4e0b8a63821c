"""``everstep vault``: what lies in memory is listed as it is, and only what nobody uses is dropped."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from everstep_agent.lifecycle import acquire_lock
from typer.testing import CliRunner

from everstep.cli.main import app
from everstep.ids import Version
from everstep.layout.vault_status import LOCK_FILE, VaultStatusFile, read_status, write_status
from tests.support.vaults import JOB, RankMemory, VaultProcess, Vaults, process_gone
from tests.support.waiting import until

command = CliRunner()


@pytest.fixture
def vault(fleet: Vaults) -> VaultProcess:
    """One with a slot, and a rank that is connected to it."""
    vault = fleet.start("n1", "--linger-s", "3600", "--scrub-interval-s", "0")
    RankMemory(vault.client(), rank=0).fill(0, Version(1, 1), b"x")
    return vault


def listed(vault: VaultProcess) -> dict[str, object]:
    said = command.invoke(app, ["vault", "list", "--json", "--dir", str(vault.segment_dir.parent)])
    assert said.exit_code == 0, said.output
    (row,) = json.loads(said.output)
    assert isinstance(row, dict)
    return row


def drop(vault: VaultProcess, name: str = "n1") -> tuple[int, str]:
    said = command.invoke(app, ["vault", "drop", name, "--dir", str(vault.segment_dir.parent)])
    return said.exit_code, said.output


def wait_until_alone(vault: VaultProcess) -> None:
    for client in vault._clients:
        client.close()
    until(lambda: listed(vault)["idle_since"] is not None, "the vault notices")


def test_a_vault_in_use_is_listed_and_not_dropped(vault: VaultProcess) -> None:
    until(lambda: listed(vault)["idle_since"] is None, "the vault notices the rank")
    row = listed(vault)
    assert (row["name"], row["jobs"], row["pid"]) == ("n1", [JOB], vault.process.pid)
    status, said = drop(vault)
    assert status == 2
    assert "n1 is in use: stop its job's launcher" in said
    assert vault.process.poll() is None


def test_idle_vault_is_ended_and_its_memory_freed(vault: VaultProcess) -> None:
    wait_until_alone(vault)
    row = listed(vault)
    assert isinstance(row["ends_at"], float)
    assert isinstance(row["idle_since"], float)
    assert row["ends_at"] - row["idle_since"] == pytest.approx(3600)
    shown = command.invoke(app, ["vault", "list", "--dir", str(vault.segment_dir.parent)])
    assert "ends in 59 min" in " ".join(shown.output.split())
    status, said = drop(vault)
    assert (status, "MiB freed" in said) == (0, True), said
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
    status, said = drop(vault, "n2")
    assert status == 2
    assert "there is no vault 'n2' in" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_foreign_vault_note_ends_no_process(tmp_path: Path) -> None:
    """In a directory that is theirs, or that root looks at, another user may write any number there."""
    place = tmp_path / "n1"
    place.mkdir()
    lock = acquire_lock(place / LOCK_FILE, "nobody else holds it")
    with subprocess.Popen(["sleep", "60"]) as ours:
        try:
            write_status(lock, VaultStatusFile(pid=ours.pid, run_dir="/", idle_since=1.0))
            assert read_status(place) is not None
            os.fchown(lock, 65534, 65534)
            assert read_status(place) is None
            said = command.invoke(app, ["vault", "drop", "n1", "--dir", str(tmp_path)])
            assert (said.exit_code, "in use" in said.output) == (2, True)
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
    said = command.invoke(app, ["vault", "list", "--dir", str(tmp_path)])
    assert isinstance(said.exception, PermissionError)

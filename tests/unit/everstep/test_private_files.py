from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from everstep.private_files import write_private


@pytest.mark.parametrize("durable", [False, True])
def test_file_is_replaced_and_private(tmp_path: Path, durable: bool) -> None:
    file = tmp_path / "token"
    file.write_text("older and longer")
    file.chmod(0o644)
    write_private(file, b"new", durable=durable)
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_durable_file_has_its_name_on_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode)))
    write_private(tmp_path / "token", b"new", durable=True)
    assert synced == [False, True]
    write_private(tmp_path / "token", b"newer")
    assert synced == [False, True]


def test_draft_of_a_killed_process_is_not_reused(tmp_path: Path) -> None:
    draft, other = tmp_path / f".token.{os.getpid()}", tmp_path / "other"
    other.write_text("of somebody else")
    draft.symlink_to(other)
    write_private(tmp_path / "token", b"new")
    assert (tmp_path / "token").read_bytes() == b"new"
    assert other.read_text() == "of somebody else"


def test_failed_write_leaves_the_previous_file(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_private(target, b"new")
    assert list(tmp_path.iterdir()) == [target]

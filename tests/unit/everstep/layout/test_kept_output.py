"""Folders of kept output: private, the newest ones, and never one of a launcher that runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from everstep.layout import kept_output
from everstep.layout.kept_output import (
    ABOUT_FILE,
    AboutOutput,
    FollowedFile,
    kept_outputs,
    last_lines,
    make_output_folder,
)


def test_only_folders_of_ended_launchers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_output, "MAX_FOLDERS", 2)
    first, held = make_output_folder(tmp_path, AboutOutput(job="j0", started_at=0.0))
    for number in range(1, 6):
        _, lock = make_output_folder(tmp_path, AboutOutput(job=f"j{number}", started_at=float(number)))
        os.close(lock)
    assert [each.about.job for each in kept_outputs(tmp_path)] == ["j5", "j4", "j3", "j0"]
    assert first.exists()
    os.close(held)


def test_folders_of_other_hosts_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home may be shared by hosts whose locks do not reach each other."""
    monkeypatch.setattr(kept_output, "MAX_FOLDERS", 0)
    for host in ("a-1", "a-2", "a"):
        monkeypatch.setattr(kept_output.socket, "gethostname", lambda host=host: host)
        _, lock = make_output_folder(tmp_path, AboutOutput(job=host, started_at=0.0))
        os.close(lock)
    assert sorted(each.about.job for each in kept_outputs(tmp_path)) == ["a", "a-1", "a-2"]


def test_folder_is_closed_to_others_and_foreign_ones_are_left_out(tmp_path: Path) -> None:
    folder, lock = make_output_folder(tmp_path, AboutOutput(job="j", started_at=0.0))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / ABOUT_FILE).stat().st_mode) == 0o600
    (found,) = kept_outputs(tmp_path, "j")
    assert found.is_running
    os.close(lock)
    assert not found.is_running
    (folder.parent / "j@link").symlink_to(folder)
    (folder / ABOUT_FILE).write_text("{")
    assert kept_outputs(tmp_path) == []


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"torn\n5.0 whole\n6.0 with\rreturn\n7.0 \xff\n")
    texts = [line.text for line in last_lines([("a", path)], 10)]
    assert texts == ["whole", "with\rreturn", "\ufffd"]
    assert last_lines([("a", path)], 0) == []


def test_followed_file_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    followed = FollowedFile("a", path)
    assert followed.read() == []
    path.write_text("5.0 one\n5.0 tw")
    assert [line.text for line in followed.read()] == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    assert [line.text for line in followed.read()] == ["two"]

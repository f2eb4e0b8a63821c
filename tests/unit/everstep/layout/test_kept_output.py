"""Folders of kept output: private, the newest ones, and never one of a launcher that runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from everstep.layout import kept_output
from everstep.layout.kept_output import (
    ABOUT_FILE,
    LOCK_FILE,
    MAX_LINE_BYTES,
    OLDER,
    AboutOutput,
    FollowedFile,
    KeptOutput,
    kept_outputs,
    last_lines,
    make_output_folder,
    tail,
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


def test_folder_is_private_and_foreign_ones_are_left_out(tmp_path: Path) -> None:
    folder, lock = make_output_folder(tmp_path, AboutOutput(job="j", started_at=0.0))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / ABOUT_FILE).stat().st_mode) == 0o600
    (found,) = kept_outputs(tmp_path, "j")
    assert found.is_running
    os.close(lock)
    (ended,) = kept_outputs(tmp_path, "j")
    assert not ended.is_running
    (folder.parent / "j@link").symlink_to(folder)
    (folder / ABOUT_FILE).write_text("{")
    assert kept_outputs(tmp_path) == []


def test_followed_file_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    followed = FollowedFile("a", path)
    assert followed.read() == []
    path.write_text("5.0 one\n5.0 tw")
    assert [line.text for line in followed.read()] == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    assert [line.text for line in followed.read()] == ["two"]


def texts(path: Path, count: int, max_bytes: int = 1 << 20) -> list[str]:
    return [line.text for line in tail("a", path, count, max_bytes)]


def test_tail_reads_on_in_the_older_file(tmp_path: Path) -> None:
    path, older = tmp_path / "a.log", tmp_path / f"a.log{OLDER}"
    assert texts(path, 3) == []
    older.write_text("".join(f"1.0 {number}\n" for number in range(5)))
    assert texts(path, 3) == ["2", "3", "4"], "the newer file is not there yet"
    path.write_text("2.0 five\n2.0 to")
    assert texts(path, 3) == ["3", "4", "five"], "a line that is being written has no end"
    assert texts(path, 9) == ["0", "1", "2", "3", "4", "five"]
    path.unlink()
    path.hardlink_to(older)
    assert texts(path, 9) == ["0", "1", "2", "3", "4"], "it became the older file while it was read"


def test_tail_reads_no_more_than_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "a.log", list[int]()
    path.write_text("".join(f"1.0 {number:0{MAX_LINE_BYTES}}\n" for number in range(40)))
    pread = os.pread

    def recording_pread(file: int, size: int, at: int) -> bytes:
        read.append(size)
        return pread(file, size, at)

    monkeypatch.setattr(os, "pread", recording_pread)
    assert [int(text[-9:]) for text in texts(path, 3)] == [37, 38, 39], "longest lines too"
    assert [int(text[-9:]) for text in texts(path, 30, 20_000)] == [38, 39]
    assert texts(path, 30, 5000) == []
    assert max(read) < 3 * (MAX_LINE_BYTES + 40)


def test_links_and_pipes_of_a_rank_count_as_missing(tmp_path: Path) -> None:
    """A pipe would stop its reader, and a link leads to another file."""
    secret = tmp_path / "secret"
    secret.write_text("1.0 secret\n")
    link, pipe = tmp_path / "link.log", tmp_path / "pipe.log"
    link.symlink_to(secret)
    os.mkfifo(pipe)
    for path in (link, pipe):
        assert texts(path, 3) == []
        assert last_lines([("a", path)], 3) == []
        assert FollowedFile("a", path, from_start=True).read() == []
    folder, lock = make_output_folder(tmp_path, AboutOutput(job="j", started_at=0.0))
    os.close(lock)
    for name in (LOCK_FILE, ABOUT_FILE):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    assert not KeptOutput(folder, AboutOutput(job="j", started_at=0.0)).is_running
    assert kept_outputs(tmp_path) == []

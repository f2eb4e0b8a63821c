from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.errors import Unavailable
from everstep.host.private_files import make_private_directories, private_directory, write_private


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_new_directories_are_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    make_private_directories(tmp_path / "a" / "b" / "c")
    for name in ("a", "a/b", "a/b/c"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700


def test_unusable_directory_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="file/n1: Not a directory; give another --segment-dir"):
        private_directory(tmp_path / "file" / "n1", "--segment-dir")


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


def test_failed_write_leaves_the_previous_file(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_private(target, b"new")
    assert list(tmp_path.iterdir()) == [target]

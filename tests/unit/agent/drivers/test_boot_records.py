from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep_agent.drivers.boot_records import panic_record

PART_1 = "Panic#1 Part1\n<4>[ 90.2] RIP: 0010:memcpy\n<0>[ 90.3][   C12] Kernel panic - not syncing: Fatal\n"
PART_2 = "Panic#1 Part2\n<4>[ 90.1] BUG: unable to handle page fault\n"
OOPS = "Oops#1 Part1\n<4>[ 80.1] BUG: kernel NULL pointer dereference\n"
LINES = ("BUG: unable to handle page fault", "RIP: 0010:memcpy", "Kernel panic - not syncing: Fatal")


def write(path: Path, text: str, at: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at, at))


def read(tmp_path: Path, since: float = 0.0) -> tuple[float, tuple[str, ...]]:
    return panic_record(tmp_path / "sys", tmp_path / "archive", since)


@pytest.mark.parametrize("place", ["sys/fs/pstore", "archive", "archive/1790/001"])
def test_parts_of_a_panic_are_joined(tmp_path: Path, place: str) -> None:
    write(tmp_path / place / "dmesg-efi-1001", PART_1, 1000.0)
    write(tmp_path / place / "dmesg-efi-2001", PART_2, 1001.0)
    write(tmp_path / place / "dmesg-efi-0001", OOPS, 500.0)
    write(tmp_path / place / "console-ramoops-0", "Kernel panic - not syncing: old", 2000.0)
    assert read(tmp_path) == (1001.0, LINES)


def test_archive_without_headers_is_read(tmp_path: Path) -> None:
    write(tmp_path / "archive/1790/dmesg.txt", "\n".join(f"<4>[ 90.1] {line}" for line in LINES), 1000.0)
    assert read(tmp_path) == (1000.0, LINES)


def test_old_records_and_oopses_are_no_panic(tmp_path: Path) -> None:
    write(tmp_path / "sys/fs/pstore/dmesg-efi-1001", PART_1, 1000.0)
    write(tmp_path / "sys/fs/pstore/dmesg-efi-0001", OOPS, 5000.0)
    assert read(tmp_path, since=2000.0) == (0.0, ())


def test_machine_without_records_has_no_panic(tmp_path: Path) -> None:
    assert read(tmp_path) == (0.0, ())

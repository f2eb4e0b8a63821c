"""Read what the boot before this one left: records of a panic in pstore, and the end of its kernel log in the journal.

Firmware keeps the records over a reset (the kernel's Documentation/ABI/testing/pstore). systemd-pstore(8) moves them to
an archive while the machine boots.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from everstep_agent.drivers.commands import run_bounded
from everstep_agent.drivers.sysfs import entries

ARCHIVE = Path("/var/lib/systemd/pstore")
JOURNAL = ("journalctl", "-k", "-b", "-1", "-n", "500", "-r", "-o", "cat", "--no-pager", "-q")
JOURNAL_TIMEOUT_S = 10.0
MAX_JOURNAL_BYTES = 256 << 10
MAX_FILES = 256
MAX_FILE_BYTES = 64 << 10
MAX_LINES = 500
"""Lines of one boot, the newest ones."""
ONE_PANIC_S = 60.0
"""Firmware holds little per record, so that one panic makes several within seconds."""

_PART = re.compile(r"(?P<reason>[A-Z]\w+)#\d+ Part(?P<part>\d+)")
"""First line of a record (Linux, fs/pstore/platform.c). The first part holds the newest lines."""
_PREFIX = re.compile(r"^(?:<\d+>)?\[\s*\d+\.\d+\] ?(?:\[\s*[CT]\d+\] ?)?")
_PANIC = "Kernel panic - not syncing"


class _Record(NamedTuple):
    """One file."""

    at: float
    part: int
    is_panic: bool
    lines: list[str]


def panic_record(sysfs: Path, archive: Path, since: float) -> tuple[float, tuple[str, ...]]:
    """Return the time of the newest panic and its lines, oldest first; (0.0, ()) if none is newer than ``since``."""
    records = [record for path in _files(sysfs, archive) if (record := _read(path, since)) is not None]
    panicked_at = max((record.at for record in records if record.is_panic), default=0.0)
    of_panic = [record for record in records if record.is_panic and panicked_at - record.at < ONE_PANIC_S]
    of_panic.sort(key=lambda record: -record.part)
    lines = dict.fromkeys(line for record in of_panic for line in record.lines)
    return panicked_at, tuple(lines)[-MAX_LINES:]


def journal_lines() -> tuple[str, ...]:
    """Return the last kernel lines of the boot before, oldest first; none if there is no journal to read."""
    text = run_bounded(JOURNAL, JOURNAL_TIMEOUT_S, MAX_JOURNAL_BYTES) or ""
    return tuple(reversed(text.splitlines()))


def _files(sysfs: Path, archive: Path) -> Iterator[Path]:
    folders = [sysfs / "fs/pstore", archive]
    folders += [folder for folder in entries(archive) if folder.is_dir()]
    folders += [folder for place in folders[2:] for folder in entries(place) if folder.is_dir()]
    files = (file for folder in folders for file in entries(folder) if file.name.startswith("dmesg"))
    for _, file in zip(range(MAX_FILES), files, strict=False):
        yield file


def _read(path: Path, since: float) -> _Record | None:
    try:
        at = path.stat().st_mtime
        if at < since or not path.is_file():
            return None
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    first, _, rest = text.partition("\n")
    header = _PART.match(first)
    lines = [_PREFIX.sub("", line) for line in (rest if header else text).splitlines()]
    is_panic = _PANIC in text if header is None else header["reason"] == "Panic"
    return _Record(at, int(header["part"]) if header else 0, is_panic, [line for line in lines if line])

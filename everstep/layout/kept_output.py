"""Define where launchers keep their log and the newest output of their ranks on this machine, and read it.

Each launcher has a folder ``output/JOB@HOST-...`` in its state directory. It is closed to other users, and locked while
the launcher runs. Hosts may share the directory, whose locks may hold on one host only. A line in a file is the time in
seconds, a space, and the text.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import socket
import stat
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from everstep.errors import DECODE_ERRORS
from everstep.private_files import make_private_directories, write_private

FOLDER = "output"
"""Name of the folder in the launcher's state directory."""
ABOUT_FILE = "about.json"
LOCK_FILE = "lock"
LAUNCHER_FILE = "launcher.log"
OLDER = ".1"
"""Suffix of the file that was full before the present one."""
MAX_FOLDERS = 20
"""Folders of ended launchers of one host that are kept: the newest."""
MAX_ABOUT_BYTES = 1 << 20
_LINE = re.compile(rb"(\d+\.\d+) (.*)")


class AboutOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A launcher, whose ranks wrote the output.

    Attributes:
        job: Name of the job.
        node: Name of the node; empty before the launcher has joined the job.
        started_at: Start of the launcher, in wall seconds.
        ranks: Global ranks by local rank, as of the newest generation.
    """

    job: str
    node: str = ""
    started_at: float
    ranks: dict[int, int] = {}


class KeptLine(msgspec.Struct, frozen=True, order=True):
    """One line of a process.

    Attributes:
        at: Wall seconds.
        label: The process, such as ``rank 3``.
        text: The line, without its end.
    """

    at: float
    label: str
    text: str


class KeptOutput(msgspec.Struct, frozen=True):
    """The folder of one launcher."""

    path: Path
    about: AboutOutput

    @property
    def is_running(self) -> bool:
        """True while the launcher runs."""
        with contextlib.suppress(OSError), (self.path / LOCK_FILE).open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def files(self) -> dict[int, Path]:
        """Return the files of ranks, by global rank; before the first generation, or without one, by local rank.

        A rank that has printed nothing has no file yet.
        """
        found = (re.fullmatch(r"local-rank-(\d+)\.log", file.name) for file in self.path.iterdir())
        local_ranks = {int(match[1]) for match in found if match is not None} | self.about.ranks.keys()
        return {self.about.ranks.get(each, each): self.path / rank_file(each) for each in sorted(local_ranks)}


def rank_file(local_rank: int) -> str:
    """Return the name of a local rank's file."""
    return f"local-rank-{local_rank}.log"


# ---- write


def make_output_folder(state_dir: Path, about: AboutOutput) -> tuple[Path, int]:
    """Make the folder of a launcher, and remove the oldest ones of ended launchers of this host.

    Returns:
        The folder, and the descriptor of its lock, which ends with the launcher.

    Raises:
        OSError: It cannot be made.
    """
    parent = state_dir / FOLDER
    make_private_directories(parent)
    host = re.sub(r"[^A-Za-z0-9.]", "", socket.gethostname())
    _prune(parent, host)
    folder = Path(tempfile.mkdtemp(prefix=f"{about.job}@{host}-", dir=parent))  # 0700
    lock = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    write_about(folder, about)
    return folder, lock


def write_about(folder: Path, about: AboutOutput) -> None:
    """Replace what a folder says about its launcher. Raises OSError."""
    write_private(folder / ABOUT_FILE, msgspec.json.encode(about))


def _prune(parent: Path, host: str) -> None:
    own = filter(None, map(_read, parent.glob(f"*@{host}-*")))
    ended = [each for each in own if not each.is_running]
    ended.sort(key=lambda each: each.about.started_at, reverse=True)
    for each in ended[MAX_FOLDERS:]:
        shutil.rmtree(each.path, ignore_errors=True)


# ---- read


def kept_outputs(state_dir: Path, job: str = "") -> list[KeptOutput]:
    """Return the folders of a job's launchers, or of all jobs', the newest first. Those of other users are left out."""
    found = (_read(path) for path in (state_dir / FOLDER).glob(f"{glob.escape(job) or '*'}@*"))
    fitting = [each for each in found if each is not None and job in ("", each.about.job)]
    return sorted(fitting, key=lambda each: each.about.started_at, reverse=True)


def _read(path: Path) -> KeptOutput | None:
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return None
        with (path / ABOUT_FILE).open("rb") as file:
            return KeptOutput(path, msgspec.json.decode(file.read(MAX_ABOUT_BYTES), type=AboutOutput))
    except (OSError, *DECODE_ERRORS):
        return None


def last_lines(files: Iterable[tuple[str, Path]], count: int) -> list[KeptLine]:
    """Return the newest lines of several files in the order of time.

    Args:
        files: Label and path of each.
        count: Number of lines.
    """
    newest: list[KeptLine] = []
    for label, path in files:
        newest += deque(_lines_of(label, path), count)
    newest.sort(key=lambda line: line.at)  # stable: lines of one file stay in their order
    return newest[len(newest) - count :] if count < len(newest) else newest


def _lines_of(label: str, path: Path) -> Iterator[KeptLine]:
    for part in (path.with_name(path.name + OLDER), path):
        with contextlib.suppress(FileNotFoundError), part.open("rb") as file:
            yield from decode_lines(label, file)


def decode_lines(label: str, lines: Iterable[bytes]) -> Iterator[KeptLine]:
    """Yield the lines of a file; a damaged one is left out."""
    for line in lines:
        if match := _LINE.match(line):
            yield KeptLine(float(match[1]), label, match[2].decode(errors="replace"))


class FollowedFile:
    """Reads what is appended to a file, across its replacement by a new one."""

    def __init__(self, label: str, path: Path, *, from_start: bool = False) -> None:
        self._label, self._path = label, path
        self._inode, self._position = 0, 0
        if not from_start:
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                self._inode, self._position = status.st_ino, status.st_size

    def read(self) -> list[KeptLine]:
        """Return the whole lines that are new."""
        found: list[KeptLine] = []
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                found += self._rest_of_older()
                self._inode, self._position = inode, 0
            found += self._read_from(file.fileno())
        return found

    def _rest_of_older(self) -> list[KeptLine]:
        older = self._path.with_name(self._path.name + OLDER)
        with contextlib.suppress(FileNotFoundError), older.open("rb") as file:
            if os.fstat(file.fileno()).st_ino == self._inode:
                return self._read_from(file.fileno())
        return []

    def _read_from(self, descriptor: int) -> list[KeptLine]:
        data = os.pread(descriptor, max(0, os.fstat(descriptor).st_size - self._position), self._position)
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return list(decode_lines(self._label, whole.split(b"\n")))

"""Define where launchers keep their log and the newest output of their ranks on this machine, and read it.

Each launcher has a folder ``output/JOB@HOST-...`` in its state directory. It is closed to other users, and locked while
the launcher runs. Hosts may share the directory, whose locks may hold on one host only. A line in a file is the time in
seconds, a space, and the text.
"""

from __future__ import annotations

import contextlib
import errno
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
from typing import BinaryIO

import msgspec

from everstep.errors import DECODE_ERRORS
from everstep.host.private_files import make_private_directories, write_private

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
MAX_LINE_BYTES = 8 << 10
"""Longest line that is kept; the rest of a longer one is left out."""
_PREFIX_BYTES = 32
"""More than the bytes of a line's time, the space behind it, and its end."""
_LINE = re.compile(rb"(\d+\.\d+) (.*)")


class AboutOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A launcher, whose ranks wrote the output.

    Attributes:
        job: Name of the job.
        node: Name of the node; empty before the launcher has joined the job.
        started_at: Start of the launcher, in wall seconds.
        ranks: Global ranks by local rank, as of the newest generation.
        keeps_ranks: The output of ranks is kept, and not only the launcher's log.
    """

    job: str
    node: str = ""
    started_at: float
    ranks: dict[int, int] = {}
    keeps_ranks: bool = True


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
        with contextlib.suppress(OSError), open_kept(self.path / LOCK_FILE) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    @property
    def is_of_this_host(self) -> bool:
        """True if a launcher of this host made the folder."""
        return self.path.name.startswith(f"{self.about.job}@{_host()}-")

    def files(self) -> dict[int, Path]:
        """Return the files of ranks, by global rank; before the first generation, or without one, by local rank.

        A rank that has printed nothing has no file yet. If no output of ranks is kept, there are none.
        """
        if not self.about.keeps_ranks:
            return {}
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
    host = _host()
    _prune(parent, host)
    folder = Path(tempfile.mkdtemp(prefix=f"{about.job}@{host}-", dir=parent))  # 0700
    lock = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    write_about(folder, about)
    return folder, lock


def write_about(folder: Path, about: AboutOutput) -> None:
    """Replace what a folder says about its launcher. Raises OSError."""
    write_private(folder / ABOUT_FILE, msgspec.json.encode(about))


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "", socket.gethostname())


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
        with open_kept(path / ABOUT_FILE) as file:
            return KeptOutput(path, msgspec.json.decode(file.read(MAX_ABOUT_BYTES), type=AboutOutput))
    except (OSError, *DECODE_ERRORS):
        return None


def open_kept(path: Path) -> BinaryIO:
    """Open a file of a folder. A rank could put a link or a pipe in its place, which counts as missing.

    Raises:
        FileNotFoundError: There is no such regular file.
        OSError: It cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileNotFoundError(errno.ENOENT, "it is a link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def tail(label: str, path: Path, count: int, max_bytes: int) -> list[KeptLine]:
    """Return the newest lines of one file, without reading what lies before them.

    Args:
        label: The process that wrote it.
        path: The file.
        count: Most lines.
        max_bytes: Most bytes that are read. Lines that do not fit are left out, from the oldest on.

    Raises:
        OSError: The file cannot be read.
    """
    room = min(max_bytes, count * (MAX_LINE_BYTES + _PREFIX_BYTES))
    data, inode = b"", 0
    for part in (path, path.with_name(path.name + OLDER)):
        with contextlib.suppress(FileNotFoundError), open_kept(part) as file:
            status = os.fstat(file.fileno())
            if status.st_ino == inode:  # it became the older file just now
                break
            inode, start = status.st_ino, max(0, status.st_size - (room - len(data)))
            found = os.pread(file.fileno(), status.st_size - start, start)
            if start > 0:
                found = found.partition(b"\n")[2]
            data = found[: found.rfind(b"\n") + 1] + data
            if start > 0:
                break
        if len(data) >= room or data.count(b"\n") >= count:
            break
    return list(deque(decode_lines(label, data.split(b"\n")), count))


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
        with contextlib.suppress(FileNotFoundError), open_kept(part) as file:
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
        with contextlib.suppress(FileNotFoundError), open_kept(self._path) as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                found += self._rest_of_older()
                self._inode, self._position = inode, 0
            found += self._read_from(file.fileno())
        return found

    def _rest_of_older(self) -> list[KeptLine]:
        older = self._path.with_name(self._path.name + OLDER)
        with contextlib.suppress(FileNotFoundError), open_kept(older) as file:
            if os.fstat(file.fileno()).st_ino == self._inode:
                return self._read_from(file.fileno())
        return []

    def _read_from(self, descriptor: int) -> list[KeptLine]:
        data = os.pread(descriptor, max(0, os.fstat(descriptor).st_size - self._position), self._position)
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return list(decode_lines(self._label, whole.split(b"\n")))

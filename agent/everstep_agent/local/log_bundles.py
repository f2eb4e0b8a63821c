"""Keep what a remedy would destroy: the kernel log, the sensors' values and the findings, in a bounded archive.

A reset, a reboot or a repair clears the kernel log, NVML's counters and the state of the driver. The agent writes a
bundle when a finding that asks for such an action appears, and when a person asks. It reads and compresses in a thread,
and nothing waits for it: an eviction least of all. Bundles hold no settings, tokens or environment.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import shutil
import signal
import subprocess
import tarfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from everstep.clock import Clock
from everstep.errors import EverstepError, Unavailable
from everstep.host.private_files import private_directory
from everstep.vocabulary import Finding
from everstep_agent.drivers.kmsg import KERNEL_LOG_DEVICE, MAX_RECORD_BYTES
from everstep_agent.local.health import asks_for_remedy

log = logging.getLogger(__name__)

MAX_BUNDLES = 8
MAX_FOLDER_BYTES = 256 << 20
"""Bytes of all bundles together; the oldest are deleted."""

MIN_FREE_BYTES = 1 << 30
"""Free bytes of the file system below which no bundle is written: a full disk would be a fault of its own."""

MAX_LOG_BYTES = 4 << 20
"""Bytes of the kernel log in a bundle, the newest."""

MAX_RECORDS = 1 << 20
"""Records of /dev/kmsg that are read at most, so that a machine that logs without end ends the reading."""

MAX_PART_BYTES = 64 << 20
"""Bytes of any part of a bundle, such as the driver's own report."""

MIN_INTERVAL_S = 600.0
"""Seconds between two bundles that findings cause. A finding that appears earlier gets its bundle at the end."""

BUG_REPORT_TIMEOUT_S = 300.0
"""Seconds that nvidia-bug-report.sh may take. It usually takes one minute, and hangs on a hung GPU."""

KILL_WAIT_S = 2.0

REQUEST_TIMEOUT_S = 330.0
"""Seconds that a person's request waits for its bundle."""

BUG_REPORT = "nvidia-bug-report.log.gz"
_NAME = re.compile(r"everstep-logs-.*\.tar\.gz")


class BundleContents(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent knows at one moment, as the files of a bundle, and the files to read for it."""

    node: str
    reason: str
    parts: Mapping[str, bytes]
    kernel_log: str = ""
    state_file: str = ""
    has_bug_report: bool = False


class LogBundles:
    """Write bundles, one at a time, and keep the newest."""

    def __init__(self, folder: Path, clock: Clock, collect: Callable[[str], BundleContents]) -> None:
        """Write to ``folder``. ``collect`` returns the contents for a reason; it is called in the event loop."""
        self.made_count = 0
        self._folder, self._clock, self._collect = folder, clock, collect
        self._known: set[str] = set()
        self._pending: list[str] = []
        self._next_at = 0.0
        self._lock = asyncio.Lock()
        self.newest = max(_bundles(folder), default=None)

    def note_findings(self, findings: Iterable[Finding]) -> None:
        """Remember new findings that ask for a remedy, for the next bundle."""
        urgent = {finding.key for finding in findings if asks_for_remedy(finding)}
        self._pending += sorted(urgent - self._known)
        self._known = urgent

    @property
    def is_due(self) -> bool:
        """Whether a finding asked for a bundle, and the last one that a finding caused is old enough."""
        return bool(self._pending) and self._clock.monotonic() >= self._next_at and not self._lock.locked()

    async def make_due(self) -> None:
        """Write the bundle that findings asked for. Logs a failure."""
        reasons, self._pending = self._pending, []
        self._next_at = self._clock.monotonic() + MIN_INTERVAL_S
        with suppress(Unavailable):  # is in the log
            await self.make(", ".join(reasons))

    async def make(self, reason: str) -> Path:
        """Write a bundle and return its path. Raises Unavailable if it cannot be written in time."""
        async with self._lock:
            contents = self._collect(reason)
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    path = await _in_thread(lambda: write_bundle(self._folder, self._clock.wall(), contents))
            except (OSError, TimeoutError, EverstepError) as error:
                log.error("no bundle of logs could be kept in %s for %s: %s", self._folder, reason, error)
                raise Unavailable(f"no bundle of logs could be written to {self._folder}: {error}") from error
        self.made_count += 1
        self.newest = path
        log.warning("kept the node's logs in %s, because of %s", path, reason, extra={"node": contents.node})
        return path


def write_bundle(folder: Path, at: float, contents: BundleContents) -> Path:
    """Write a bundle of the moment ``at`` (wall seconds), and delete the oldest ones beyond the limits.

    Raises:
        OSError: The folder cannot be written.
        Unavailable: Its file system is almost full.
        ConfigurationError: The folder belongs to another user.
    """
    private_directory(folder, "--bundle-dir")
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise Unavailable(f"only {free >> 20} MiB are free there")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))
    path = folder / f"everstep-logs-{contents.node}-{stamp}.tar.gz"
    notes: dict[str, str] = {}
    parts = {**contents.parts, **_read_files(contents, notes)}
    if contents.has_bug_report:
        # First without the report, which may take longer than the node has.
        notes[BUG_REPORT] = "it was not finished"
        _write_archive(path, {**parts, "README.txt": _describe(contents, stamp, notes)}, at)
        del notes[BUG_REPORT]
        report = folder / f".bug-report-{os.getpid()}.log.gz"
        parts |= _read_parts({BUG_REPORT: lambda: _run_bug_report(report)}, notes)
    _write_archive(path, {**parts, "README.txt": _describe(contents, stamp, notes)}, at)
    _prune(folder)
    return path


def _write_archive(path: Path, parts: Mapping[str, bytes], at: float) -> None:
    """Write the archive durably, since a reboot may follow at once. A reader sees the whole one or none."""
    draft = path.with_name(f".draft-{os.getpid()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive:
                for name, content in parts.items():
                    entry = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{name}")
                    entry.size, entry.mode, entry.mtime = len(content), 0o600, int(at)
                    archive.addfile(entry, io.BytesIO(content))
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


def _read_files(contents: BundleContents, notes: dict[str, str]) -> dict[str, bytes]:
    """Return the parts that are read from files; ``notes`` receives why one is missing."""
    readers: dict[str, Callable[[], bytes]] = {}
    if contents.kernel_log:
        readers["kernel.log"] = lambda: read_log_tail(contents.kernel_log)
    if contents.state_file:
        readers["sensors.state.json"] = lambda: _read_tail(contents.state_file)
    return _read_parts(readers, notes)


def _read_parts(readers: Mapping[str, Callable[[], bytes]], notes: dict[str, str]) -> dict[str, bytes]:
    parts = {}
    for name, read in readers.items():
        try:
            parts[name] = read()
        except (OSError, Unavailable) as error:
            notes[name] = str(error)
    return parts


def read_log_tail(path: str) -> bytes:
    """Return the newest part of a kernel log, without blocking. Raises OSError, or Unavailable for a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if status.st_rdev == KERNEL_LOG_DEVICE:
            return b"".join(_read_records(descriptor))
        if not os.path.isfile(path):
            raise Unavailable(f"{path} is no file; recent-kernel-lines.txt has what the agent read from it")
        file.seek(max(0, status.st_size - MAX_LOG_BYTES))
        return file.read(MAX_LOG_BYTES)


def _read_records(descriptor: int) -> Iterable[bytes]:
    """Return the newest records of /dev/kmsg, as it gives them: ``priority,sequence,microseconds,flags;text``."""
    records: deque[bytes] = deque(maxlen=MAX_LOG_BYTES // 128)
    for _ in range(MAX_RECORDS):
        try:
            records.append(os.read(descriptor, MAX_RECORD_BYTES))
        except BrokenPipeError:
            continue  # overwritten before it was read
        except BlockingIOError:
            break
    return records


def _read_tail(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(MAX_LOG_BYTES)


def _run_bug_report(target: Path) -> bytes:
    """Return the driver's own report. Raises OSError if the program cannot be run, Unavailable if it gives none."""
    command = ["nvidia-bug-report.sh", "--safe-mode", "--output-file", str(target).removesuffix(".gz")]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    try:
        process.wait(BUG_REPORT_TIMEOUT_S)
        report = target.read_bytes() if target.stat().st_size <= MAX_PART_BYTES else b""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process that sits in the driver ends later
            process.wait(KILL_WAIT_S)
        raise Unavailable(f"nvidia-bug-report.sh took longer than {BUG_REPORT_TIMEOUT_S:g} s") from None
    finally:
        for left in (target, Path(str(target).removesuffix(".gz"))):
            left.unlink(missing_ok=True)
    if not report:
        raise Unavailable(f"nvidia-bug-report.sh wrote more than {MAX_PART_BYTES >> 20} MiB")
    return report


def _describe(contents: BundleContents, stamp: str, notes: Mapping[str, str]) -> bytes:
    lines = [f"Logs of node {contents.node} at {stamp}, kept because of: {contents.reason}"]
    lines += [f"{name} is missing: {reason}" for name, reason in notes.items()]
    return ("\n".join(lines) + "\n").encode()


def _bundles(folder: Path) -> list[Path]:
    """Return the bundles in the folder."""
    with suppress(OSError):
        return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return []


def _prune(folder: Path) -> None:
    """Delete the oldest bundles beyond the limits. The newest one stays in any case."""
    total = 0
    newest_first = sorted(_bundles(folder), key=lambda path: path.stat().st_mtime, reverse=True)
    for index, path in enumerate(newest_first):
        total += path.stat().st_size
        if index and (index >= MAX_BUNDLES or total > MAX_FOLDER_BYTES):
            path.unlink(missing_ok=True)


async def _in_thread(work: Callable[[], Path]) -> Path:
    """Run blocking work in a thread that a process's end does not wait for, as it does for asyncio's own threads."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Path] = loop.create_future()

    def settle(path: Path | None, error: Exception | None) -> None:
        if done.done():
            return
        if path is not None:
            done.set_result(path)
        elif error is not None:
            done.set_exception(error)

    def run() -> None:
        path, failure = None, None
        try:
            path = work()
        except Exception as error:  # noqa: BLE001 - is raised again in the event loop
            failure = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, path, failure)

    threading.Thread(target=run, name="log-bundle", daemon=True).start()
    return await done

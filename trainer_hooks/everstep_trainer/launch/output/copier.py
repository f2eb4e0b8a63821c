"""Copy the output of ranks to the launcher's own and to files, on one thread that may wait for a stopped terminal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import selectors
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from everstep.clock import Clock
from everstep.errors import ConfigurationError
from everstep.layout.kept_output import LAUNCHER_FILE, rank_file
from everstep_trainer.launch.output.kept_files import KeptFiles, LineCollector
from everstep_trainer.launch.output.marks import KEPT_MARK, MarkReader, identity
from everstep_trainer.launch.output.screen import OutputStream, Screen

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 16
MAX_ROUND_BYTES = 1 << 20
"""Most output of one rank that is copied before others have their turn."""
MAX_EARLY_BYTES = 256 << 10
"""Most output of a standby that is kept until it gets a rank."""


class RawFile:
    """A file of ``--log-dir``; its loss is logged once, and later writes may succeed."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self._is_lost = False

    def write(self, data: bytes) -> None:
        """Append output of a rank."""
        try:
            self.file.write(data)
            self._is_lost = False
        except OSError as error:
            if not self._is_lost:
                log.warning("output of ranks is lost: %s cannot be written: %s", self.file.name, error)
            self._is_lost = True


class Channel:
    """One pipe or pseudo terminal from a worker."""

    def __init__(self, serial: int, descriptor: int, target: OutputStream, raw: RawFile | None) -> None:
        self.serial, self.descriptor, self.target, self.raw = serial, descriptor, target, raw
        self.marks, self.lines = MarkReader(), LineCollector()
        self.tee_line = b""

    def read(self) -> bytes | None:
        """Return what is there; None if there is nothing now, empty at the end of the output."""
        try:
            return os.read(self.descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:  # of a terminal that no process has open any more
                log.warning("output of a rank cannot be read: %s", error)
            return b""


class OutputCopier:
    """Copies output on its own thread, in the order in which it was written, as far as that can be known.

    Args:
        screen: Where output is shown.
        clock: For the times of kept lines.
        folder: Folder of kept files; None keeps nothing.
        log_dir: Folder for whole output, as ``worker-SERIAL.out`` and ``.err``; without ``is_tee`` nothing is shown.
        is_tee: Show lines with the label of their rank.
        shown: Local ranks whose output is shown; None: all.
        labels: Current names of workers, such as ``rank 3``.

    Raises:
        ConfigurationError: ``log_dir`` cannot be written.
    """

    def __init__(
        self,
        screen: Screen,
        clock: Clock,
        *,
        folder: Path | None = None,
        log_dir: Path | None = None,
        is_tee: bool = False,
        shown: frozenset[int] | None = None,
        labels: Mapping[int, str],
    ) -> None:
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigurationError(f"--log-dir: cannot write ranks' output to {log_dir}: {error}") from error
        self._screen, self._clock, self._log_dir, self._is_tee = screen, clock, log_dir, is_tee
        self._labels, self._shown = labels, shown
        self._is_line_wise = log_dir is not None or is_tee  # what is written is no terminal's
        self._shows_ranks = log_dir is None or is_tee
        self._shows_all = False
        self._files = KeptFiles(folder)
        self._local_ranks: dict[int, int] = {}
        self._early: dict[int, list[bytes]] = {}  # lines of standbys
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._orders: deque[Callable[[], None]] = deque()
        self._is_ending = False
        self._lost: set[int] = set()  # targets whose loss was logged
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    # --- of any thread ------------------------------------------------------------------------------------------------

    def open(self, serial: int, local_rank: int | None) -> tuple[int, int]:
        """Return descriptors for a worker's stdout and stderr; close them once they are passed on."""
        screen = self._screen
        if local_rank is not None:
            self.assign(serial, local_rank)
        if screen.is_one and not self._is_line_wise:  # as one file, what is written to both stays in its order
            writing = self._open(serial, screen.stderr, "")
            return writing, os.dup(writing)
        return self._open(serial, screen.stdout, "out"), self._open(serial, screen.stderr, "err")

    def assign(self, serial: int, local_rank: int) -> None:
        """Tell which local rank a worker has."""
        # At once: the worker may have ended before the next order is carried out.
        self._local_ranks[serial] = local_rank

    def show_line(self, line: str) -> None:
        """Show a line of the launcher's own on stderr, after all output that ranks wrote before."""
        self._order(lambda: self._screen.stderr.write_line(line.encode(errors="replace") + b"\n"))

    def note_echo(self) -> None:
        """Note that the terminal has shown a key, such as ``^C``, where the cursor was."""
        self._order(self._screen.stderr.note_echo)

    def keep_line(self, line: str) -> None:
        """Add a line to the launcher's log."""
        lines, at = line.encode(errors="replace").split(b"\n"), self._clock.wall()
        self._order(lambda: self._files.append(LAUNCHER_FILE, lines, at))

    def draw(self, data: bytes) -> None:
        """Write to the terminal without moving its cursor."""

        def write() -> None:
            with contextlib.suppress(OSError):
                os.write(self._screen.stderr.descriptor, data)

        self._order(write)

    def stop_showing_ranks(self) -> None:
        """Show nothing that ranks write from now on; it is still kept."""
        self._order(lambda: setattr(self, "_shows_ranks", False))

    def shows_stderr_of(self, descriptor: int) -> str:
        """Return the value of OUTPUT_VARIABLE for a worker with this stderr; empty if it is not shown as it is."""
        if self._is_line_wise:
            return ""
        with contextlib.suppress(OSError):
            return f"{identity(self._screen.stderr.descriptor)} {identity(descriptor)}"
        return ""

    def show_kept_lines(self) -> None:
        """Show the lines too that ranks mean for the launcher's log."""
        self._shows_all = True

    def resize(self) -> None:
        """Give the pseudo terminals of ranks the size of the launcher's."""

        def resize() -> None:
            for channel in self._channels():
                _copy_size(channel.target.descriptor, channel.descriptor)

        self._order(resize)

    def end(self) -> None:
        """Copy what dead workers left, and end; waits for a terminal that is stopped, and hardly for a disk."""

        def end() -> None:
            self._is_ending = True

        if self._thread.is_alive():
            self._order(end)
            self._thread.join()
        self._files.end()

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        with contextlib.suppress(OSError):  # enough wakes wait, or the thread has ended
            os.write(self._wake, b"\0")

    def _open(self, serial: int, target: OutputStream, kind: str) -> int:
        reading, writing = _make_pair(-1 if self._is_line_wise else target.descriptor)
        os.set_blocking(reading, False)
        channel = Channel(serial, reading, target, self._open_raw(f"worker-{serial}.{kind}"))
        self._order(lambda: self._selector.register(reading, selectors.EVENT_READ, channel) and None)
        return writing

    def _open_raw(self, name: str) -> RawFile | None:
        """Open a file in ``log_dir``, which may have been removed; a replacement is started even without it."""
        if self._log_dir is None:
            return None
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            return RawFile((self._log_dir / name).open("ab", buffering=0))
        except OSError as error:
            log.warning("--log-dir: the output of a process is not kept: cannot write %s: %s", name, error)
            return None

    # --- of the copier's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_ending:
            self._selector.select()
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
            orders = [self._orders.popleft() for _ in range(len(self._orders))]
            # What ranks wrote before the launcher gave an order is copied before: it looks for channels after that.
            self._copy_all()
            for order in orders:
                order()
        self._copy_all()
        for channel in self._channels():
            self._close(channel)
        self._selector.close()
        os.close(self._woken)
        os.close(self._wake)

    def _copy_all(self) -> None:
        for channel in self._channels():
            try:
                self._copy(channel)
            except Exception:  # ranks must not block on their output, whatever is wrong with it
                log.exception("output of a rank cannot be copied")
                self._close(channel)

    def _channels(self) -> list[Channel]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _copy(self, channel: Channel) -> None:
        copied = 0
        while copied < MAX_ROUND_BYTES and (data := channel.read()) is not None:
            if not data:
                self._close(channel)
                return
            copied += len(data)
            self._handle(channel, data)

    def _close(self, channel: Channel) -> None:
        rest = channel.marks.rest()
        if rest:
            self._show(channel, rest)
        if channel.tee_line:
            self._show(channel, b"\n")
        self._keep(channel, channel.lines.feed(rest) + channel.lines.rest())
        if early := self._early.pop(channel.serial, []):  # a standby ends: it has no rank's file
            label = f"[{self._label(channel)}] ".encode()
            self._files.append(LAUNCHER_FILE, [label + line for line in early], self._clock.wall())
        self._selector.unregister(channel.descriptor)
        os.close(channel.descriptor)
        if channel.raw is not None:
            channel.raw.file.close()

    def _handle(self, channel: Channel, data: bytes) -> None:
        if channel.raw is not None:
            channel.raw.write(data)
        for mark, text in channel.marks.feed(data):
            if mark == KEPT_MARK:
                self._keep_marked(channel, text)
            elif mark and not self._is_tee:
                if self._shows_ranks:
                    channel.target.write_line(text)
            else:
                self._show(channel, text)
            if mark != KEPT_MARK:
                self._keep(channel, channel.lines.feed(text))
        self._log_loss(channel.target)

    def _keep_marked(self, channel: Channel, text: bytes) -> None:
        line = f"[{self._label(channel)}] ".encode() + text.rstrip(b"\n")
        self._files.append(LAUNCHER_FILE, [line], self._clock.wall())
        if self._shows_all and self._shows_ranks:
            channel.target.write_line(text)

    def _label(self, channel: Channel) -> str:
        return self._labels.get(channel.serial, f"worker {channel.serial}")

    def _show(self, channel: Channel, data: bytes) -> None:
        if not self._shows_ranks:
            return
        if self._shown is not None and self._local_ranks.get(channel.serial) not in self._shown:
            return
        if not self._is_tee:
            channel.target.write(data)
            return
        *lines, channel.tee_line = (channel.tee_line + data).split(b"\n")
        label = f"[{self._label(channel)}]: ".encode()
        channel.target.write(b"".join(label + line + b"\n" for line in lines))

    def _log_loss(self, target: OutputStream) -> None:
        error = target.error
        if error is not None and error.errno != errno.EBADF and target.descriptor not in self._lost:
            self._lost.add(target.descriptor)
            log.warning("output of ranks is no longer shown: %s", target.error)

    def _keep(self, channel: Channel, lines: list[bytes]) -> None:
        local_rank = self._local_ranks.get(channel.serial)
        if local_rank is not None:
            self._files.append(rank_file(local_rank), self._early.pop(channel.serial, []) + lines, self._clock.wall())
            return
        if not lines:
            return
        early = self._early.setdefault(channel.serial, [])
        early += lines
        while sum(map(len, early)) > MAX_EARLY_BYTES:
            early.pop(0)


# ---- pipes and pseudo terminals


def _make_pair(shown: int) -> tuple[int, int]:
    """Return the launcher's end and the worker's: of a pseudo terminal if output is shown on a terminal.

    The script then finds a terminal too, and draws what it would without a launcher.
    """
    with contextlib.suppress(OSError, termios.error):
        if shown >= 0 and os.isatty(shown):
            return _make_terminal(shown)
    return os.pipe2(os.O_CLOEXEC)


def _make_terminal(like: int) -> tuple[int, int]:
    master, slave = os.openpty()
    try:
        attributes = termios.tcgetattr(slave)
        attributes[1] &= ~termios.OPOST  # output arrives unchanged; the launcher's terminal processes it
        attributes[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        _copy_size(like, master)
    except (OSError, termios.error):
        os.close(master)
        os.close(slave)
        raise
    return master, slave


def _copy_size(terminal: int, master: int) -> None:
    with contextlib.suppress(OSError):
        if os.isatty(master):
            fcntl.ioctl(
                master, termios.TIOCSWINSZ, fcntl.ioctl(terminal, termios.TIOCGWINSZ, struct.pack("4H", 0, 0, 0, 0))
            )

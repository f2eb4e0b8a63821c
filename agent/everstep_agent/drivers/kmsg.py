"""Read the kernel log: /dev/kmsg, a file that grows (and is rotated or truncated), or a named pipe."""

from __future__ import annotations

import errno
import os
import stat

import msgspec

MAX_RECORD_BYTES = 8192
"""The largest record that /dev/kmsg returns (Linux, CONSOLE_EXT_LOG_MAX)."""

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 8192
"""A longer line is cut here; the rest up to the next line end is dropped."""

MAX_RECORDS_PER_READ = 512
KERNEL_LOG_DEVICE = os.makedev(1, 11)
"""Device number of /dev/kmsg, under any name (Linux, admin-guide/devices.txt)."""
FACILITY_SHIFT, KERNEL_FACILITY = 3, 0
"""A record's priority is its facility, shifted by three bits, and its level (RFC 5424)."""
_LINE_END = rb"\x0a"


class LogPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The read position of a log: a file's inode and offset, or the kernel's sequence number."""

    inode: int = 0
    offset: int = 0
    sequence: int = -1


class KernelLog:
    """Read new lines in bounded portions, without blocking.

    Without a ``position``, a device is read from its oldest line that is not older than ``not_before_s`` (seconds since
    boot), and a file from its end, since its lines may be of any boot. A file that appears later is read from its
    beginning.
    """

    def __init__(self, path: str, position: LogPosition | None = None, not_before_s: float = 0.0) -> None:
        self._path = path
        self._not_before_us = not_before_s * 1e6
        self._position = position or LogPosition()
        self._starts_at_end = position is None
        self._descriptor: int | None = None
        self._file_mode = 0
        self._partial_line = b""
        self._is_skipping_line = False
        self.error = ""

    @property
    def position(self) -> LogPosition:
        """The position for the next run; whole lines only."""
        return msgspec.structs.replace(self._position, offset=max(0, self._position.offset - len(self._partial_line)))

    @property
    def wait_descriptor(self) -> int | None:
        """A descriptor that becomes readable with new lines; None if the log has to be polled."""
        return None if self._descriptor is None or stat.S_ISREG(self._file_mode) else self._descriptor

    def open(self) -> None:
        """Open the log if it exists and is not open; ``error`` holds the reason for a failure."""
        if self._descriptor is not None:
            return
        try:
            kind = os.stat(self._path).st_mode
            # A pipe is opened for writing too: with a writer of our own it never reports that the last one left.
            flags = os.O_RDWR if stat.S_ISFIFO(kind) else os.O_RDONLY
            self._descriptor = os.open(self._path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            self._starts_at_end = self._starts_at_end and not is_missing
            self.error = f"{self._path} does not exist" if is_missing else f"{self._path}: {error.strerror}"
            return
        status = os.fstat(self._descriptor)
        if not _is_log(status):
            self.close()
            self.error = f"{self._path} is no kernel log: expected /dev/kmsg, a file or a named pipe"
            return
        self.error, self._file_mode = "", status.st_mode
        if stat.S_ISREG(self._file_mode):
            self._seek(status)

    def read(self) -> list[str]:
        """Return the next lines, oldest first; call again until there are none."""
        self.open()
        if self._descriptor is None:
            return []
        if stat.S_ISCHR(self._file_mode):
            return self._read_records(self._descriptor)
        return self._read_bytes(self._descriptor)

    def has_new_data(self) -> bool:
        """Return whether a file has grown, was replaced or cut short, or was created: one system call."""
        try:
            named = os.stat(self._path)
        except OSError:
            return False if self._descriptor is None else os.fstat(self._descriptor).st_size != self._position.offset
        return (named.st_ino, named.st_size) != (self._position.inode, self._position.offset)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _seek(self, status: os.stat_result) -> None:
        known = self._position.inode == status.st_ino and self._position.offset <= status.st_size
        offset = self._position.offset if known else (status.st_size if self._starts_at_end else 0)
        self._starts_at_end = False
        self._partial_line, self._is_skipping_line = b"", False
        self._position = LogPosition(inode=status.st_ino, offset=offset)

    def _read_bytes(self, descriptor: int) -> list[str]:
        is_file = stat.S_ISREG(self._file_mode)
        try:
            data = (
                os.pread(descriptor, READ_BYTES, self._position.offset) if is_file else os.read(descriptor, READ_BYTES)
            )
        except BlockingIOError:
            return []
        except OSError as error:
            self._fail(error)
            return []
        if not data:
            if is_file:
                self._follow_rotation()
            return []
        self._position = msgspec.structs.replace(self._position, offset=self._position.offset + len(data))
        return self._split_lines(data)

    def _split_lines(self, data: bytes) -> list[str]:
        *complete, self._partial_line = (self._partial_line + data).split(b"\n")
        if self._is_skipping_line and complete:
            complete, self._is_skipping_line = complete[1:], False
        if self._is_skipping_line:
            self._partial_line = b""
        elif len(self._partial_line) > MAX_LINE_BYTES:
            complete.append(self._partial_line)
            self._partial_line, self._is_skipping_line = b"", True
        return [line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip("\r") for line in complete if line]

    def _follow_rotation(self) -> None:
        """At the end of a file, continue with the file that took its name, or at the start of a truncated one."""
        try:
            named = os.stat(self._path)
        except OSError:
            return
        if named.st_ino != self._position.inode:
            self.close()
            self.open()
        elif named.st_size < self._position.offset:
            self._seek(named)

    def _read_records(self, descriptor: int) -> list[str]:
        lines: list[str] = []
        while len(lines) < MAX_RECORDS_PER_READ:
            try:
                record = os.read(descriptor, MAX_RECORD_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # overwritten before it was read
                self._fail(error)
                break
            if not record:
                break
            lines += self._parse_record(record)
        return lines

    def _parse_record(self, record: bytes) -> list[str]:
        """Parse ``priority,sequence,time,flags;text`` and property lines, which begin with a space.

        One printk of several lines is one record, in which the kernel escapes each line end and all unprintable
        characters. The other escapes stay, because the characters they stand for might control a terminal. Programs
        write to /dev/kmsg too: the kernel gives their records a facility other than its own, which is 0.
        """
        header, _, text = record.partition(b";")
        fields = header.split(b",")
        sequence = int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else -1
        if sequence >= 0:
            if sequence <= self._position.sequence:
                return []
            self._position = LogPosition(sequence=sequence)
            if len(fields) > 2 and fields[2].isdigit() and int(fields[2]) < self._not_before_us:
                return []
        if fields[0].isdigit() and int(fields[0]) >> FACILITY_SHIFT != KERNEL_FACILITY:
            return []
        lines = text.partition(b"\n")[0].split(_LINE_END)
        return [line.decode("utf-8", "replace") for line in lines if line]

    def _fail(self, error: OSError) -> None:
        self.error = f"{self._path}: {error.strerror}"
        self.close()


def is_null_device(path: str) -> bool:
    """Return whether the path is /dev/null, by which people say that there is no log."""
    try:
        return os.path.samestat(os.stat(path), os.stat(os.devnull))
    except OSError:
        return False


def _is_log(status: os.stat_result) -> bool:
    """Return whether the opened file can be a log: other devices have no end, or cannot be waited for."""
    kind = status.st_mode
    return stat.S_ISREG(kind) or stat.S_ISFIFO(kind) or (stat.S_ISCHR(kind) and status.st_rdev == KERNEL_LOG_DEVICE)

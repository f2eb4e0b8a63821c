"""Write to the launcher's stdout and stderr, so that a line of Everstep always begins on its own line."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys

STDOUT, STDERR = 1, 2


class OutputStream:
    """One open file behind stdout or stderr, or behind both.

    Attributes:
        is_inside_line: The last byte written was not the end of a line, as with a progress bar.
    """

    def __init__(self, descriptor: int, *, is_closed: bool = False) -> None:
        self.descriptor = descriptor
        self.is_inside_line = False
        self.error: OSError | None = OSError(errno.EBADF, "it was closed at the start") if is_closed else None

    def write(self, data: bytes) -> None:
        """Write everything; after an error nothing is written any more."""
        if not data or self.error is not None:
            return
        try:
            _write_all(self.descriptor, data)
        except OSError as error:
            self.error = error
            return
        self.is_inside_line = not data.endswith(b"\n")

    def note_echo(self) -> None:
        """Note that a terminal has echoed a key: the next line of Everstep begins below."""
        self.is_inside_line = self.is_inside_line or os.isatty(self.descriptor)

    def write_line(self, line: bytes) -> None:
        """Write a line with its end; end an unfinished line first, which stays visible."""
        self.write(b"\n" + line if self.is_inside_line else line)


class Screen:
    """The streams behind stdout and stderr, which are one if both go to the same place."""

    def __init__(self, stdout: int = STDOUT, stderr: int = STDERR) -> None:
        # Of a program that was started without stdout or stderr, the descriptor is another file by now.
        out = OutputStream(stdout, is_closed=stdout == STDOUT and sys.__stdout__ is None)
        err = OutputStream(stderr, is_closed=stderr == STDERR and sys.__stderr__ is None)
        self.is_one = _is_same_file(stdout, stderr)
        self.stdout, self.stderr = (err, err) if self.is_one else (out, err)


def _is_same_file(first: int, second: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(first), os.fstat(second))
    return False


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            select.select([], [descriptor], [])  # another program made the terminal non-blocking

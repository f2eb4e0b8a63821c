"""Mark Everstep's own lines in a rank's stderr, so that the launcher shows them on their own line, or only keeps them.

A rank's progress bar may have left an unfinished line on the terminal. Only the launcher, which sees the output of all
ranks, knows that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import NamedTuple

OUTPUT_VARIABLE = "EVERSTEP_RANK_OUTPUT"
"""Identity of the launcher's stderr and of the rank's, if the launcher copies the latter to the former."""
PREFIX = b"everstep: "
SHOWN_MARK = b"\x1e\x1f" + PREFIX
"""Begins a line that is shown."""
KEPT_MARK = b"\x1e\x1d" + PREFIX
"""Begins a line that only the launcher's log gets."""


class OutputPart(NamedTuple):
    """A part of a rank's output: ``mark`` is the one that began it, or empty."""

    mark: bytes
    data: bytes


class MarkReader:
    """Splits a rank's output at marked lines."""

    def __init__(self) -> None:
        self._held = b""
        self._mark = b""

    def feed(self, data: bytes) -> list[OutputPart]:
        """Return the pieces of new output, without marks. A possible beginning of a mark waits for the next call."""
        data = self._held + data
        self._held = b""
        pieces: list[OutputPart] = []
        while data:
            end = data.find(b"\n") + 1 if self._mark else _find_mark(data)
            if self._mark and not end:  # its end comes later
                pieces.append(OutputPart(self._mark, data))
                return pieces
            if self._mark:
                pieces.append(OutputPart(self._mark, data[:end]))
                data, self._mark = data[end:], b""
                continue
            if end > 0:
                pieces.append(OutputPart(b"", data[:end]))
            data = data[end:]
            if len(data) < len(SHOWN_MARK):
                self._held = data
                return pieces
            if data:
                self._mark = data[: len(SHOWN_MARK)]
                data = data[len(SHOWN_MARK) - len(PREFIX) :]
        return pieces

    def rest(self) -> bytes:
        """Return what waits, at the end of the output."""
        held, self._held = self._held, b""
        return held


def _find_mark(data: bytes) -> int:
    """Return where a mark begins, or may begin at the end; the length of the data if nowhere."""
    start = data.find(b"\x1e")
    while start >= 0:
        part = data[start : start + len(SHOWN_MARK)]
        if SHOWN_MARK.startswith(part) or KEPT_MARK.startswith(part):
            return start
        start = data.find(b"\x1e", start + 1)
    return len(data)


def identity(descriptor: int) -> str:
    """Return what tells the open file of a descriptor from others. Raises OSError."""
    status = os.fstat(descriptor)
    return f"{status.st_dev}:{status.st_ino}"


def shown_stderr() -> str:
    """Return the identity of the place where this process's stderr is seen. Raises OSError without stderr."""
    own = identity(2)
    launchers, _, copied = os.environ.get(OUTPUT_VARIABLE, "").partition(" ")
    return launchers if copied == own else own


def is_copied() -> bool:
    """Return whether the launcher copies this process's stderr, and Python writes there."""
    try:
        _, _, copied = os.environ.get(OUTPUT_VARIABLE, "").partition(" ")
        return bool(copied) and sys.stderr is sys.__stderr__ and identity(2) == copied
    except OSError:
        return False


def keep_line(text: str) -> bool:
    """Add a line to the launcher's log without showing it; return False if there is no launcher for that."""
    if not is_copied():
        return False
    _write(KEPT_MARK, text)
    return True


def show_line(text: str) -> None:
    """Print a line of Everstep to stderr, if the script has left a usable one; it begins with ``everstep: ``."""
    with contextlib.suppress(OSError, ValueError):
        if is_copied():
            _write(SHOWN_MARK, text)
        else:
            print(f"{PREFIX.decode()}{text}", file=sys.stderr, flush=True)


class LastResort(logging.Handler):
    """Shows warnings of Everstep, if the script has set up no logging; those of others go to ``otherwise``."""

    def __init__(self, otherwise: logging.Handler) -> None:
        super().__init__(logging.WARNING)
        self._otherwise = otherwise

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning on its own line."""
        if not record.name.startswith("everstep") or not is_copied():
            self._otherwise.handle(record)
            return
        try:
            _write(SHOWN_MARK, self.format(record))
        except (OSError, ValueError):  # stderr is closed
            self.handleError(record)


def mark_warnings() -> None:
    """Let Python's handler of last resort mark Everstep's warnings."""
    if logging.lastResort is not None:
        logging.lastResort = LastResort(logging.lastResort)


def _write(mark: bytes, text: str) -> None:
    sys.stderr.flush()
    os.write(2, mark + text.encode(errors="replace") + b"\n")  # one write: other threads do not come between

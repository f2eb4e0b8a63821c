"""Keep the newest output in bounded files, on a thread of its own: a slow or full disk delays nothing else."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from pathlib import Path

from everstep.layout.kept_output import MAX_LINE_BYTES, OLDER

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 2 << 20
"""Size of a file from which it becomes the older one; a rank takes twice as much."""
MAX_WAITING_BYTES = 8 << 20
"""Output that waits for a slow disk; more is left out."""
END_WAIT_S = 2.0
"""Longest wait for the disk at the end."""


class LineCollector:
    """Makes lines of output, as a terminal shows them: of a line that was written over, the last text counts."""

    def __init__(self) -> None:
        self._line = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that end in the data, without their ends."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = self._line + lines[0]
            self._line = b""
        self._line = _shown_part(self._line + rest, keeps_return=True)[:MAX_LINE_BYTES]
        return [_shown_part(line)[:MAX_LINE_BYTES] for line in lines]

    def rest(self) -> list[bytes]:
        """Return the unfinished line at the end of the output."""
        line, self._line = _shown_part(self._line), b""
        return [line] if line else []


def _shown_part(line: bytes, *, keeps_return: bool = False) -> bytes:
    """Return what follows the last carriage return, unless nothing follows."""
    if b"\r" not in line:
        return line
    text = line.rstrip(b"\r")
    ended = line[len(text) :]
    return text.rpartition(b"\r")[2] + (ended[:1] if keeps_return else b"")


class KeptFiles:
    """The files of one launcher in ``folder``; None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._waiting_bytes = 0
        self._left_out = 0
        self._is_ending = False
        self._wake = threading.Condition()
        self._files: dict[str, tuple[int, int]] = {}  # descriptor and size
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="kept output", daemon=True)
        if folder is not None:
            self._thread.start()

    def append(self, name: str, lines: list[bytes], at: float) -> None:
        """Append lines to a file, soon; never waits."""
        if self._folder is None or not lines:
            return
        time = f"{at:.3f} ".encode()
        data = b"".join(time + line + b"\n" for line in lines)
        with self._wake:
            if self._waiting_bytes + len(data) > MAX_WAITING_BYTES:
                self._left_out += len(lines)
                return
            if self._left_out:
                data = time + f"({self._left_out} lines of ranks are left out here)\n".encode() + data
                self._left_out = 0
            self._waiting.append((name, data))
            self._waiting_bytes += len(data)
            self._wake.notify()

    def end(self) -> None:
        """Write what waits, as far as the disk takes it in time."""
        with self._wake:
            self._is_ending = True
            self._wake.notify()
        if self._folder is not None:
            self._thread.join(END_WAIT_S)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._is_ending)
                if not self._waiting:
                    break
                name, data = self._waiting.popleft()
            try:
                self._write(name, data)
                self._has_failed = False
            except OSError as error:
                if not self._has_failed:
                    log.warning("output of ranks is not kept for `everstep logs`: %s", error)
                self._has_failed = True
            with self._wake:
                self._waiting_bytes -= len(data)
        for descriptor, _ in self._files.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _write(self, name: str, data: bytes) -> None:
        assert self._folder is not None
        path = self._folder / name
        descriptor, size = self._files.get(name, (-1, 0))
        if descriptor >= 0 and size + len(data) > MAX_FILE_BYTES:
            os.close(self._files.pop(name)[0])
            os.replace(path, path.with_name(name + OLDER))
            descriptor = -1
        if descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o600)
            size = os.fstat(descriptor).st_size
        self._files[name] = descriptor, size + len(data)
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]

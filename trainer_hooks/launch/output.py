"""What workers write: to files, and with --tee on the launcher's own output, each line with its rank."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from everstep.errors import ConfigurationError

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 16


class Outputs:
    """Pipes from workers into ``directory``.

    Args:
        directory: made where it is missing; files are ``worker-SERIAL.out`` and ``.err``.
        tee: also write every line to this process's stdout or stderr.
        label: the present name of a worker by its serial, such as ``rank 3``.

    Raises ConfigurationError where the directory cannot be made.
    """

    def __init__(self, directory: Path, tee: bool, label: Callable[[int], str]) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--log-dir: ranks' output cannot be kept in {directory}: {error}") from error
        self._directory = directory
        self._tee = tee
        self._label = label
        self._pumps: set[_Pump] = set()

    def open(self, serial: int) -> tuple[int, int]:
        """Descriptors for the worker's stdout and stderr; close them once they were passed on."""
        return self._open(serial, "out", sys.stdout.buffer), self._open(serial, "err", sys.stderr.buffer)

    def drain(self) -> None:
        """Takes what the dead have left in their pipes, and closes everything."""
        for pump in list(self._pumps):
            pump.read()
            pump.close()

    def _open(self, serial: int, kind: str, shown: BinaryIO) -> int:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        file = (self._directory / f"worker-{serial}.{kind}").open("ab", buffering=0)
        tee = (lambda: f"[{self._label(serial)}]: ".encode(), shown) if self._tee else None
        self._pumps.add(_Pump(reading, file, tee, self._pumps.discard))
        return writing


class _Pump:
    """One pipe into one file."""

    def __init__(
        self,
        pipe: int,
        file: BinaryIO,
        tee: tuple[Callable[[], bytes], BinaryIO] | None,
        closed: Callable[[_Pump], None],
    ) -> None:
        self._pipe = pipe
        self._file = file
        self._tee = tee
        self._closed = closed
        self._line = b""
        self._lost = False
        asyncio.get_running_loop().add_reader(pipe, self.read)

    def read(self) -> None:
        """Moves what is there; closes at end-of-file."""
        while True:
            try:
                data = os.read(self._pipe, CHUNK_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.close()
                return
            try:
                self._file.write(data)
                self._lost = False
            except OSError as error:  # what could be written later is; the rank must not wait in its pipe
                if not self._lost:
                    log.warning("what ranks write is lost: %s cannot be written: %s", self._file.name, error)
                self._lost = True
            self._show(data)

    def close(self) -> None:
        if self._file.closed:
            return
        if self._line:
            self._show(b"\n")
        asyncio.get_running_loop().remove_reader(self._pipe)
        os.close(self._pipe)
        self._file.close()
        self._closed(self)

    def _show(self, data: bytes) -> None:
        if self._tee is None:
            return
        label, shown = self._tee
        *lines, self._line = (self._line + data).split(b"\n")
        if lines:
            try:
                shown.write(b"".join(label() + line + b"\n" for line in lines))
                shown.flush()
            except OSError as error:
                log.warning("what ranks write is not shown any more: %s", error)
                self._tee = None

"""What ranks write is moved on, whatever becomes of the files and of whoever looks on."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from everstep_trainer.launch.processes import WorkerOutputs


class Refusing(io.RawIOBase):
    """A file on a full disk, or a terminal that is gone."""

    name = "worker-1.out"

    def __init__(self, error: int) -> None:
        self.error: int | None = error
        self.text = b""

    def write(self, data: Any) -> int:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        self.text += bytes(data)
        return len(bytes(data))


def test_full_disk_is_logged_once_and_lines_are_still_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    async def play() -> bytes:
        outputs = WorkerOutputs(tmp_path, True, {1: "rank 1"})
        out, err = outputs.open(1)
        (pump,) = (p for p in outputs._pumps if p._file.name.endswith(".out"))
        pump._file.close()
        full = Refusing(errno.ENOSPC)
        pump._file = full  # type: ignore[assignment]
        for line in (b"one\n", b"two\n"):
            os.write(out, line)
            pump.read()
        full.error = None
        os.write(out, b"three\n")
        pump.read()
        for descriptor in (out, err):
            os.close(descriptor)
        outputs.drain()
        return full.text

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(play()) == b"three\n"
    assert capfdbinary.readouterr().out == b"[rank 1]: one\n[rank 1]: two\n[rank 1]: three\n"
    assert [record.getMessage() for record in caplog.records] == [
        "output of ranks is lost: worker-1.out cannot be written: [Errno 28] No space left on device"
    ]


def test_lost_terminal_is_logged_once_and_files_continue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        outputs = WorkerOutputs(tmp_path, True, {})
        out, err = outputs.open(1)
        (pump,) = (p for p in outputs._pumps if p._file.name.endswith(".out"))
        pump._tee = (lambda: b"", Refusing(errno.EPIPE))  # type: ignore[assignment]
        for line in (b"one\n", b"two\n"):
            os.write(out, line)
            pump.read()
        for descriptor in (out, err):
            os.close(descriptor)
        outputs.drain()

    with caplog.at_level(logging.WARNING):
        asyncio.run(play())
    assert (tmp_path / "worker-1.out").read_text() == "one\ntwo\n"
    assert [record.getMessage() for record in caplog.records] == [
        "output of ranks is no longer shown: [Errno 32] Broken pipe"
    ]

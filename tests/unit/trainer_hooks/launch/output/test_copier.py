"""Output of ranks is shown unchanged, lines of Everstep are separate lines, and the newest part is kept."""

from __future__ import annotations

import errno
import io
import logging
import os
import pty
import shutil
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everstep.clock import ManualClock
from everstep.errors import ConfigurationError
from everstep.layout.kept_output import LAUNCHER_FILE, last_lines, rank_file
from everstep_trainer.launch.output.copier import OutputCopier, RawFile
from everstep_trainer.launch.output.log_handlers import LauncherLog
from everstep_trainer.launch.output.marks import KEPT_MARK, SHOWN_MARK
from everstep_trainer.launch.output.screen import Screen


class Shown:
    """Files in place of the launcher's stdout and stderr; one for both if ``is_one``."""

    def __init__(self, folder: Path, is_one: bool) -> None:
        flags = os.O_CREAT | os.O_RDWR | os.O_APPEND
        self._out = os.open(folder / "out", flags)
        self._err = os.dup(self._out) if is_one else os.open(folder / "err", flags)
        self.screen = Screen(self._out, self._err)

    @property
    def out(self) -> bytes:
        return os.pread(self._out, 1 << 20, 0)

    @property
    def err(self) -> bytes:
        return os.pread(self._err, 1 << 20, 0)


@contextmanager
def copying(folder: Path, *, is_one: bool = True, **more: Any) -> Iterator[tuple[OutputCopier, Shown]]:
    kept = folder / "kept"
    kept.mkdir(exist_ok=True)
    shown = Shown(folder, is_one)
    copier = OutputCopier(shown.screen, ManualClock(wall=7.0), folder=kept, labels={1: "rank 3"}, **more)
    try:
        yield copier, shown
    finally:
        copier.end()


def settle(copier: OutputCopier) -> None:
    """Wait until the copier has executed all requests and copied all output so far."""
    done = threading.Event()
    copier._order(done.set)
    assert done.wait(60)


def kept(folder: Path, name: str) -> list[str]:
    return [line.text for line in last_lines([("", folder / "kept" / name)], 100)]


def play(copier: OutputCopier, write: Callable[[int, int], None], serial: int = 1, local_rank: int | None = 0) -> None:
    out, err = copier.open(serial, local_rank)
    write(out, err)
    os.close(out)
    os.close(err)


def test_output_to_one_file_keeps_its_order_and_bytes(tmp_path: Path) -> None:
    def write(out: int, err: int) -> None:
        for number in range(50):
            os.write(out, b"out %d\n" % number)
            os.write(err, b"\rerr %d\xff\x1b[1m" % number)

    with copying(tmp_path) as (copier, shown):
        play(copier, write)
    assert shown.out == b"".join(b"out %d\n\rerr %d\xff\x1b[1m" % (number, number) for number in range(50))


def test_lines_of_everstep_stand_on_their_own_beside_a_bar(tmp_path: Path) -> None:
    with copying(tmp_path) as (copier, shown):
        out, err = copier.open(1, 0)
        settle(copier)
        os.write(err, b"\r 10%|#")
        copier.show_line("everstep-launch: a line")
        settle(copier)
        os.write(err, b"\r 20%|##")
        os.write(err, SHOWN_MARK + b"a warning\n")
        os.write(err, KEPT_MARK + b"a list\n")
        os.write(err, b"\r 30%|###\n")
        copier.show_line("everstep-launch: the end")
        os.close(out)
        os.close(err)
    assert shown.out == (
        b"\r 10%|#\neverstep-launch: a line\n\r 20%|##\neverstep: a warning\n\r 30%|###\neverstep-launch: the end\n"
    )
    assert kept(tmp_path, rank_file(0)) == [" 20%|##everstep: a warning", " 30%|###"]
    assert kept(tmp_path, LAUNCHER_FILE) == ["[rank 3] everstep: a list"]


def test_ranks_are_not_shown_after_the_end(tmp_path: Path) -> None:
    with copying(tmp_path) as (copier, shown):
        out, err = copier.open(1, 0)
        settle(copier)
        os.write(out, b"before\n")
        copier.stop_showing_ranks()
        copier.show_line("everstep-launch: receipt")
        settle(copier)
        os.write(err, b"Traceback\n" + SHOWN_MARK + b"late\n")
        os.close(out)
        os.close(err)
    assert shown.out == b"before\neverstep-launch: receipt\n"
    assert kept(tmp_path, rank_file(0)) == ["before", "Traceback", "everstep: late"]


def test_only_chosen_local_ranks_are_shown_and_all_are_kept(tmp_path: Path) -> None:
    def write(out: int, _: int) -> None:
        os.write(out, b"a line\n")

    with copying(tmp_path, shown=frozenset({1})) as (copier, shown):
        for serial, local_rank in ((1, 0), (2, 1)):
            play(copier, write, serial, local_rank)
            settle(copier)
    assert shown.out == b"a line\n"
    assert kept(tmp_path, rank_file(0)) == kept(tmp_path, rank_file(1)) == ["a line"]


def test_output_of_a_standby_goes_to_the_rank_it_becomes(tmp_path: Path) -> None:
    with copying(tmp_path) as (copier, _):
        out, err = copier.open(4, None)
        settle(copier)
        os.write(out, b"imported\n")
        copier.assign(4, 2)
        os.write(out, b"trains\n")
        os.close(out)
        os.close(err)
        play(copier, lambda out, err: print(os.write(out, b"in vain\n")), serial=5, local_rank=None)
    assert kept(tmp_path, rank_file(2)) == ["imported", "trains"]
    assert kept(tmp_path, LAUNCHER_FILE) == ["[worker 5] in vain"]


def test_rank_finds_a_terminal_where_the_launcher_has_one(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    tty.setraw(slave)
    termios.tcsetwinsize(slave, (30, 77))
    copier = OutputCopier(Screen(slave, slave), ManualClock(), labels={})
    out, err = copier.open(1, 0)
    assert os.isatty(out)
    assert os.isatty(err)
    assert termios.tcgetwinsize(out) == (30, 77)
    os.write(out, b"line\n\r 10%")
    os.close(out)
    os.close(err)
    copier.end()
    assert os.read(master, 100) == b"line\n\r 10%"  # no carriage return was added on the way
    os.close(master)
    os.close(slave)


def test_tee_labels_whole_lines_and_files_have_all(tmp_path: Path) -> None:
    with copying(tmp_path, is_one=False, log_dir=tmp_path / "logs", is_tee=True) as (copier, shown):
        play(copier, lambda out, err: print(os.write(out, b"one\ntwo"), os.write(err, b"three\n")))
    assert (shown.out, shown.err) == (b"[rank 3]: one\n[rank 3]: two\n", b"[rank 3]: three\n")
    assert (tmp_path / "logs" / "worker-1.out").read_bytes() == b"one\ntwo"


def test_tee_without_files_labels_lines_of_both_streams(tmp_path: Path) -> None:
    with copying(tmp_path, is_tee=True) as (copier, shown):
        play(copier, lambda out, err: print(os.write(out, b"one\ntw"), os.write(err, b"three\n"), os.write(out, b"o")))
    assert sorted(shown.out.splitlines()) == [b"[rank 3]: one", b"[rank 3]: three", b"[rank 3]: two"]
    assert sorted(kept(tmp_path, rank_file(0))) == ["one", "three", "two"]


def test_unwritable_log_directory_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with (
        pytest.raises(ConfigurationError, match=r"--log-dir: cannot write ranks' output to .*/logs/j"),
        copying(tmp_path, log_dir=tmp_path / "logs" / "j"),
    ):
        pass


def test_replacement_starts_though_its_log_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs = tmp_path / "logs"
    with copying(tmp_path, log_dir=logs, is_tee=True) as (copier, shown):
        logs.rmdir()
        play(copier, lambda out, err: print(os.write(out, b"one\n")))
        settle(copier)
        assert (logs / "worker-1.out").read_bytes() == b"one\n", "it is made again"
        shutil.rmtree(logs)
        logs.touch()
        play(copier, lambda out, err: print(os.write(out, b"two\n")), serial=2)
    assert b"one\n" in shown.out
    assert b"two\n" in shown.out
    assert "--log-dir: the output of a process is not kept: cannot write worker-2.out" in caplog.text


def test_lost_terminal_is_logged_once_and_ranks_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    (tmp_path / "kept").mkdir()
    with caplog.at_level(logging.WARNING):
        copier = OutputCopier(Screen(writing, writing), ManualClock(), folder=tmp_path / "kept", labels={})
        for serial in (1, 2):
            play(copier, lambda out, err: print(os.write(out, b"line\n")), serial=serial, local_rank=serial)
        copier.end()
    assert caplog.messages == ["output of ranks is no longer shown: [Errno 32] Broken pipe"]
    assert kept(tmp_path, rank_file(2)) == ["line"]


class Refusing(io.RawIOBase):
    """A file on a full disk."""

    name = "worker-1.out"
    error: int | None = errno.ENOSPC
    text = b""

    def write(self, data: Any) -> int:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        self.text += bytes(data)
        return len(bytes(data))


def test_full_disk_is_logged_once_and_later_writes_succeed(caplog: pytest.LogCaptureFixture) -> None:
    full = Refusing()
    raw = RawFile(full)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        raw.write(b"one\n")
        raw.write(b"two\n")
        full.error = None
        raw.write(b"three\n")
    assert full.text == b"three\n"
    assert caplog.messages == [
        "output of ranks is lost: worker-1.out cannot be written: [Errno 28] No space left on device"
    ]


def test_launcher_log_shows_little_and_keeps_all(tmp_path: Path) -> None:
    shown = Shown(tmp_path, True)
    handler = LauncherLog(is_verbose=False, screen=shown.screen)

    def log(level: int, text: str) -> None:
        handler.handle(logging.LogRecord("everstep_trainer.launch", level, "", 0, text, (), None))

    log(logging.DEBUG, "early detail")
    (tmp_path / "kept").mkdir()
    copier = OutputCopier(shown.screen, ManualClock(), folder=tmp_path / "kept", labels={})
    handler.attach(copier)
    log(logging.DEBUG, "detail")
    log(logging.INFO, "generation\x1b[2J 2")
    copier.end()
    handler.attach(None)
    handler.show("ended")
    assert shown.out.decode() == "everstep-launch: generation\ufffd[2J 2\neverstep-launch: ended\n"
    assert kept(tmp_path, LAUNCHER_FILE) == ["early detail", "detail", "generation\ufffd[2J 2"]

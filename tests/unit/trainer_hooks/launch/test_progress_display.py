"""The progress display of the launcher: its text, and a terminal line that leaves other output intact."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.clock import ManualClock
from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.operator import GenerationRecovery, JobDetail, JobSummary
from everstep.wire.v1.training import JobSpec
from everstep_trainer.launch import progress_display
from everstep_trainer.launch.progress_display import (
    ProgressText,
    StepRateMeter,
    TerminalLine,
    has_terminal,
    showing_progress,
)
from everstep_trainer.launch.services.private_services import PrivateServices

OWN_LINE = re.compile(
    rb"(?:\x1bD)?\x1b7\x1b\[1;(\d+)r\x1b8\x1b\[1A|\x1b7(?:\x1b\[r)?\x1b\[(\d+);1H\x1b\[2K[^\x1b]*.*?\x1b8"
)
"""Matches everything that the progress line writes."""


def recovery(duration_s: float | None, reason: GenerationReason = GenerationReason.RANK_LOST) -> GenerationRecovery:
    return GenerationRecovery(
        generation=2,
        reason=reason,
        sentence="",
        trace="t",
        decided_at=990.0,
        duration_s=duration_s,
        resumed_ranks=1,
        world_size=2,
    )


def job(step: int, *recoveries: GenerationRecovery, **more: Any) -> JobDetail:
    fields: dict[str, Any] = {"state": JobState.RUNNING, "world_size": 2, "nodes": 1, "until_step": 200}
    summary = JobSummary(job="j", step=step, **fields | more)
    return JobDetail(summary=summary, spec=JobSpec(job="j"), recoveries=recoveries)


def test_line_tells_step_rate_loss_size_and_eta() -> None:
    text = ProgressText()
    text.update(job(20, loss=2.5), 0.0, 1000.0)
    shown_text = text.update(job(60, recovery(0.25), loss=1.25), 20.0, 1000.0)
    assert shown_text == (
        "step 60/200 (30 %), 2 steps/s, loss 1.25, 2 ranks on 1 node, ETA 70 s, "
        "last recovery 250 ms, 10 s ago (rank lost)"
    )


def test_line_names_the_rank_that_others_wait_for() -> None:
    stall = "rank 0 works alone at train.py:16; rank 1 waits"
    shown_text = ProgressText().update(job(60, recovery(0.25), stall=stall, stall_since=990.0), 0.0, 1000.0)
    assert shown_text.endswith(f"for 10 s: {stall}")


def test_line_without_last_step_has_no_eta() -> None:
    shown_text = ProgressText().update(
        job(60, recovery(9.0, GenerationReason.FORMED), until_step=0, step_s=0.5), 0.0, 0.0
    )
    assert shown_text == "step 60, 2 steps/s, 2 ranks on 1 node"


def test_last_step_is_remembered_while_ranks_regroup() -> None:
    text = ProgressText()
    text.update(job(60), 0.0, 1000.0)
    shown_text = text.update(job(60, recovery(None), until_step=0), 2.0, 1000.0)
    assert shown_text == "recovering (1/2 ranks resumed), step 60/200 (30 %), 2 ranks on 1 node"


def test_line_tells_a_state_other_than_running() -> None:
    assert ProgressText().update(job(7, state=JobState.PAUSED), 0.0, 0.0).startswith("paused, step 7/200")
    assert ProgressText().update(job(0, state=JobState.FORMING), 0.0, 0.0).startswith("forming, ")


def test_repeated_steps_do_not_count_in_the_rate() -> None:
    rate = StepRateMeter(10.0)
    assert rate.update(0.0, 100) is None
    assert rate.update(5.0, 90) is None
    assert rate.update(10.0, 110) == 1.0
    assert rate.update(20.0, 150) == 4.0


END = b"<end>"


class Terminal:
    """A terminal of 24 rows and 40 columns, without output processing."""

    def __init__(self) -> None:
        self.reading, self.writing = pty.openpty()
        self.resize(24, 40)
        attributes = termios.tcgetattr(self.writing)
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(self.writing, termios.TCSANOW, attributes)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.writing, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def shown(self) -> bytes:
        os.write(self.writing, END)
        read = b""
        while not read.endswith(END):  # the kernel delivers the output piece by piece
            read += os.read(self.reading, 1 << 16)
        return read.removesuffix(END)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    terminal = Terminal()
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())  # the terminal controls no session
    try:
        yield terminal
    finally:
        os.close(terminal.reading)
        os.close(terminal.writing)


def test_line_leaves_other_output_unbroken(terminal: Terminal) -> None:
    line = TerminalLine(terminal.writing)
    for text in (b"a rank\n", b"writes half a line, ", b"and the rest\n"):
        os.write(terminal.writing, text)
        line.show("step 1")
    line.close()
    shown = terminal.shown()
    assert OWN_LINE.sub(b"", shown) == b"a rank\nwrites half a line, and the rest\n"
    assert shown.count(b"\x1b[1;23r") == 1
    assert shown.count(b"step 1") == 3
    assert shown.endswith(b"\x1b7\x1b[r\x1b[24;1H\x1b[2K\x1b8")


def test_line_is_cut_to_the_width_and_follows_a_resize(terminal: Terminal) -> None:
    line = TerminalLine(terminal.writing)
    line.show("x" * 100)
    assert terminal.shown().count(b"x") == 39
    terminal.resize(50, 80)
    line.show("x" * 100)
    shown = terminal.shown()
    assert shown.count(b"x") == 79
    assert b"\x1b[1;49r" in shown


def test_small_terminal_and_background_show_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    line = TerminalLine(terminal.writing)
    terminal.resize(3, 80)
    line.show("step 1")
    terminal.resize(24, 80)
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: -1)
    line.show("step 1")
    line.close()
    os.write(terminal.writing, b".")
    assert terminal.shown() == b"."


class Services(PrivateServices):
    """Services whose controller knows a job that finishes a step per request."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "j", ManualClock(), None)
        self.steps, self.enough = 0, asyncio.Event()

    @property
    def has_controller(self) -> bool:
        return True

    async def ask(self, _request: Any) -> Any:
        self.steps += 1
        if self.steps == 4:
            self.enough.set()
        return job(self.steps) if self.steps > 1 else None  # no launcher has joined yet


def show(directory: Path, interval_s: float | None, environ: dict[str, str]) -> None:
    async def play() -> None:
        services = Services(directory)
        async with showing_progress(services, "j", ManualClock(), interval_s, environ):
            if interval_s is not None:
                await services.enough.wait()

    asyncio.run(play())


def test_terminal_shows_the_newest_state(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress_display, "STDERR", terminal.writing)
    monkeypatch.setattr(progress_display, "REFRESH_S", 0.001)
    show(tmp_path, 60.0, {"TERM": "xterm"})
    shown = terminal.shown()
    assert b"step 2/200 (1 %), 2 ranks on 1 node" in shown
    assert OWN_LINE.sub(b"", shown) == b""
    assert shown.endswith(b"\x1b[24;1H\x1b[2K\x1b8")
    assert caplog.text == ""


def test_pipe_gets_log_lines_or_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    show(tmp_path, None, {})
    assert caplog.text == ""
    show(tmp_path, 0.001, {})
    assert "step 2/200 (1 %), 2 ranks on 1 node" in caplog.messages


def test_plain_output_and_dumb_terminals_have_no_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_terminal(terminal.writing, {"TERM": "xterm"})
    assert not has_terminal(terminal.writing, {"TERM": "xterm", "JPY_PARENT_PID": "1"})
    monkeypatch.undo()
    assert not has_terminal(terminal.writing, {"TERM": "xterm"}), "it is not the controlling terminal of this process"
    assert not has_terminal(terminal.writing, {"TERM": "dumb"})
    assert not has_terminal(terminal.writing, {})
    reading, writing = os.pipe()
    assert not has_terminal(writing, {"TERM": "xterm"})
    os.close(reading)
    os.close(writing)

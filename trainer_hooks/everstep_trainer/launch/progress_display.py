"""Show a run's progress while it trains: one live line on a terminal, else a log line now and then.

The controller knows the progress from heartbeats, so ranks do nothing for it. Ranks write to the same terminal
as the launcher. The live line therefore has the terminal's last row for itself, below the region that scrolls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

from everstep.client import Client
from everstep.clock import Clock
from everstep.receipts.text import format_count, format_rough, format_span
from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.operator import GenerationRecovery, JobDetail
from everstep_trainer.launch.output.log_handlers import launcher_log

log = logging.getLogger(__name__)

REFRESH_S = 2.0
"""Seconds between two updates of the live line."""
RATE_WINDOW_S = 30.0
"""Seconds over which steps per second are counted."""
MIN_ROWS = 4
"""Rows of a terminal that has room for a line of its own."""
STDERR = 2
NOTEBOOK_VARIABLE = "JPY_PARENT_PID"
"""Set in Jupyter's kernels, whose commands have a terminal that understands colours only."""


class ProgressText:
    """Describes a job's progress in one line, from its newest and its earlier states."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._rate = StepRateMeter(window_s)
        self._until_step = 0  # not known while ranks regroup

    def update(self, detail: JobDetail, monotonic: float, now: float) -> str:
        """Return the line. ``monotonic`` is for rates, ``now`` in wall seconds of the controller."""
        job, recovery = detail.summary, _last_recovery(detail)
        until = self._until_step = job.until_step or self._until_step
        rate = self._rate.update(monotonic, job.step)
        if rate is None and job.step_s:
            rate = 1 / job.step_s
        parts = [_state_text(detail)]
        if until:
            parts.append(f"step {job.step}/{until} ({100 * job.step // until} %)")
        elif job.step:
            parts.append(f"step {job.step}")
        if rate is not None:
            parts.append(f"{rate:.3g} steps/s")
        if job.loss is not None:
            parts.append(f"loss {job.loss:.5g}")
        parts.append(f"{format_count(job.world_size, 'rank')} on {format_count(job.nodes, 'node')}")
        if rate and until > job.step and job.state is JobState.RUNNING:
            parts.append(f"ETA {format_rough((until - job.step) / rate)}")
        if job.stall and job.stall_since is not None:
            parts.append(f"for {format_rough(max(0.0, now - job.stall_since))}: {job.stall}")
        elif recovery is not None and recovery.duration_s is not None:
            took, ago = format_span(recovery.duration_s), format_rough(max(0.0, now - recovery.decided_at))
            parts.append(f"last recovery {took}, {ago} ago ({recovery.reason.replace('_', ' ')})")
        return ", ".join(filter(None, parts))


class StepRateMeter:
    """Steps per second over the last seconds; a step that is computed again does not count."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, int]] = deque()

    def update(self, now: float, step: int) -> float | None:
        """Record the newest step; return the rate, or None while it is not known."""
        newest = max(step, self._points[-1][1]) if self._points else step
        self._points.append((now, newest))
        while len(self._points) > 2 and self._points[1][0] <= now - self._window_s:
            self._points.popleft()
        (since, first), (until, last) = self._points[0], self._points[-1]
        return (last - first) / (until - since) if until > since and last > first else None


def _last_recovery(detail: JobDetail) -> GenerationRecovery | None:
    newest = detail.recoveries[-1] if detail.recoveries else None
    return None if newest is None or newest.reason is GenerationReason.FORMED else newest


def _state_text(detail: JobDetail) -> str:
    """Return what the job does unless it trains."""
    if detail.summary.state is not JobState.RUNNING:
        return str(detail.summary.state)
    last = _last_recovery(detail)
    if last is None or last.duration_s is not None:
        return ""
    return f"recovering ({last.resumed_ranks}/{last.world_size} ranks resumed)"


class TerminalLine:
    """A line on the last row of a terminal. Other output scrolls above it and is not touched.

    Every change is one write, so that other output cannot come between its parts. ``write`` does that in turn with
    other output; the default writes at once.
    """

    def __init__(self, descriptor: int, write: Callable[[bytes], object] | None = None) -> None:
        self._descriptor = descriptor
        self._write = write or (lambda data: os.write(descriptor, data))
        self._rows = 0
        self._lock = threading.Lock()  # a thread may still show a line when it is closed
        self._is_closed = False

    def show(self, text: str) -> None:
        """Replace the line, unless the launcher is in the background or the terminal is too small."""
        with self._lock:
            if not self._is_closed and os.tcgetpgrp(self._descriptor) == os.getpgrp():
                self._show(text)

    def _show(self, text: str) -> None:
        columns, rows = os.get_terminal_size(self._descriptor)
        if rows < MIN_ROWS:
            return
        written = ""
        if rows != self._rows:
            # D moves the cursor off the last row, and keeps its column, where a progress bar of the script may stand.
            # Setting the region moves it home, hence 7 and 8, which save and restore its place.
            written = f"\x1bD\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A"
            self._rows = rows
        written += f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[2m{text[: max(0, columns - 1)]}\x1b[0m\x1b8"
        self._write(written.encode("utf-8", "replace"))

    def close(self) -> None:
        """Remove the line, and let the whole terminal scroll again."""
        with self._lock:
            self._is_closed = True
            self._clear()

    def _clear(self) -> None:
        if self._rows:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8".encode())
            self._rows = 0


def has_terminal(descriptor: int, environ: Mapping[str, str]) -> bool:
    """Return whether a descriptor is this process's terminal and can keep a line of its own; notebooks cannot."""
    if environ.get("TERM", "dumb") in ("", "dumb", "unknown") or NOTEBOOK_VARIABLE in environ:
        return False
    try:
        return os.isatty(descriptor) and os.tcgetpgrp(descriptor) >= 0
    except OSError:  # another session's terminal
        return False


class JobReader(Protocol):
    """Where to ask for the job. ``may_show``: whether this launcher shows the job at all."""

    @property
    def may_show(self) -> bool: ...
    @property
    def min_pause_s(self) -> float: ...
    async def ask(self, request: Callable[[Client], JobDetail]) -> JobDetail | None: ...


@contextlib.asynccontextmanager
async def showing_progress(
    reader: JobReader, job: str, clock: Clock, interval_s: float | None, environ: Mapping[str, str]
) -> AsyncIterator[None]:
    """Show the progress of a job inside the block, as far as the reader may ask for it.

    Args:
        reader: The run's own services, or the access to a fleet's controllers.
        job: Name of the job.
        clock: For rates and times.
        interval_s: Seconds between log lines where there is no terminal; None shows nothing at all.
        environ: For ``TERM``.
    """
    if interval_s is None or not reader.may_show:
        yield
        return
    log_handler = launcher_log()
    copier = log_handler.copier if log_handler is not None else None
    write = copier.draw if copier is not None else None
    line = TerminalLine(STDERR, write) if has_terminal(STDERR, environ) else None
    task = asyncio.create_task(_show(reader, job, clock, interval_s, line), name="progress")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if line is not None:
            with contextlib.suppress(OSError):  # the terminal is gone
                line.close()


async def _show(reader: JobReader, job: str, clock: Clock, interval_s: float, line: TerminalLine | None) -> None:
    text = ProgressText(max(RATE_WINDOW_S, interval_s))
    while True:
        await asyncio.sleep(max(interval_s if line is None else REFRESH_S, reader.min_pause_s))
        detail = await reader.ask(lambda client: client.job(job))
        if detail is None:
            continue
        words = text.update(detail, clock.monotonic(), clock.wall())
        if line is None:
            log.info("%s", words)
            continue
        try:
            await asyncio.to_thread(line.show, words)  # a terminal that is stopped (Ctrl-S) blocks its writers
        except OSError:
            return

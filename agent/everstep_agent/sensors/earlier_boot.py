"""The records of the boot before this one, read once and beside the poll."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everstep.clock import Clock
from everstep_agent.drivers.boot_records import ARCHIVE, journal_lines, panic_record
from everstep_agent.drivers.commands import Start, in_thread
from everstep_agent.drivers.samples import EARLIER_BOOT_S, EarlierBoot

MAX_RECORD_AGE_S = 7 * 86_400.0
"""Seconds before the boot from which on a record counts: without systemd-pstore, firmware keeps records for years."""


@dataclass
class EarlierBootSensor:
    """Read the records of a machine that booted not long ago."""

    _sysfs: Path
    _clock: Clock
    _archive: Path = ARCHIVE
    _read_journal: Callable[[], tuple[str, ...]] = journal_lines
    _start: Start = in_thread
    _max_age_s: float = MAX_RECORD_AGE_S
    _has_started: bool = False
    _found: EarlierBoot | None = None

    def poll(self, uptime_s: float | None) -> EarlierBoot | None:
        """Return the records at one poll, and None at all others."""
        if not self._has_started and uptime_s is not None:
            self._has_started = True
            if uptime_s < EARLIER_BOOT_S:
                since = self._clock.wall() - uptime_s - self._max_age_s
                self._start(lambda: self._read(since))
        found, self._found = self._found, None
        return found

    def _read(self, since: float) -> None:
        panicked_at, lines = panic_record(self._sysfs, self._archive, since)
        self._found = EarlierBoot(panicked_at=panicked_at, panic_lines=lines, log_lines=self._read_journal())

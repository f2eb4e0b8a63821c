"""Samples of the systemd units that a site watches. systemctl runs beside the poll."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from everstep_agent.drivers.commands import Start, in_thread
from everstep_agent.drivers.samples import UnitSample
from everstep_agent.drivers.systemd import parse_units, show_units

UNITS_EVERY = 30
"""Polls between two runs of systemctl, which takes some ten milliseconds of a core."""


@dataclass
class SystemdUnitSensor:
    """Ask systemctl now and then, never twice at once, and remember which units have been active."""

    _units: tuple[str, ...]
    _show: Callable[[Sequence[str]], str] = show_units
    _start: Start = in_thread
    _polls: int = 0
    _is_asking: bool = False
    _samples: tuple[UnitSample, ...] = ()
    _active: set[str] = field(default_factory=set)

    def poll(self) -> tuple[UnitSample, ...]:
        """Return the newest samples; none without units to watch or without systemd."""
        if self._units and self._polls % UNITS_EVERY == 0 and not self._is_asking:
            self._is_asking = True
            self._start(self._ask)
        self._polls += 1
        return self._samples

    def _ask(self) -> None:
        try:
            samples = parse_units(self._units, self._show(self._units).strip())
            self._active |= {unit.name for unit in samples if unit.active_state == "active"}
            self._samples = tuple(
                msgspec.structs.replace(unit, was_active=unit.name in self._active) for unit in samples
            )
        finally:
            self._is_asking = False

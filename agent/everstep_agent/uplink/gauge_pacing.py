"""Decide which heartbeats carry GPU gauges: seldom, at random moments, and only if there is something new to see."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from everstep.wire.v1.agent import GAUGE_INTERVAL_S, GpuGauges

REFRESH_INTERVAL_S = 60.0
"""Seconds after which unchanged gauges are sent again, so that people see that they are current."""

DEAD_BANDS: dict[str, float] = {
    "temperature_c": 2.0,
    "memory_temperature_c": 2.0,
    "power_w": 20.0,
    "utilization": 0.05,
    "memory_used_bytes": float(1 << 30),
    "sm_clock_mhz": 50.0,
    "memory_clock_mhz": 50.0,
}
"""Changes up to these are noise. Any change of the other fields counts."""

_ANY_CHANGE = tuple(name for name in GpuGauges.__struct_fields__ if name not in DEAD_BANDS)


class GaugePacer(msgspec.Struct):
    """Picks the gauges to send with a heartbeat. ``uniform`` arguments draw from [0, 1)."""

    _sent: tuple[GpuGauges, ...] = ()
    _refresh_at: float = 0.0
    _not_before: float | None = None  # None: the first moment after a connection is not drawn yet

    def handle_new_controller(self) -> None:
        """Send all gauges again, at a random moment: a whole fleet may come to the new controller at once."""
        self._sent, self._not_before = (), None

    def take_due(
        self, read: Callable[[], tuple[GpuGauges, ...]], now: float, uniform: Callable[[], float]
    ) -> tuple[GpuGauges, ...]:
        """Return the gauges to send with a heartbeat now (monotonic seconds), or none; they count as sent."""
        if self._not_before is not None and now < self._not_before:
            return ()
        gauges = read()
        if not gauges:
            return ()
        if self._not_before is None:
            self._not_before = now + GAUGE_INTERVAL_S * uniform()
            return ()
        if now < self._refresh_at and not differ(self._sent, gauges):
            return ()
        self._sent, self._refresh_at = gauges, now + REFRESH_INTERVAL_S
        self._not_before = now + GAUGE_INTERVAL_S * (1.0 + uniform())
        return gauges


def differ(before: tuple[GpuGauges, ...], after: tuple[GpuGauges, ...]) -> bool:
    """Return whether a person would want to see the newer gauges."""
    return len(before) != len(after) or any(map(_differ, before, after))


def _differ(before: GpuGauges, after: GpuGauges) -> bool:
    if any(getattr(before, name) != getattr(after, name) for name in _ANY_CHANGE):
        return True
    for name, band in DEAD_BANDS.items():
        old, new = getattr(before, name), getattr(after, name)
        if (old is None) is not (new is None) or (old is not None and abs(new - old) > band):
            return True
    return False

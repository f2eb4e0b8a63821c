"""Check the machine's clock: at start against the database, and later against the controller's own time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from sqlalchemy.exc import SQLAlchemyError

from everstep.errors import ConfigurationError, Unavailable
from everstep_controller.runtime.clock import MAX_SLEWED_S, SLEW_INTERVAL_S, SteadyTime

log = logging.getLogger(__name__)

RECORD_INTERVAL_S = 60.0
"""Seconds between writes of the time to the database. The next start compares its clock with the last one."""
SLEWED_S = 60.0
"""``SteadyTime.slew`` corrects a difference up to this, in seconds."""
DIVERGED_S = 1.0
"""Difference in seconds between the controller's time and the wall clock from which the log reports it."""


def check_clock_at_start(wall: float, newest_at: float, most_days: float) -> None:
    """Raise ConfigurationError if the wall clock is implausibly far ahead of the database.

    A start with a clock that is months ahead would date new events months ahead, expire credentials early, and let
    retention delete the history.

    Args:
        wall: current wall time.
        newest_at: newest time in the database; 0.0 if there is none.
        most_days: allowed difference in days; 0 for any.
    """
    ahead_days = (wall - newest_at) / 86400
    if not newest_at or not most_days or ahead_days <= most_days:
        return
    raise ConfigurationError(
        f"this machine's clock says {_utc(wall)}, which is {ahead_days:.0f} days after the newest time in the "
        f"database, {_utc(newest_at)}. If the clock is wrong, set it (`timedatectl`) and start again. If no controller "
        "has run since then and the clock is right, start once with --trust-clock"
    )


def clock_set_back_s(wall: float, newest_at: float, *, trust_clock: bool) -> float:
    """Return the seconds by which a starting controller sets its time and later stored times back.

    Return 0.0 unless an operator trusts the clock and the difference is too large to slew.
    """
    behind_s = newest_at - wall
    return behind_s if trust_clock and behind_s > SLEWED_S else 0.0


class ClockMonitor:
    """Slews the controller's time to the wall clock, and logs once when they diverge and once when they agree.

    Args:
        note: writes the controller's time into the database.
    """

    def __init__(self, steady: SteadyTime, note: Callable[[float], Awaitable[None]]) -> None:
        self._steady = steady
        self._note = note
        self._noted_at = -RECORD_INTERVAL_S
        self._has_warned: Callable[[float], str] | None = None

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(SLEW_INTERVAL_S)

    async def check(self) -> None:
        """Compare once, and write the time to the database if due."""
        self._steady.slew()
        self._warn_if_changed(self._steady.ahead_s())
        now = self._steady.now()
        if now - self._noted_at < RECORD_INTERVAL_S:
            return
        self._noted_at = now
        try:
            await self._note(now)
        except (Unavailable, SQLAlchemyError) as error:
            log.warning(
                "the time was not noted in the database, to be tried again in %.0f s: %s", RECORD_INTERVAL_S, error
            )

    def _warn_if_changed(self, ahead_s: float) -> None:
        words = _warning_for(ahead_s)
        if words is self._has_warned:
            return
        self._has_warned = words
        if words is None:
            log.info("the controller's time and the machine's clock agree again")
        else:
            log.warning(words(ahead_s))


def _warning_for(ahead_s: float) -> Callable[[float], str] | None:
    if ahead_s < -MAX_SLEWED_S:
        return _clock_leapt
    if ahead_s > MAX_SLEWED_S:
        return _far_ahead
    if abs(ahead_s) > DIVERGED_S:
        return _apart
    return None


def _clock_leapt(ahead_s: float) -> str:
    return (
        f"the machine's clock is {_span(-ahead_s)} ahead of the controller's time, which does not follow it so far. "
        "If the clock is wrong, set it; if it is right, restart the controller"
    )


def _far_ahead(ahead_s: float) -> str:
    return (
        f"the controller's time is {_span(ahead_s)} ahead of the machine's clock: the clock was ahead at an earlier "
        "start, or is wrong now. If it is right, restart the controller once with --trust-clock; until then new events "
        "carry times that are too late"
    )


def _apart(ahead_s: float) -> str:
    where = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"the controller's time is {_span(abs(ahead_s))} {where} the machine's clock, and comes back to it at a tenth "
        "of a second per second"
    )


def _span(seconds: float) -> str:
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s"


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")

"""Keep the time that decisions use: close to the wall clock, without its jumps, and never running backwards."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from sqlalchemy.exc import SQLAlchemyError

from everstep.clock import Clock
from everstep.errors import ConfigurationError, Unavailable

log = logging.getLogger(__name__)

SLEW_INTERVAL_S = 10.0
"""Seconds between two calls of ``slew``."""
SLEW = 0.1
"""Largest share by which this time runs faster or slower than monotonic time. Deadlines may be off by as much, which is
less than their margins. An error of one minute is corrected in ten minutes."""
MAX_SLEWED_S = 3600.0
"""A wall clock farther ahead than this is not followed, because it is probably wrong. A restart of the controller
resolves the difference (see ``check_clock_at_start``)."""


class SteadyTime:
    """Time that starts at the wall clock, advances with monotonic time, and slowly converges to the wall clock.

    Deadlines and timestamps share this time. A jump of the wall clock triggers no deadline early, and delays none by
    more than ``SLEW``. ``slew`` changes the speed, never the value, so this time does not run backwards. It starts at
    ``not_before``, the newest time in the database, if the wall clock is behind.
    """

    def __init__(self, clock: Clock, not_before: float = 0.0) -> None:
        self._clock = clock
        self._rate = 1.0
        self._anchor = clock.monotonic()
        self._value = max(clock.wall(), not_before)

    def now(self) -> float:
        """Return seconds since the Unix epoch."""
        return self._value + (self._clock.monotonic() - self._anchor) * self._rate

    def seconds_until(self, due: float) -> float:
        """Return monotonic seconds until ``now`` reaches ``due``; 0.0 if that has passed."""
        return max(0.0, due - self.now()) / self._rate

    def ahead_s(self) -> float:
        """Return seconds by which this time is ahead of the wall clock; negative if it is behind."""
        return self.now() - self._clock.wall()

    def slew(self) -> None:
        """Set the speed for the next ``SLEW_INTERVAL_S`` so that this time approaches the wall clock."""
        monotonic = self._clock.monotonic()
        self._value += (monotonic - self._anchor) * self._rate
        self._anchor = monotonic
        ahead_s = self._value - self._clock.wall()
        slower = ahead_s / SLEW_INTERVAL_S if ahead_s > -MAX_SLEWED_S else 0.0
        self._rate = 1.0 - max(-SLEW, min(SLEW, slower))


# ---- event loop lag
# A controller whose own event loop lags must not declare nodes late.

INTERVAL_S = 0.25
WINDOW_SAMPLES = 4


class LagMeter:
    """Samples the event loop's lateness four times per second, over the last second."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW_SAMPLES)
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        """Begin sampling on the running loop."""
        loop = asyncio.get_running_loop()
        self._due = loop.time() + INTERVAL_S
        self._timer = loop.call_at(self._due, self._sample)

    def stop(self) -> None:
        """End sampling."""
        if self._timer is not None:
            self._timer.cancel()

    def _sample(self) -> None:
        self._samples.append(max(0.0, asyncio.get_running_loop().time() - self._due))
        self.start()

    def recent_s(self) -> float:
        """Return the worst lateness of the last second in seconds, including a sample that is overdue now."""
        overdue = max(0.0, asyncio.get_running_loop().time() - self._due) if self._timer is not None else 0.0
        return max((*self._samples, overdue))


# ---- checks of the machine's clock

RECORD_INTERVAL_S = 60.0
"""Seconds between writes of the time to the database. The next start compares its clock with the last one."""
SLEWED_S = 60.0
"""``SteadyTime.slew`` corrects a difference up to this, in seconds."""
DIVERGED_S = 1.0
"""Difference in seconds between the controller's time and the wall clock from which the log reports it."""


def check_clock_at_start(wall: float, newest_at: float, most_days: float) -> None:
    """Raise ConfigurationError if the wall clock is more than ``most_days`` (0: any) ahead of the database.

    A start with a clock that is months ahead would date new events months ahead, expire credentials early, and let
    retention delete the history.
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
    """Return the seconds by which a start sets its time and later stored times back; 0.0 unless too large to slew."""
    behind_s = newest_at - wall
    return behind_s if trust_clock and behind_s > SLEWED_S else 0.0


class ClockMonitor:
    """Slews the controller's time to the wall clock, logs when they diverge or agree again, and notes the time."""

    def __init__(self, steady: SteadyTime, note: Callable[[float], Awaitable[None]]) -> None:
        self._steady = steady
        self._note = note
        self._noted_at = -RECORD_INTERVAL_S
        self._warned_of = ""

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(SLEW_INTERVAL_S)

    async def check(self) -> None:
        """Compare once, and write the time to the database if due."""
        self._steady.slew()
        kind, sentence = _warning(self._steady.ahead_s())
        if kind != self._warned_of:
            self._warned_of = kind
            if kind:
                log.warning(sentence)
            else:
                log.info("the controller's time and the machine's clock agree again")
        now = self._steady.now()
        if now - self._noted_at < RECORD_INTERVAL_S:
            return
        self._noted_at = now
        try:
            await self._note(now)
        except (Unavailable, SQLAlchemyError) as error:
            log.warning(
                "the time could not be written to the database, retrying in %.0f s: %s", RECORD_INTERVAL_S, error
            )


def _warning(ahead_s: float) -> tuple[str, str]:
    """Return a warning's kind, which is logged once while it lasts (empty for none), and its sentence."""
    difference = _span(abs(ahead_s))
    if ahead_s < -MAX_SLEWED_S:
        return "far_behind", (
            f"the machine's clock is {difference} ahead of the controller's time, which does not follow so large a "
            "difference. If the clock is wrong, set it; if it is right, restart the controller"
        )
    if ahead_s > MAX_SLEWED_S:
        return "far_ahead", (
            f"the controller's time is {difference} ahead of the machine's clock: the clock was ahead at an earlier "
            "start, or is wrong now. If it is right, restart the controller once with --trust-clock; until then new "
            "events carry times that are too late"
        )
    if abs(ahead_s) > DIVERGED_S:
        where = "ahead of" if ahead_s > 0 else "behind"
        return "diverged", (
            f"the controller's time is {difference} {where} the machine's clock, and converges by a tenth of a second "
            "per second"
        )
    return "", ""


def _span(seconds: float) -> str:
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s"


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")

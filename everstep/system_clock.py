"""Read the machine's clock; the only module that does."""

from __future__ import annotations

import time


class SystemClock:
    """The machine's clock. Satisfies ``everstep.clock.Clock``."""

    def wall(self) -> float:
        return time.time()  # noqa: TID251 - the one place

    def monotonic(self) -> float:
        return time.monotonic()  # noqa: TID251 - the one place


SYSTEM_CLOCK = SystemClock()

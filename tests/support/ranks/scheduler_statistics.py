"""A file like the kernel's, of how long a thread has waited for a core."""

from __future__ import annotations

from pathlib import Path

from everstep.clock import ManualClock


class SchedulerStatistics:
    """Of one thread; ``clock`` is advanced by hand."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.path = ManualClock(), folder / "schedstat"
        self._waited_ns = 0
        self.pass_time(0.0, 0.0)

    def pass_time(self, seconds: float, share: float) -> None:
        """Let time pass, of which the thread waits a share for a core."""
        self.clock.advance(seconds)
        self._waited_ns += int(1e9 * seconds * share)
        self.path.write_text(f"1000000 {self._waited_ns} 17\n")

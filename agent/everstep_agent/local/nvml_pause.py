"""Keep NVML closed for a bounded time, by a file that the sensor process looks for.

A person's file keeps NVML closed until the person removes it. A file of the agent's names its end, which outlives a
restart of the agent, so that a script that was killed cannot blind the node.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from everstep.clock import Clock
from everstep.host.private_files import write_private

log = logging.getLogger(__name__)

_END = b"until="
MAX_FILE_BYTES = 64


class NvmlPause:
    """The file at ``path``. NVML stays closed while it exists."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock

    def begin(self, seconds: float) -> float:
        """Have NVML closed for some seconds from now, and return when that ends (wall seconds). Raises OSError."""
        until = self._clock.wall() + seconds
        write_private(self._path, _END + str(until).encode())
        return until

    def order(self, seconds: float) -> None:
        """Carry out an order of the controller: begin, or end for 0 seconds. Logs a failure."""
        try:
            if seconds:
                self.begin(seconds)
            else:
                self.end()
        except OSError as error:
            log.error("%s cannot be changed, so NVML stays as it is: %s", self._path, error)
        else:
            log.info("NVML is %s by the controller's order", f"closed for {seconds:g} s" if seconds else "opened again")

    def end(self) -> None:
        """Let NVML be opened again."""
        self._path.unlink(missing_ok=True)

    def expire(self) -> None:
        """Remove the file if its time is over. A file without an end is a person's and stays."""
        with suppress(OSError, ValueError):
            with self._path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES)
            if content.startswith(_END) and self._clock.wall() >= float(content.removeprefix(_END)):
                self.end()
                log.warning("GPUs are watched again, because the time of %s is over", self._path)

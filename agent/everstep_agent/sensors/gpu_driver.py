"""Interface between the sensor process and a vendor's GPUs. NVML is its first user: ``GpuWatch`` in ``gpu_watch.py``.

A second vendor needs a class with these six members. Samples name nothing of a vendor's library; what a GPU does not
offer is None there. ``XidEvent.xid`` is an error's number in the vendor's own catalogue.
"""

from __future__ import annotations

from typing import Protocol

from everstep.wire.v1.agent import Gpu
from everstep_agent.drivers.gpu_samples import GpuSample, XidEvent
from everstep_agent.drivers.samples import NvmlState


class GpuDriver(Protocol):
    """A vendor's GPUs. No member blocks for long, whatever a GPU does."""

    def poll(self) -> tuple[GpuSample, ...]:
        """Return the newest sample of every GPU; opens the library if it is closed."""

    def events(self, timeout_s: float) -> list[XidEvent] | None:
        """Wait for errors that should not wait for a poll. Returns None, without waiting, if none can be waited for."""

    def close(self) -> tuple[GpuSample, ...]:
        """Close the library, so that a GPU can be reset or the driver be replaced. Returns samples without values."""

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """Every GPU seen so far."""

    @property
    def state(self) -> NvmlState:
        """The state of the library as a whole, apart from orders to let it go."""

    @property
    def version(self) -> str:
        """The driver's version, or nothing if it is unknown."""

"""What the sensor process and its supervisor say to one another: one ``Begin``, then one ``Poll`` after another."""

from __future__ import annotations

from agent.sensors.samples import (
    GpuIdentity,
    GpuSample,
    HostIdentity,
    HostSample,
    PathSample,
    PortSample,
    Sample,
    XidEvent,
)
from agent.virtual.scenario import Scenario

MAX_POLL_BYTES = 4 << 20
DOING_BYTES = 96
"""Size of the page on which the child writes what it is about to touch, for whoever has to explain its silence."""


class Begin(Sample, frozen=True, kw_only=True):
    """To the child: how to sense. ``scenario``: the virtual machine to be, or None for the real one.

    ``resumed``: an earlier child of this supervisor has sensed before.
    """

    interval_s: float
    slow_every: int
    sysfs_root: str
    proc_root: str
    disk_paths: tuple[str, ...]
    scenario: Scenario | None
    control: str
    resumed: bool = False


class Poll(Sample, frozen=True, kw_only=True):
    """From the child. ``full`` is False for what could not wait for the next poll: events and lines only.

    ``known``: every GPU seen since this child began. ``pci_gpus``: NVIDIA display controllers on the PCI bus.
    ``faults``: (sensor, why) for what failed as a whole; ``nvml_error`` why no GPU could be asked.
    """

    full: bool
    boot_id: str = ""
    driver_version: str = ""
    known: tuple[GpuIdentity, ...] = ()
    gpus: tuple[GpuSample, ...] = ()
    ports: tuple[PortSample, ...] = ()
    paths: tuple[PathSample, ...] = ()
    host: HostSample = HostSample()
    host_id: HostIdentity = HostIdentity()
    xids: tuple[XidEvent, ...] = ()
    lines: tuple[str, ...] = ()
    pci_gpus: int | None = None
    nvml_error: str = ""
    faults: tuple[tuple[str, str], ...] = ()
    poll_s: float = 0.0

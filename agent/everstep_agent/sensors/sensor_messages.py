"""What the sensors know, as one value: handed to the supervisor whenever something is news, and at every poll."""

from __future__ import annotations

import msgspec

from everstep.vocabulary import Finding
from everstep.wire.v1.agent import MAX_HARDWARE_TEXT, UNKNOWN_HOST, Gpu, Host
from everstep_agent.sensors.samples import (
    GpuIdentity,
    GpuSample,
    HostIdentity,
    HostSample,
    PathSample,
    PortSample,
    Sample,
    XidEvent,
)
from everstep_agent.virtual.scenario import Scenario

__all__ = ["GpuSample", "HostSample", "PathSample", "PortSample", "SensorReport", "to_wire_gpu", "to_wire_host"]


# ---- frames
# What the sensor process and its supervisor say to one another: one ``Begin``, then one ``Poll`` after another.

MAX_POLL_BYTES = 4 << 20
ACTIVITY_BYTES = 96
"""Size of the page on which the child writes what it is about to touch, for whoever has to explain its silence."""


class SensorConfig(Sample, frozen=True, kw_only=True):
    """To the child: how to sense. ``scenario``: the virtual machine to be, or None for the real one.

    ``resumed``: an earlier child of this supervisor has sensed before.
    """

    interval_s: float
    slow_every: int
    sysfs_root: str
    proc_root: str
    disk_paths: tuple[str, ...]
    scenario: Scenario | None
    control_file: str
    is_resumed: bool = False


class PollResult(Sample, frozen=True, kw_only=True):
    """From the child. ``full`` is False for what could not wait for the next poll: events and lines only.

    ``known``: every GPU seen since this child began. ``pci_gpus``: NVIDIA display controllers on the PCI bus.
    ``faults``: (sensor, why) for what failed as a whole; ``nvml_error`` why no GPU could be asked.
    """

    is_full: bool
    boot_id: str = ""
    driver_version: str = ""
    known_gpus: tuple[GpuIdentity, ...] = ()
    gpus: tuple[GpuSample, ...] = ()
    ports: tuple[PortSample, ...] = ()
    paths: tuple[PathSample, ...] = ()
    host: HostSample = HostSample()
    host_identity: HostIdentity = HostIdentity()
    xids: tuple[XidEvent, ...] = ()
    kernel_lines: tuple[str, ...] = ()
    pci_gpu_count: int | None = None
    nvml_error: str = ""
    sensor_errors: tuple[tuple[str, str], ...] = ()
    poll_s: float = 0.0


class SensorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of the node at ``at`` (wall seconds).

    ``findings`` is complete: a key that is no longer in it has cleared. A finding stays equal from picture to
    picture until something about it that matters changes, so that comparing tuples tells whether there is news.
    A lost GPU stays in ``gpus`` with ``lost`` set; its series must not vanish. ``poll_s`` is what the newest poll of
    the sensor process took, ``polled_at`` when it came (0: not yet). ``restarts`` counts that process's ends.
    """

    at: float
    boot_id: str = ""
    driver_version: str = ""
    gpu_identities: tuple[Gpu, ...] = ()
    host_identity: Host = UNKNOWN_HOST
    gpus: tuple[GpuSample, ...] = ()
    ports: tuple[PortSample, ...] = ()
    paths: tuple[PathSample, ...] = ()
    host: HostSample = HostSample()
    findings: tuple[Finding, ...] = ()
    xid_counts: dict[tuple[str, int], int] = {}
    poll_s: float = 0.0
    polled_at: float = 0.0
    sensor_restarts: int = 0


def to_wire_gpu(identity: GpuIdentity) -> Gpu:
    """The identity as the contract says it."""
    return Gpu(
        index=identity.index,
        uuid=identity.uuid,
        name=identity.name,
        pci_bus_id=identity.pci_bus_id,
        memory_bytes=identity.memory_bytes,
        serial=identity.serial,
        part_number=identity.part_number[:MAX_HARDWARE_TEXT],
        vbios=identity.vbios[:MAX_HARDWARE_TEXT],
        inforom=identity.inforom[:MAX_HARDWARE_TEXT],
    )


def to_wire_host(identity: HostIdentity) -> Host:
    """The same of the machine."""
    words = {name: getattr(identity, name)[:MAX_HARDWARE_TEXT] for name in identity.__struct_fields__}
    return Host(**words)

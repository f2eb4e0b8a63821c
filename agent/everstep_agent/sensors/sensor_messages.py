"""What the sensors know, as one value: handed to the supervisor whenever something is news, and at every poll."""

from __future__ import annotations

import msgspec

from everstep.vocabulary import Finding
from everstep.wire.v1.agent import MOST_WORD, NO_HOST, Gpu, Host
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

__all__ = ["GpuSample", "HostSample", "PathSample", "Picture", "PortSample", "wire_gpu", "wire_host"]


# ---- frames
# What the sensor process and its supervisor say to one another: one ``Begin``, then one ``Poll`` after another.

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


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of the node at ``at`` (wall seconds).

    ``findings`` is complete: a key that is no longer in it has cleared. A finding stays equal from picture to
    picture until something about it that matters changes, so that comparing tuples tells whether there is news.
    A lost GPU stays in ``gpus`` with ``lost`` set; its series must not vanish. ``poll_s`` is what the newest poll of
    the sensor process took, ``polled_at`` when it came (0: not yet). ``restarts`` counts that process's ends.
    """

    at: float
    boot_id: str = ""
    driver_version: str = ""
    gpu_ids: tuple[Gpu, ...] = ()
    host_id: Host = NO_HOST
    gpus: tuple[GpuSample, ...] = ()
    ports: tuple[PortSample, ...] = ()
    paths: tuple[PathSample, ...] = ()
    host: HostSample = HostSample()
    findings: tuple[Finding, ...] = ()
    xid_counts: dict[tuple[str, int], int] = {}
    poll_s: float = 0.0
    polled_at: float = 0.0
    restarts: int = 0


def wire_gpu(identity: GpuIdentity) -> Gpu:
    """The identity as the contract says it."""
    return Gpu(
        index=identity.index,
        uuid=identity.uuid,
        name=identity.name,
        pci_bus_id=identity.pci_bus_id,
        memory_bytes=identity.memory_bytes,
        serial=identity.serial,
        part_number=identity.part_number[:MOST_WORD],
        vbios=identity.vbios[:MOST_WORD],
        inforom=identity.inforom[:MOST_WORD],
    )


def wire_host(identity: HostIdentity) -> Host:
    """The same of the machine."""
    words = {name: getattr(identity, name)[:MOST_WORD] for name in identity.__struct_fields__}
    return Host(**words)

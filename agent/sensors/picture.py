"""What the sensors know, as one value: handed to the supervisor whenever something is news, and at every poll."""

from __future__ import annotations

import msgspec

from agent.sensors.samples import GpuIdentity, GpuSample, HostIdentity, HostSample, PathSample, PortSample
from everstep.vocabulary import Finding
from everstep.wire.v1.agent import MOST_WORD, NO_HOST, Gpu, Host

__all__ = ["GpuSample", "HostSample", "PathSample", "Picture", "PortSample", "wire_gpu", "wire_host"]


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

"""Network ports. Never raises: a port that vanishes is reported as down."""

from __future__ import annotations

from pathlib import Path

from agent.drivers import sysfs
from agent.sensors.samples import PortSample


class NetworkSensor:
    """InfiniBand and Ethernet ports under ``root``; remembers which were ever up."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._was_up: dict[str, str] = {}

    def poll(self) -> tuple[PortSample, ...]:
        readings = [*sysfs.infiniband_ports(self._root), *sysfs.ethernet_ports(self._root)]
        self._was_up |= {reading.name: reading.kind for reading in readings if reading.up}
        samples = [
            PortSample(
                name=reading.name,
                kind=reading.kind,
                up=reading.up,
                was_up=reading.name in self._was_up,
                rate_gbps=reading.rate_gbps,
                errors=reading.errors,
                link_downs=reading.link_downs,
            )
            for reading in readings
        ]
        gone = self._was_up.keys() - {reading.name for reading in readings}
        samples += [PortSample(name=n, kind=self._was_up[n], up=False, was_up=True) for n in sorted(gone)]
        return tuple(samples)

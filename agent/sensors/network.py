"""Network ports. Never raises: a port that vanishes is reported as down."""

from __future__ import annotations

from pathlib import Path

from agent.drivers import sysfs
from agent.sensors.samples import PortSample

COUNTERS_EVERY = 10
"""Polls between readings of all counters; whether a link is up is read at every poll."""


class NetworkSensor:
    """InfiniBand and Ethernet ports under ``root``; remembers which were ever up."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._polls = 0
        self._readings: list[sysfs.PortReading] = []
        self._was_up: dict[str, sysfs.PortReading] = {}

    def poll(self) -> tuple[PortSample, ...]:
        readings = self._readings = self._read()
        self._was_up |= {reading.name: reading for reading in readings if reading.up}
        samples = [
            PortSample(
                name=reading.name,
                kind=reading.kind,
                up=reading.up,
                was_up=reading.name in self._was_up,
                rate_gbps=reading.rate_gbps,
                errors=reading.errors,
                link_downs=reading.link_downs,
                identity=reading.identity,
            )
            for reading in readings
        ]
        gone = self._was_up.keys() - {reading.name for reading in readings}
        for last in (self._was_up[name] for name in sorted(gone)):
            samples.append(PortSample(name=last.name, kind=last.kind, up=False, was_up=True, identity=last.identity))
        return tuple(samples)

    def _read(self) -> list[sysfs.PortReading]:
        self._polls += 1
        if self._polls % COUNTERS_EVERY != 1:
            return [now for port in self._readings if (now := sysfs.port_now(port)) is not None]
        return [*sysfs.infiniband_ports(self._root), *sysfs.ethernet_ports(self._root)]

"""Samples of network ports, with what their past tells. Nothing here raises."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from everstep_agent.drivers import ports
from everstep_agent.drivers.samples import (
    FABRIC_ROLES,
    EfaGrowth,
    EthernetGrowth,
    InfinibandGrowth,
    PortCounterGrowth,
    PortPresence,
    PortRole,
    PortSample,
    RdmaGrowth,
    SamplePart,
)

P = TypeVar("P", bound=SamplePart)

COUNTERS_EVERY = 10
"""Polls between readings of all ports and counters; a link's state is read at every poll."""

MIN_PEERS = 3
"""Ports of one kind that tell which rate is usual: of two, either may be the slow one."""

ABSENT_POLLS = 120
"""Polls for which a port that left is remembered: longer than its findings take to clear."""


SETTLED_POLLS = 60
"""Polls after a link came up from which its errors count: before, it is trained, and a person may hold its cable."""


@dataclass
class _Counters:
    """Growth of a port's counters while its link is settled, by name."""

    latest: dict[str, int] = field(default_factory=dict)
    growth: dict[str, int] = field(default_factory=dict)
    judged: PortCounterGrowth = field(default_factory=PortCounterGrowth)
    _before_drop: dict[str, int] = field(default_factory=dict)

    def add(self, counters: dict[str, int], is_settled: bool) -> None:
        """Add what the device shows. A counter that falls was reset, so that its growth starts again at 0.

        If it returns to where it was by the next reading, a reading had failed, and nothing has grown.
        """
        for name, count in counters.items():
            before = self.latest.get(name, count)
            if count < before:
                self._before_drop[name], self.growth[name] = before, 0
                continue
            highest = self._before_drop.pop(name, before)
            grown = count - (highest if count >= highest else before)
            self.growth[name] = self.growth.get(name, 0) + grown * is_settled
        self.latest = counters
        self.judged = PortCounterGrowth(
            infiniband=self._judged_part(InfinibandGrowth),
            rdma=self._judged_part(RdmaGrowth),
            efa=self._judged_part(EfaGrowth),
            ethernet=self._judged_part(EthernetGrowth),
        )

    def _judged_part(self, kind: type[P]) -> P:
        return kind(**{name: self.growth[name] for name in kind.__struct_fields__ if name in self.latest})


@dataclass
class _Port:
    """What the sensor remembers of a port."""

    reading: ports.PortReading
    role: PortRole = PortRole.UNKNOWN
    gpus: str = ""  # those with which it shares a PCIe bridge
    was_up: bool = False
    absent_polls: int = 0
    is_gone: bool = False
    best_rate_gbps: float | None = None  # since the port was last enabled
    best_width: int | None = None
    up_polls: int = 0  # since the link came up, or lost itself between two polls
    counters: _Counters = field(default_factory=_Counters)

    @property
    def peer_group(self) -> tuple[str, ...]:
        """Ports of one group are of one kind of card for one use, so that they should have one rate."""
        reading = self.reading
        driver = "" if reading.device is None else reading.device.driver
        return self.role, reading.kind, reading.link_layer, driver, reading.identity.get("board", "")


@dataclass
class NetworkSensor:
    """InfiniBand and Ethernet ports; remembers the ports that were up since they were last enabled."""

    _root: Path
    _proc: Path
    _polls: int = 0
    _ports: dict[str, _Port] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._roles = ports.PortRoles(self._root, self._proc)

    def poll(self) -> tuple[PortSample, ...]:
        here = self._read()
        usual = _usual_rates(here)
        samples = [self._sample(port, PortPresence.HERE, usual.get(port.peer_group)) for port in here]
        names = {port.reading.name for port in here}
        for name in sorted(self._ports.keys() - names):
            if (sample := self._absent(self._ports[name])) is not None:
                samples.append(sample)
            else:
                del self._ports[name]
        return tuple(samples)

    def _read(self) -> list[_Port]:
        """Read the ports that are here, and note which were up."""
        self._polls += 1
        is_full = self._polls % COUNTERS_EVERY == 1
        if not is_full:
            known = [port.reading for port in self._ports.values() if not port.absent_polls]
            readings = [now for reading in known if (now := ports.refresh_port(reading)) is not None]
        else:
            readings = [*ports.infiniband_ports(self._root), *ports.ethernet_ports(self._root)]
            roles = self._roles.assign(readings)
            # What is up when the sensor starts was trained long before; after a boot, rules have their time of grace.
            up_polls = SETTLED_POLLS if self._polls == 1 else 0
            for reading in readings:
                port = self._ports.setdefault(reading.name, _Port(reading, up_polls=up_polls))
                port.role = roles[reading.name]
                port.gpus = ", ".join(self._roles.nearest_gpus(reading)) if port.role in FABRIC_ROLES else ""
        here = [self._ports[reading.name] for reading in readings]
        for port, reading in zip(here, readings, strict=True):
            self._note(port, reading)
            if is_full and not reading.is_virtual:
                port.counters.add(ports.read_counters(reading), port.up_polls >= SETTLED_POLLS)
        return here

    def _note(self, port: _Port, reading: ports.PortReading) -> None:
        """Note what a new reading tells of the port."""
        is_new = port.absent_polls > 0 or port.reading.device != reading.device
        has_lost_link = (reading.link_downs or 0) > (port.reading.link_downs or 0)
        port.up_polls = 0 if is_new or has_lost_link or not reading.up else port.up_polls + 1
        port.reading, port.absent_polls, port.is_gone = reading, 0, False
        # A port that was just enabled, or whose driver was just loaded, trains its link for a while.
        port.was_up = reading.up or (port.was_up and not is_new)
        is_enabled = self._sample(port, PortPresence.HERE).is_enabled
        if is_new or not is_enabled:
            port.best_rate_gbps = port.best_width = None
        port.was_up &= is_enabled
        if reading.up and reading.rate_gbps is not None:
            port.best_rate_gbps = max(reading.rate_gbps, port.best_rate_gbps or 0.0)
        if reading.up and reading.width is not None:
            port.best_width = max(reading.width, port.best_width or 0)

    def _absent(self, port: _Port) -> PortSample | None:
        """Return the sample of a port that is not here; None if the port is to be forgotten."""
        port.absent_polls += 1
        device = port.reading.device
        has_left_bus = device is None or not device.folder.exists()
        sample = self._sample(port, PortPresence.GONE if has_left_bus else PortPresence.ELSEWHERE)
        if not has_left_bus and port.is_gone:  # the device is back; its port has not come up yet
            port.absent_polls = 1
        port.is_gone = has_left_bus
        if sample.device_gone:
            return sample
        return sample if sample.is_fabric and port.absent_polls <= ABSENT_POLLS else None

    def _sample(self, port: _Port, presence: PortPresence, usual_rate_gbps: float | None = None) -> PortSample:
        reading, is_here = port.reading, presence is PortPresence.HERE
        return PortSample(
            name=reading.name,
            kind=reading.kind,
            up=reading.up and is_here,
            was_up=port.was_up,
            role=port.role,
            presence=presence,
            state=reading.state,
            phys_state=reading.phys_state,
            flags=reading.flags,
            link_layer=reading.link_layer,
            is_asleep=reading.is_asleep,
            rate_gbps=reading.rate_gbps if is_here else None,
            best_rate_gbps=port.best_rate_gbps,
            usual_rate_gbps=usual_rate_gbps,
            width=reading.width if is_here else None,
            best_width=port.best_width,
            bond=reading.bond if is_here else "",
            counters=port.counters.latest if is_here else {},
            counts=port.counters.judged if is_here and port.role in FABRIC_ROLES else PortCounterGrowth(),
            link_downs=reading.link_downs if is_here else None,
            identity=reading.identity | ({"gpus": port.gpus} if port.gpus else {}),
        )


def _usual_rates(ports_here: list[_Port]) -> dict[tuple[str, ...], float]:
    """Return the rate that more than half of a group's ports have, by group. A group has three ports or more."""
    rates: dict[tuple[str, ...], list[float]] = {}
    for port in ports_here:
        if port.reading.up and port.reading.rate_gbps is not None:
            rates.setdefault(port.peer_group, []).append(port.reading.rate_gbps)
    usual = {group: Counter(values).most_common(1)[0] for group, values in rates.items() if len(values) >= MIN_PEERS}
    return {group: rate for group, (rate, count) in usual.items() if 2 * count > len(rates[group])}

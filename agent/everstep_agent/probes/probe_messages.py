"""The arithmetic of a probe, without torch: where members meet, and how a time becomes a bandwidth."""

from __future__ import annotations

from statistics import median

import xxhash

from everstep.ids import NodeId
from everstep.wire.v1.base import Message
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import ProbeFinished

# ---- frames
# What the supervisor and its probe process say to one another.

MAX_FRAME_BYTES = 1 << 20


class ProbeRequest(Message, frozen=True, kw_only=True, tag=True):
    """To the child: take part as ``node``; be done by ``deadline`` (this machine's monotonic clock)."""

    probe: RunProbe
    node: NodeId
    deadline: float


class TorchLoaded(Message, frozen=True, kw_only=True, tag=True):
    """From the child, once: torch is loaded."""


class ProbeStage(Message, frozen=True, kw_only=True, tag=True):
    """From the child: what it is about to do, for whoever has to explain its silence."""

    description: str


FromChild = TorchLoaded | ProbeStage | ProbeFinished


FIRST_STORE_PORT = 20_000
STORE_PORT_COUNT = 12_000
"""Below 32768, where Linux begins to hand out ports for outgoing connections (ip_local_port_range)."""


def store_address(probe: RunProbe) -> tuple[str, int]:
    """Where the members meet. Raises ValueError for an address that is none.

    Port 0 stands for one that every member derives from the probe's name and trace alike, so that nothing has to be
    announced; should it be taken, the probe fails, and the next one, with another name, has another port.
    """
    host, _, port = probe.store.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{probe.store!r} is no address to meet at: expected host:port")
    if int(port):
        return host.strip("[]"), int(port)
    name = "/".join((probe.probe, probe.trace, *probe.nodes))
    return host.strip("[]"), FIRST_STORE_PORT + xxhash.xxh3_64_intdigest(name.encode()) % STORE_PORT_COUNT


def bus_bandwidth(members: int, size_bytes: int, seconds: float) -> float:
    """Bytes per second that each link must have carried: 2 (n - 1) / n * bytes / time.

    Source: nccl-tests, doc/PERFORMANCE.md, "AllReduce": comparable to the hardware's peak whatever n is.
    """
    return 2 * (members - 1) / members * size_bytes / seconds


def result_row(members: int, size_bytes: int, times_s: list[float]) -> tuple[int, float, float]:
    """One row of the result: bytes, median seconds, bus bandwidth at that median."""
    middle = median(times_s)
    return size_bytes, middle, bus_bandwidth(members, size_bytes, middle)

"""Probe messages and arithmetic without torch: the store's address, and bandwidth from times."""

from __future__ import annotations

from statistics import median

import xxhash

from everstep.ids import NodeId
from everstep.wire.v1.base import Message
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.local import WrongProduct
from everstep.wire.v1.training import ProbeFinished

# Messages between the supervisor and its probe process.

MAX_FRAME_BYTES = 8 << 20
"""More than all kept products take."""


class ProbeRequest(Message, frozen=True, kw_only=True, tag=True):
    """To the child: take part as ``node``; finish by ``deadline`` (this machine's monotonic clock).

    ``products``: what ranks of this node computed wrongly, for a probe of kind compute to try again.
    """

    probe: RunProbe
    node: NodeId
    deadline: float
    products: tuple[WrongProduct, ...] = ()


class TorchLoaded(Message, frozen=True, kw_only=True, tag=True):
    """From the child, once: torch is loaded."""


class ProbeStage(Message, frozen=True, kw_only=True, tag=True):
    """From the child: its next step, to explain a later silence."""

    description: str


FromChild = TorchLoaded | ProbeStage | ProbeFinished


FIRST_STORE_PORT = 20_000
STORE_PORT_COUNT = 12_000
"""Ports below 32768, from where Linux assigns ports to outgoing connections (ip_local_port_range)."""


def store_address(probe: RunProbe) -> tuple[str, int]:
    """Return the address at which the members meet.

    Every member derives the same port from the probe's name and trace if the given port is 0, so nothing has to be
    announced. If that port is taken, the probe fails, and the next one has another name and port. Raises ValueError if
    the address is malformed.
    """
    host, _, port = probe.store.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{probe.store!r} is not a store address: expected host:port")
    if int(port):
        return host.strip("[]"), int(port)
    name = "/".join((probe.probe, probe.trace, *probe.nodes))
    return host.strip("[]"), FIRST_STORE_PORT + xxhash.xxh3_64_intdigest(name.encode()) % STORE_PORT_COUNT


def bus_bandwidth(members: int, size_bytes: int, seconds: float) -> float:
    """Return the bytes per second that each link must have carried: 2 (n - 1) / n * bytes / time. Source: nccl-tests,
    doc/PERFORMANCE.md, "AllReduce": comparable to the hardware's peak for every n."""
    return 2 * (members - 1) / members * size_bytes / seconds


def result_row(members: int, size_bytes: int, times_s: list[float]) -> tuple[int, float, float]:
    """Return one row of the result: bytes, median seconds, bus bandwidth at that median."""
    middle = median(times_s)
    return size_bytes, middle, bus_bandwidth(members, size_bytes, middle)

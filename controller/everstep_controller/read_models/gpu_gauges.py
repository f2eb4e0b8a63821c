"""Keep the newest gauges of every node's GPUs in memory, for people.

They are neither journaled nor stored: no decision depends on them, and agents send them again to every new leader.
"""

from __future__ import annotations

import msgspec

from everstep.ids import NodeId
from everstep.wire.v1.agent import GpuGauges
from everstep.wire.v1.operator import GpuStatus, NodeGpus
from everstep_controller.core.records import NodeRecord

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[GpuGauges, ...])


class GpuGaugeTable:
    """The newest gauges of each node, encoded: some 40 bytes a GPU, a fifth of the decoded ones."""

    def __init__(self) -> None:
        self._newest: dict[NodeId, tuple[float, bytes]] = {}

    def record(self, node: NodeId, gauges: tuple[GpuGauges, ...], now: float) -> None:
        """Replace a known node's gauges; ``now`` in wall seconds."""
        self._newest[node] = now, _ENCODER.encode(gauges)

    def forget(self, node: NodeId) -> None:
        """Forget a deleted node."""
        self._newest.pop(node, None)

    def of_node(self, record: NodeRecord) -> NodeGpus:
        """Return the GPUs of the node's registration with their gauges, as far as known."""
        received_at, encoded = self._newest.get(record.node, (None, b"\x90"))  # an empty array
        known = {gauges.index: msgspec.structs.asdict(gauges) for gauges in _DECODER.decode(encoded)}
        return NodeGpus(
            node=record.node,
            received_at=received_at,
            gpus=tuple(
                GpuStatus(
                    **{"index": gpu.index, **known.get(gpu.index, {})},
                    uuid=gpu.uuid,
                    name=gpu.name,
                    memory_bytes=gpu.memory_bytes,
                )
                for gpu in record.identity.gpus
            ),
        )

"""Compare versions and amounts of like nodes, and show those that differ from the majority.

A difference is information for people: it may be an upgrade in progress or a deliberate test. No decision depends on
it, and no node is evicted for it. ``docs/decisions/0127-drift-is-information.md`` has the reasons.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from everstep.ids import NodeId
from everstep.wire.v1 import operator as op
from everstep.wire.v1.agent import GpuModes, NetworkAdapter
from everstep_controller.core.records import NodeIdentity, NodeRecord
from everstep_controller.store.rows import decode_cursor, encode_cursor

MIN_LIKE_NODES = 5
"""Least nodes with a known value among which there can be a majority. Fewer are often a test bed of all versions."""
MAX_VALUE_CHARACTERS = 256  # of a value, or of the kind of node; both are compared and shown as cut
MAX_KINDS = 1024  # different registrations, apart from what is a node's own, whose values are remembered
NODES_PER_SLICE = 50  # nodes whose registrations are read in a slice of the event loop: about a millisecond


class DriftValue(StrEnum):
    """A value in which like nodes should be equal."""

    KERNEL = "kernel"
    DRIVER = "driver"
    VBIOS = "vbios"
    INFOROM = "inforom"
    NIC_FIRMWARE = "nic_firmware"
    GPU_COUNT = "gpu_count"
    GPU_MEMORY = "gpu_memory"
    ECC_MODE = "ecc_mode"
    MIG_MODE = "mig_mode"
    PERSISTENCE_MODE = "persistence_mode"


class Group(NamedTuple):
    """Nodes whose ``value`` is compared: machines of one model with GPUs of one model.

    ``parts`` are further texts that must be equal for the value to be comparable. Firmware, for example, is compared
    between equal boards only.
    """

    value: DriftValue
    kind: str
    parts: str = ""


class _GpuKind(NamedTuple):
    """What the GPUs of a node share if none of them differs from the others."""

    name: str
    part_number: str
    vbios: str
    inforom: str
    memory_bytes: int


class _Hardware(NamedTuple):
    """A registration without what is a node's own, so that like nodes share their values."""

    machine: str
    kernel: str
    driver: str
    gpu_count: int
    gpus: frozenset[_GpuKind]
    adapters: tuple[NetworkAdapter, ...]
    modes: GpuModes


def comparable_values(identity: NodeIdentity) -> Mapping[Group, str]:
    """Return the node's known values by the group in which they are compared. Unknown values are left out."""
    host, gpus = identity.host, identity.gpus
    hardware = _Hardware(
        machine=f"{host.vendor} {host.product}".strip(),
        kernel=host.kernel,
        driver=identity.driver_version,
        gpu_count=len(gpus),
        gpus=frozenset(_GpuKind(gpu.name, gpu.part_number, gpu.vbios, gpu.inforom, gpu.memory_bytes) for gpu in gpus),
        adapters=identity.adapters,
        modes=identity.gpu_modes,
    )
    return _values_of(hardware)


@lru_cache(maxsize=MAX_KINDS)
def _values_of(hardware: _Hardware) -> Mapping[Group, str]:
    gpus, driver, modes = hardware.gpus, hardware.driver, hardware.modes
    kind = " in ".join(filter(None, (_joined(gpu.name for gpu in gpus), hardware.machine)))
    if not kind:
        return {}
    boards = _boards(gpus)
    adapters = [adapter for adapter in hardware.adapters if adapter.board and adapter.firmware]
    found = {
        Group(DriftValue.KERNEL, kind): hardware.kernel,
        Group(DriftValue.DRIVER, kind): driver,
        Group(DriftValue.GPU_COUNT, kind): str(hardware.gpu_count or ""),
        Group(DriftValue.ECC_MODE, kind): modes.ecc,
        Group(DriftValue.MIG_MODE, kind): modes.mig,
        Group(DriftValue.PERSISTENCE_MODE, kind): modes.persistence,
        Group(DriftValue.NIC_FIRMWARE, kind, _joined(adapter.board for adapter in adapters)): _joined(
            adapter.firmware for adapter in adapters
        ),
    }
    if driver:  # the memory that NVML shows depends on how much the driver reserves
        memory = _joined(f"{gpu.memory_bytes / 2**30:.1f} GiB" for gpu in gpus if gpu.memory_bytes > 0)
        found[Group(DriftValue.GPU_MEMORY, kind, driver)] = memory
    if boards:
        found[Group(DriftValue.VBIOS, kind, boards)] = _joined(gpu.vbios for gpu in gpus)
        found[Group(DriftValue.INFOROM, kind, boards)] = _joined(gpu.inforom for gpu in gpus)
    return {group: value for group, value in found.items() if value}


def _boards(gpus: Iterable[_GpuKind]) -> str:
    """Return the part numbers of the GPUs' boards; empty if one is unknown, as firmware belongs to a board."""
    boards = [gpu.part_number for gpu in gpus]
    return _joined(boards) if all(boards) else ""


def _joined(texts: Iterable[str]) -> str:
    """Return the different known texts in order."""
    return ", ".join(sorted({text for text in texts if text}))[:MAX_VALUE_CHARACTERS]


class Majority(NamedTuple):
    """The value of more than half of the nodes of a group."""

    value: str
    nodes: int  # with this value
    compared: int  # with any known value


def find_majority(counts: Mapping[str, int]) -> Majority | None:
    """Return the majority among numbers of nodes by value; None if there is none, or if the nodes are too few."""
    compared = sum(counts.values())
    if compared < MIN_LIKE_NODES:
        return None
    usual = max(counts, key=lambda value: counts[value])
    return Majority(usual, counts[usual], compared) if 2 * counts[usual] > compared else None


class DriftTable:
    """Values of all nodes by group, kept up to date from their registrations.

    A node costs some 20 us when its registration has changed, and a comparison of pointers otherwise.
    """

    def __init__(self) -> None:
        self._known: dict[NodeId, tuple[NodeIdentity, Mapping[Group, str]]] = {}
        self._groups: dict[Group, dict[str, set[NodeId]]] = {}

    async def refresh(
        self, nodes: Mapping[NodeId, NodeRecord], yield_to_agents: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Take the registrations that have changed, in slices of the event loop."""
        known = self._known
        changed = [
            name
            for name, record in nodes.items()
            if (before := known.get(name)) is None or before[0] is not record.identity
        ]
        for number, name in enumerate([*changed, *(known.keys() - nodes.keys())], start=1):
            self._update(name, nodes.get(name))
            if yield_to_agents is not None and number % NODES_PER_SLICE == 0:
                await yield_to_agents()

    def _update(self, name: NodeId, record: NodeRecord | None) -> None:
        """Replace the node's values by those of its registration; ``record`` is None for a forgotten node."""
        values = self._values(name)
        self._known.pop(name, None)
        for group, value in values.items():
            nodes = self._groups[group]
            nodes[value].discard(name)
            if not nodes[value]:
                del nodes[value]
            if not nodes:
                del self._groups[group]
        if record is None:
            return
        values = comparable_values(record.identity)
        self._known[name] = record.identity, values
        for group, value in values.items():
            self._groups.setdefault(group, {}).setdefault(value, set()).add(name)

    def _values(self, name: NodeId) -> Mapping[Group, str]:
        known = self._known.get(name)
        return known[1] if known is not None else {}

    def counts(self) -> dict[str, int]:
        """Return the number of nodes that differ, by value."""
        counts = dict.fromkeys(map(str, DriftValue), 0)
        for group in self._groups:
            counts[group.value] += sum(len(nodes) for nodes in self._differing(group).values())
        return counts

    def of_node(self, record: NodeRecord) -> tuple[op.Drift, ...]:
        """Return the values in which the node differs from like nodes."""
        return tuple(
            self._describe(record, group, value)
            for group, value in self._values(record.node).items()
            if value in self._differing(group)
        )

    def page(self, nodes: Mapping[NodeId, NodeRecord], cursor: str, limit: int) -> op.DriftList:
        """Return a page of all differences, by node and value. Raises MalformedMessage for an invalid cursor."""
        begin = decode_cursor(cursor, (str, str))
        found = sorted(
            (name, str(group.value), group, value)
            for group in self._groups
            for value, names in self._differing(group).items()
            for name in names
            if name in nodes
        )
        following = [entry for entry in found if begin is None or entry[:2] > begin]
        shown = following[:limit]
        return op.DriftList(
            drifts=tuple(self._describe(nodes[name], group, value) for name, _, group, value in shown),
            total=len(found),
            next=encode_cursor(shown[-1][:2]) if len(following) > limit else "",
        )

    def _majority(self, group: Group) -> Majority | None:
        return find_majority({value: len(nodes) for value, nodes in self._groups[group].items()})

    def _differing(self, group: Group) -> dict[str, set[NodeId]]:
        """Return the nodes without the majority's value, by their own value.

        Several machines of one model with another number of GPUs are a kind of their own, as 4 GPUs instead of 8.
        """
        usual = self._majority(group)
        if usual is None or usual.nodes == usual.compared:
            return {}
        most = MIN_LIKE_NODES - 1 if group.value is DriftValue.GPU_COUNT else usual.compared
        values = self._groups[group].items()
        return {value: nodes for value, nodes in values if value != usual.value and len(nodes) <= most}

    def _describe(self, record: NodeRecord, group: Group, actual: str) -> op.Drift:
        usual = self._majority(group)
        assert usual is not None  # only values that differ from a majority are described
        is_offline = not record.liveness.reachable
        name = group.value.replace("_", " ")
        when = ", by the last registration of a node that is offline" if is_offline else ""
        return op.Drift(
            node=record.node,
            value=group.value,
            actual=actual,
            usual=usual.value,
            usual_nodes=usual.nodes,
            compared_nodes=usual.compared,
            kind=group.kind,
            is_offline=is_offline,
            sentence=f"differs from {usual.nodes} of {usual.compared} like nodes: {name} {actual} "
            f"(others {usual.value}){when}",
        )

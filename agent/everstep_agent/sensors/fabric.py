"""Samples of the NVLink fabric: each GPU's part in it, its links to the CPU, its peers, and the node as a whole.

All of it follows ``nvml.h`` and NVIDIA's guides, and has never been run on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep_agent.drivers import fabric_services
from everstep_agent.drivers.fabric_services import FABRIC_MANAGER, IMEX
from everstep_agent.drivers.gpu_samples import FabricSample, FabricState, GpuPeerSample, GpuSample, LinkSample
from everstep_agent.drivers.nvml import GpuDevice, call
from everstep_agent.drivers.samples import NvlinkFabricSample
from everstep_agent.sensors.nvlinks import SWITCH

PEERS_EVERY = 6
"""Slow readings of a GPU between questions about its peers, which are asked at its opening too."""

P2P_OVER_NVLINK = 2
P2P_UNKNOWN = 6
"""Numbers of nvml.h: nvmlGpuP2PCapsIndex_t and nvmlGpuP2PStatus_t."""

C2C_LINK_COUNT, C2C_LINK_STATUS = 170, 171
"""Numbers of nvml.h: NVML_FI_DEV_C2C_LINK_*."""
MAX_C2C_LINKS = 16

_FLAGS = {
    "degraded_bandwidth": 0,
    "route_recovery": 2,
    "route_unhealthy": 4,
    "access_timeout_recovery": 6,
    "partition_assigned": 12,
}
"""Places of two-bit flags in the health mask (nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_*): 1 is yes, 2 is no."""
_CONFIGURATION_SHIFT, _CONFIGURATION_MASK = 8, 0xF
_MANAGER_SHIFT = 14


@dataclass(eq=False)
class GpuFabric:
    """One GPU's part in the fabric. The object outlives the library, because it knows which links were ever active."""

    seen_active: set[int] = field(default_factory=set)

    def read(self, device: GpuDevice, links: tuple[LinkSample, ...]) -> dict[str, Any]:
        """Return values of a ``GpuNvlink``."""
        has_switch_links = any(link.up and link.far_end.startswith(SWITCH) for link in links)
        return {"fabric": _fabric_sample(device.fabric_info(), has_switch_links), **self._read_c2c(device)}

    def _read_c2c(self, device: GpuDevice) -> dict[str, int]:
        """Return the links to the CPU, unless the GPU has none or their use is off."""
        mode = device.read("nvmlDeviceGetC2cModeInfoV")
        if mode is None or not mode.isC2cEnabled:
            return {}
        (count,) = device.read_fields([C2C_LINK_COUNT])
        numbers = range(min(count or 0, MAX_C2C_LINKS))
        states = dict(enumerate(device.read_fields([(C2C_LINK_STATUS, number) for number in numbers])))
        self.seen_active.update(number for number, state in states.items() if state)
        if not self.seen_active:
            return {}
        return {
            "c2c_links": len(self.seen_active),
            "c2c_links_down": sum(states.get(number) == 0 for number in self.seen_active),
        }


def _fabric_sample(info: Any, has_switch_links: bool) -> FabricSample | None:
    if info is None:
        return None
    mask = getattr(info, "healthMask", 0)
    is_completed = info.state == FabricState.COMPLETED
    return FabricSample(
        state=info.state,
        status=info.status if is_completed else None,
        clique=info.cliqueId if is_completed else None,
        cluster=bytes(info.clusterUuid).hex() if is_completed else "",
        has_switch_links=has_switch_links,
        **{name: _flag(mask, shift) for name, shift in _FLAGS.items()},
        incorrect_configuration=mask >> _CONFIGURATION_SHIFT & _CONFIGURATION_MASK or None,
        manager_disconnected={1: 0, 2: 1}.get(mask >> _MANAGER_SHIFT & 3),
    )


def _flag(mask: int, shift: int) -> int | None:
    return {1: 1, 2: 0}.get(mask >> shift & 3)


def read_peers(device: GpuDevice, others: Mapping[str, GpuDevice]) -> tuple[GpuPeerSample, ...]:
    """Return whether a GPU reaches the others."""
    answers = {bus_id: _p2p_status(device, bus_id, other) for bus_id, other in others.items()}
    known = {bus_id: status for bus_id, status in answers.items() if status not in (None, P2P_UNKNOWN)}
    return tuple(GpuPeerSample(pci_bus_id=bus_id, status=status) for bus_id, status in known.items())


def _p2p_status(device: GpuDevice, bus_id: str, other: GpuDevice) -> Any:
    name = "nvmlDeviceGetP2PStatus"
    return device.attempt(name, lambda: call(name, device.handle, other.handle, P2P_OVER_NVLINK), (bus_id,))


SERVICES_EVERY = 10
"""Polls between looks for the Fabric Manager and IMEX."""
SEARCH_EVERY = 3
"""Such looks between searches of all processes for one that does not run."""
IMEX_EVERY = 60
"""Polls between looks at the configuration of IMEX."""


@dataclass
class NvlinkFabricSensor:
    """The fabric of the node as a whole."""

    proc: Path
    etc: Path
    dev: Path
    _polls: int = 0
    _looks: int = 0
    _is_imex_configured: bool = False
    _pids: dict[str, int] = field(default_factory=dict)
    _sees_host: bool = False

    def poll(self, gpus: tuple[GpuSample, ...], switches: int) -> NvlinkFabricSample:
        """Return the sample. ``switches``: number of NVSwitches that the NVIDIA driver holds."""
        if self._polls % IMEX_EVERY == 0:
            self._is_imex_configured = fabric_services.is_imex_configured(self.etc, self.dev)
        if self._polls % SERVICES_EVERY == 0 and (switches or self._is_imex_configured):
            self._look_for_services(bool(switches))
        self._polls += 1
        domains, pairs = _domains(gpus), _unreachable_pairs(gpus)
        return NvlinkFabricSample(
            switches=switches,
            manager_running=FABRIC_MANAGER in self._pids if self._sees_host else None,
            imex_wanted=self._is_imex_configured and any(gpu.processes.processes for gpu in gpus),
            imex_running=IMEX in self._pids if self._sees_host else None,
            domains=len(domains) or None,
            unreachable_pairs=None if pairs is None else len(pairs),
            detail="; ".join([*(domains if len(domains) > 1 else ()), _pairs_detail(pairs or [])]).strip("; "),
        )

    def _look_for_services(self, has_switches: bool) -> None:
        """Check that the known processes still run. Only now and then search for the others."""
        proc = self.proc
        self._sees_host = fabric_services.sees_host(proc)
        self._pids = {name: pid for name, pid in self._pids.items() if fabric_services.process_name(proc, pid) == name}
        wanted = {FABRIC_MANAGER} if has_switches else set()
        wanted |= {IMEX} if self._is_imex_configured else set()
        if wanted - self._pids.keys() and self._looks % SEARCH_EVERY == 0:
            self._pids |= fabric_services.find_processes(proc, wanted)
        self._looks += 1


def _domains(gpus: tuple[GpuSample, ...]) -> list[str]:
    """Return the fabrics and cliques that GPUs have joined, each with its GPUs in words."""
    found: dict[tuple[str, int | None], list[str]] = {}
    for gpu in gpus:
        fabric = gpu.nvlink.fabric
        if fabric is not None and fabric.is_joined:
            found.setdefault((fabric.cluster, fabric.clique), []).append(gpu.pci_bus_id)
    return [f"{', '.join(names)} in clique {clique} of {cluster}" for (cluster, clique), names in found.items()]


def _unreachable_pairs(gpus: tuple[GpuSample, ...]) -> list[tuple[str, str]] | None:
    """Return the pairs that do not reach each other, if most pairs do; None if it cannot be told.

    Only GPUs at NVSwitches that have joined the fabric should all reach each other. Elsewhere the board's wiring
    decides, or an IOMMU, and nothing is wrong.
    """
    judged = {
        gpu.pci_bus_id: gpu.nvlink.peers
        for gpu in gpus
        if gpu.nvlink.peers and (fabric := gpu.nvlink.fabric) and fabric.has_switch_links and fabric.is_joined
    }
    pairs = {
        (min(bus_id, peer.pci_bus_id), max(bus_id, peer.pci_bus_id)): peer.status
        for bus_id, peers in judged.items()
        for peer in peers
        if peer.pci_bus_id in judged
    }
    if not pairs:
        return None
    bad = [pair for pair, status in sorted(pairs.items()) if status]
    return bad if 2 * len(bad) < len(pairs) else []


def _pairs_detail(pairs: list[tuple[str, str]]) -> str:
    """Return the pairs in words; one GPU that is in all of them is named alone."""
    common = set.intersection(*map(set, pairs)) if len(pairs) > 1 else set()
    if common:
        return f"{common.pop()} with {len(pairs)} others"
    return ", ".join(f"{one} with {other}" for one, other in pairs)

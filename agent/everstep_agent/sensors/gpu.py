"""GPU samples through NVML. Nothing raises: every value fails by itself, and the sample holds the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from everstep.wire.v1.agent import Gpu
from everstep_agent.drivers import nvml
from everstep_agent.drivers.gpu_samples import (
    GpuClocks,
    GpuDriverModes,
    GpuMemory,
    GpuMemoryErrors,
    GpuNvlink,
    GpuPcieLink,
    GpuPeerSample,
    GpuPower,
    GpuProcesses,
    GpuSample,
    GpuTemperatures,
    GpuUtilization,
    LinkSample,
    XidEvent,
)
from everstep_agent.drivers.nvml import GpuDevice, Nvml, NvmlError, Outcome
from everstep_agent.drivers.pci_gpus import PciGpu
from everstep_agent.drivers.sysfs import PcieLimit
from everstep_agent.sensors.activity import (
    GpuActivity,
    read_nvlink_bytes,
    read_reserved_bytes,
    read_vgpu_licence,
    read_video_utilization,
)
from everstep_agent.sensors.fabric import PEERS_EVERY, GpuFabric, read_peers
from everstep_agent.sensors.nvlinks import NvLinks, total

REOPEN_EVERY = 10
"""Polls between attempts to open NVML, or to find a lost GPU again: opening takes the driver's big lock."""

NO_PCIE_LIMIT = PcieLimit(None, None)
MAX_EVENTS_PER_WAIT = 64
"""Events taken at once; the kernel log counts a storm."""


@dataclass(frozen=True)
class Absence:
    """Why a GPU has no handle."""

    index: int
    error: str
    is_lost: bool = False
    is_reset_required: bool = False
    is_silent: bool = False  # a call about it has not returned


@dataclass(eq=False)
class OpenGpu:
    """A GPU with a handle."""

    device: GpuDevice
    identity: Gpu
    identified: Outcome  # how the calls for the identity ended
    slow: GpuSample | None = None  # the slow values, without any that is read at each poll
    slow_outcome: Outcome = field(default_factory=Outcome)
    slow_readings: int = 0
    peers: tuple[GpuPeerSample, ...] = ()

    def __post_init__(self) -> None:
        self.activity = GpuActivity(self.device)


@dataclass(eq=False)
class GpuSensor:
    """All GPUs of the node. ``poll`` makes the steps of a poll; a caller that fears a hang makes them itself."""

    slow_every: int  # slow-moving values are read at every n-th poll, at different polls for different GPUs
    set_activity: Callable[[str], None]  # receives the next activity before it starts
    platform: Callable[[str], PcieLimit] = lambda bus_id: NO_PCIE_LIMIT  # of the PCIe slot at a bus address
    on_bus: Callable[[], tuple[PciGpu, ...] | None] = lambda: None  # the GPUs on the PCI bus, without NVML
    sees_all_processes: bool = False  # whether no container hides processes from this one
    reads_gpm: bool = False  # how busy the parts of a GPU are, which only dashboards show
    known_gpus: dict[str, Gpu] = field(default_factory=dict)
    error: str = ""
    error_code: int = 0  # of opening NVML
    driver_version: str = ""
    bus: tuple[PciGpu, ...] | None = None  # ``on_bus`` when NVML was opened last, so that the two can be compared
    _must_reopen: bool = False
    _limits: dict[str, PcieLimit] = field(default_factory=dict)
    _library: Nvml | None = None
    _polls: int = 0
    _found: dict[int, OpenGpu | Absence] | None = None  # by index, while NVML is being opened
    _open: dict[str, OpenGpu] = field(default_factory=dict)
    _absent: dict[str, Absence] = field(default_factory=dict)
    _links: dict[str, NvLinks] = field(default_factory=dict)
    _fabrics: dict[str, GpuFabric] = field(default_factory=dict)

    def poll(self) -> tuple[GpuSample, ...]:
        """Return one sample for each GPU that is known or cannot be identified."""
        self.open_if_due()
        for index in self.unidentified:
            self.accept(index, self.identify(index))
        self.finish_opening()
        samples = tuple(self.read(subject) for subject in self.subjects)
        self.close_if_broken(samples)
        return samples

    @property
    def is_open(self) -> bool:
        """Whether this process holds NVML open."""
        return self._library is not None

    @property
    def subjects(self) -> tuple[str, ...]:
        """The PCI addresses to read."""
        return tuple({**self.known_gpus, **self._absent})

    def index_of(self, subject: str) -> int | None:
        """Return the index by which NVML is asked for the GPU at a PCI address, or None if it is not asked."""
        gpu = self._open.get(subject)
        return None if gpu is None else gpu.identity.index

    def read(self, subject: str) -> GpuSample:
        """Return a sample of the GPU at a PCI address."""
        if (gpu := self._open.get(subject)) is not None:
            return self._read(gpu)
        identity = self.known_gpus.get(subject)
        if (absence := self._absent.get(subject)) is not None:
            uuid = "" if identity is None else identity.uuid
            where: dict[str, Any] = {"index": absence.index, "pci_bus_id": subject, "uuid": uuid}
            recovery = 1 if absence.is_reset_required else None
            how: dict[str, Any] = {"error": absence.error, "is_closed": absence.is_silent}
            return GpuSample(**where, **how, lost=absence.is_lost, recovery_action=recovery)
        assert identity is not None, f"{subject} is no subject"
        return GpuSample(**_where(identity), error=self.error or "NVML is closed", is_closed=True)

    def close_if_broken(self, samples: tuple[GpuSample, ...]) -> None:
        """Count a poll as done, and close NVML if it is to be opened afresh for the sake of a GPU."""
        is_broken = self._must_reopen or any(sample.error for sample in samples)
        if self._library is not None and is_broken and self._polls % REOPEN_EVERY == 0:
            self.close()

    def wait_xid_events(self, timeout_s: float) -> list[XidEvent] | None:
        """Wait for NVML events. Returns None, without waiting, if this machine offers none."""
        library = self._library
        if library is None or not library.has_events:
            return None
        events: list[XidEvent] = []
        timeout_ms = max(0, int(timeout_s * 1000))
        self.set_activity("nvml event wait")
        try:
            while len(events) < MAX_EVENTS_PER_WAIT and (event := library.wait_event(timeout_ms)) is not None:
                device, kind, data = event
                timeout_ms = 0
                bus_id = next((bus_id for bus_id, gpu in self._open.items() if gpu.device is device), None)
                if kind == nvml.EVENT_XID and bus_id is not None:
                    events.append(XidEvent(pci_bus_id=bus_id, xid=data, source="nvml"))
        except NvmlError:
            return None
        return events

    def check_bus(self, on_bus: tuple[PciGpu, ...] | None) -> None:
        """Open NVML afresh soon if the GPUs on the PCI bus have changed: NVML lists those of its opening."""
        self._must_reopen |= on_bus != self.bus

    def close(self) -> None:
        if self._library is not None:
            for gpu in self._open.values():
                gpu.activity.close()
            self._library.close()
            self._library = self._found = None
            self._open = {}
            self._absent = {}

    # Opening

    def open_if_due(self) -> None:
        """Begin a poll: open NVML if it is closed and due."""
        is_due = self._library is None and self._polls % REOPEN_EVERY == 0
        self._polls += 1
        if not is_due:
            return
        self.set_activity("nvml initialization")
        try:
            library = Nvml()
        except NvmlError as fault:
            self.error, self.error_code = str(fault), fault.code
            self._forget_given_away()
            return
        self.error, self.error_code = "", 0
        self.driver_version = library.driver_version or self.driver_version
        self._library, self._found = library, {}

    @property
    def unidentified(self) -> list[int]:
        """The indices of GPUs still to be identified while NVML is being opened."""
        if self._library is None or self._found is None:
            return []
        return [index for index in range(self._library.count) if index not in self._found]

    def identify(self, index: int) -> OpenGpu | Absence:
        """Return the GPU with an index, for ``accept``. Changes nothing."""
        self.set_activity(f"identity of gpu {index}")
        return _look_at(index, nvml.handle_of(index))

    def accept(self, index: int, found: OpenGpu | Absence) -> None:
        """Take the answer about a GPU, or the reason for its absence."""
        if self._found is not None:
            self._found[index] = found

    def finish_opening(self) -> None:
        """Find the PCI address of every GPU, and the reason for each known GPU that NVML does not list."""
        found, self._found = self._found, None
        if found is None or self._library is None:
            return
        present, absent, unplaced = dict[str, OpenGpu](), dict[str, Absence](), list[OpenGpu | Absence]()
        by_uuid = {gpu.uuid: bus_id for bus_id, gpu in self.known_gpus.items() if gpu.uuid}
        for _, gpu in sorted(found.items()):
            uuid_or_address = "" if isinstance(gpu, Absence) else gpu.identity.pci_bus_id or gpu.identity.uuid
            bus_id = by_uuid.get(uuid_or_address, uuid_or_address if ":" in uuid_or_address else "")
            if bus_id and isinstance(gpu, OpenGpu):
                present[bus_id] = gpu
            else:
                unplaced.append(gpu)
        on_bus = self.bus = self.on_bus()
        self._must_reopen = False
        for bus_id, gpu in self._place(unplaced, present, on_bus):
            if isinstance(gpu, Absence):
                absent[bus_id] = gpu
            else:
                present[bus_id] = gpu
        for bus_id in [bus_id for bus_id in self.known_gpus if bus_id not in present and bus_id not in absent]:
            self._look_for(bus_id, on_bus, present, absent)
        for bus_id, opened in present.items():
            opened.identity = self.known_gpus[bus_id] = _merged(opened.identity, self.known_gpus.get(bus_id), bus_id)
            self._limits[bus_id] = self.platform(bus_id)
        self._open, self._absent = present, absent
        self._library.register_events([opened.device for opened in present.values()])

    def _place(
        self, unplaced: list[OpenGpu | Absence], present: dict[str, OpenGpu], on_bus: tuple[PciGpu, ...] | None
    ) -> list[tuple[str, OpenGpu | Absence]]:
        """Return addresses for GPUs that do not tell theirs: those that are left over, in NVML's order.

        NVML numbers GPUs by PCI address. A GPU whose address stays unknown is named by its index.
        """
        usable = self.known_gpus if on_bus is None else [gpu.bus_id for gpu in on_bus if gpu.is_usable]
        left = sorted(bus_id for bus_id in usable if bus_id not in present)
        if len(left) == len(unplaced):
            return list(zip(left, unplaced, strict=True))
        return [(f"index {_index(found)}", found) for found in unplaced]

    def _look_for(
        self,
        bus_id: str,
        on_bus: tuple[PciGpu, ...] | None,
        present: dict[str, OpenGpu],
        absent: dict[str, Absence],
    ) -> None:
        """Decide about a known GPU that NVML no longer lists. One that was given away is forgotten."""
        index = self.known_gpus[bus_id].index
        if on_bus is not None:
            state = next((gpu for gpu in on_bus if gpu.bus_id == bus_id), None)
            if state is None:
                absent[bus_id] = Absence(index, "the GPU has left the PCI bus", is_lost=True)
                return
            if not state.is_usable:
                del self.known_gpus[bus_id]
                return
        found = _look_at(index, nvml.handle_at(bus_id))
        if isinstance(found, Absence):
            absent[bus_id] = replace(found, error=f"NVML no longer lists this GPU: {found.error}")
        else:
            present[bus_id] = found

    def _forget_given_away(self) -> None:
        """Forget the GPUs that another driver holds, or that are hidden from this process."""
        self.bus = self.on_bus()
        for gpu in self.bus or ():
            if gpu.is_given_away:
                self.known_gpus.pop(gpu.bus_id, None)

    # Reading

    def _read(self, gpu: OpenGpu) -> GpuSample:
        identity = gpu.identity
        bus_id = identity.pci_bus_id
        self.set_activity(f"gpu {identity.index} at {bus_id}")
        fast = gpu.device.start_pass()
        recovery_action, now = _read_fast_values(gpu.device)
        if fast.is_lost:
            return GpuSample(**_where(identity), lost=True, error=fast.summary)
        is_due = gpu.slow is None or (self._polls + identity.index) % self.slow_every == 0
        slow = gpu.slow = self._read_slowly(gpu) if gpu.slow is None or is_due else gpu.slow
        if is_due:
            now["pcie"] = {"pcie_utilization": now["utilization"]["gpu_utilization"]}
        heat = now["temperatures"]
        if heat["temperature_margin_c"] is None:
            heat["temperature_margin_c"] = _difference(slow.temperatures.slowdown_temperature_c, heat["temperature_c"])
        if fast.is_reset_required and recovery_action is None:
            recovery_action = 1
        errors = [*gpu.identified.errors, *fast.errors, *gpu.slow_outcome.errors]
        return msgspec.structs.replace(
            slow,
            error=fast.summary if fast.is_unreadable else "",
            failed_values=len(errors),
            failures=Outcome(errors=errors).summary,
            recovery_action=recovery_action,
            links_were_read=is_due,
            **{part: msgspec.structs.replace(getattr(slow, part), **values) for part, values in now.items()},
        )

    def _read_slowly(self, gpu: OpenGpu) -> GpuSample:
        """Read the slow values, and again those of the identity that failed."""
        bus_id = gpu.identity.pci_bus_id
        if gpu.identified.errors:
            gpu.identified = gpu.device.start_pass()
            again = gpu.device.identify(gpu.identity.index)
            gpu.identity = self.known_gpus[bus_id] = _merged(again, gpu.identity, bus_id)
        device = gpu.device
        gpu.slow_outcome = device.start_pass()
        name = gpu.identity.uuid or bus_id
        modes = _read_modes(device)
        links = self._links.setdefault(name, NvLinks()).read(device)
        fabric = self._fabrics.setdefault(name, GpuFabric()).read(device, links)
        if gpu.slow_readings % PEERS_EVERY == 0:
            others = {other_id: other.device for other_id, other in self._open.items() if other is not gpu}
            # A GPU that is divided by MIG has no peers.
            gpu.peers = () if modes.mig_mode else read_peers(device, others)
        gpu.slow_readings += 1
        nvlink = _link_values(links) | fabric | {"peers": gpu.peers, "nvlink_bytes": read_nvlink_bytes(device)}
        busy = read_video_utilization(device) | (gpu.activity.read() if self.reads_gpm else {})
        return GpuSample(
            **_where(gpu.identity),
            temperatures=GpuTemperatures(
                slowdown_temperature_c=_threshold_c(device, _SLOWDOWN_THRESHOLD),
                memory_temperature_limit_c=_threshold_c(device, _MEMORY_THRESHOLD),
            ),
            power=GpuPower(
                power_limit_w=_scaled(device.read("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
                power_limit_default_w=_scaled(device.read("nvmlDeviceGetPowerManagementDefaultLimit"), 1e-3),
            ),
            clocks=GpuClocks(memory_clock_mhz=device.read("nvmlDeviceGetClockInfo", _CLOCK_MEMORY)),
            memory=GpuMemory(memory_reserved_bytes=read_reserved_bytes(device)),
            memory_errors=_read_memory_errors(device),
            modes=modes,
            pcie=_read_pcie_link(device, self._limits.get(bus_id, NO_PCIE_LIMIT)),
            nvlink=GpuNvlink(**nvlink),
            utilization=GpuUtilization(**busy),
            processes=GpuProcesses(
                processes=_number(device.read("nvmlDeviceGetComputeRunningProcesses_v3")),
                graphics_processes=_number(device.read("nvmlDeviceGetGraphicsRunningProcesses_v3")),
                sees_all_processes=self.sees_all_processes,
            ),
        )


def _look_at(index: int, handle: Any) -> OpenGpu | Absence:
    if isinstance(handle, NvmlError):
        return Absence(index, str(handle), handle.is_gpu_lost, handle.is_reset_required)
    device = GpuDevice(handle)
    outcome = device.start_pass()
    return OpenGpu(device, device.identify(index), outcome)


def _index(found: OpenGpu | Absence) -> int:
    return found.index if isinstance(found, Absence) else found.identity.index


def _where(gpu: Gpu) -> dict[str, Any]:
    return {"index": gpu.index, "pci_bus_id": gpu.pci_bus_id, "uuid": gpu.uuid}


def _merged(gpu: Gpu, before: Gpu | None, bus_id: str) -> Gpu:
    """Return the identity with its address, and with what was known of this very GPU in place of empty values."""
    known = before if before is not None and gpu.uuid in ("", before.uuid) else None
    filled = {} if known is None else {n: getattr(known, n) for n in Gpu.__struct_fields__ if not getattr(gpu, n)}
    return msgspec.structs.replace(gpu, **filled | {"index": gpu.index, "pci_bus_id": bus_id})


_CLOCK_SM = 1
_CLOCK_MEMORY = 2
_CORRECTED = 0
_UNCORRECTED = 1
_SINCE_LOADED = 0
_LIFETIME = 1
_DRAM = 2
_SRAM = 7
_CORE_TEMPERATURE = 0
_SLOWDOWN_THRESHOLD = 1
_MEMORY_THRESHOLD = 2
"""Numbers of nvml.h: nvmlClockType_t, nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlMemoryLocation_t,
nvmlTemperatureSensors_t, nvmlTemperatureThresholds_t."""

_HIGHEST_LIMIT_C = 150
"""Degrees above which a threshold is no limit of a chip. NVML answers 0 or a huge number where it knows none."""

_MEMORY_TEMPERATURE, _ENERGY, _REMAP_PENDING, _REMAP_FAILURE, _RECOVERY_ACTION = 82, 83, 144, 145, 230
_REMAPPED_CORRECTED, _REMAPPED_UNCORRECTED, _PCIE_FATAL_ERRORS = 142, 143, 180
"""Numbers of nvml.h: NVML_FI_DEV_*."""


def _read_fast_values(device: GpuDevice) -> tuple[int | None, dict[str, dict[str, Any]]]:
    """Read the values that change from second to second: the recovery action, and the others by part of the sample."""
    memory = device.read("nvmlDeviceGetMemoryInfo")
    utilization = device.read("nvmlDeviceGetUtilizationRates")
    memory_temperature_c, energy_mj, remap_pending, remap_failure, recovery_action = device.read_fields(
        (_MEMORY_TEMPERATURE, _ENERGY, _REMAP_PENDING, _REMAP_FAILURE, _RECOVERY_ACTION)
    )
    return recovery_action, {
        "temperatures": {
            "temperature_c": device.read("nvmlDeviceGetTemperature", _CORE_TEMPERATURE),
            "temperature_margin_c": device.read("nvmlDeviceGetMarginTemperature"),
            "memory_temperature_c": memory_temperature_c,
        },
        "power": {
            "power_w": _scaled(device.read("nvmlDeviceGetPowerUsage"), 1e-3),
            "energy_j": _scaled(energy_mj, 1e-3),
        },
        "clocks": {
            "sm_clock_mhz": device.read("nvmlDeviceGetClockInfo", _CLOCK_SM),
            "throttle_reasons": _throttle_reasons(device),
        },
        "memory": {
            "memory_used_bytes": None if memory is None else memory.used,
            "memory_total_bytes": None if memory is None else memory.total,
        },
        "memory_errors": {"remap_pending": remap_pending, "remap_failure": remap_failure},
        "utilization": {
            "gpu_utilization": None if utilization is None else utilization.gpu / 100,
            "memory_utilization": None if utilization is None else utilization.memory / 100,
        },
    }


def _throttle_reasons(device: GpuDevice) -> int | None:
    """Return the reasons under their new name, or under that of drivers before 535."""
    reasons: int | None = device.read("nvmlDeviceGetCurrentClocksEventReasons")
    return device.read("nvmlDeviceGetCurrentClocksThrottleReasons") if reasons is None else reasons


def _read_pcie_link(device: GpuDevice, limit: PcieLimit) -> GpuPcieLink:
    """Read the state and the counters of the link; ``limit`` is that of its slot."""
    (fatal_errors,) = device.read_fields((_PCIE_FATAL_ERRORS,))
    generation_max = device.read("nvmlDeviceGetMaxPcieLinkGeneration")
    width_max = device.read("nvmlDeviceGetMaxPcieLinkWidth")
    return GpuPcieLink(
        pcie_replays=device.read("nvmlDeviceGetPcieReplayCounter"),
        pcie_fatal_errors=fatal_errors,
        pcie_generation=device.read("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=_lesser_limit(generation_max, limit.generation),
        pcie_width=device.read("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=_lesser_limit(width_max, limit.width),
    )


def _read_memory_errors(device: GpuDevice) -> GpuMemoryErrors:
    """Read the counts of memory errors and the state of spare rows."""

    def errors_in(kind: int, location: int) -> int | None:
        count: int | None = device.read("nvmlDeviceGetMemoryErrorCounter", kind, _SINCE_LOADED, location)
        return count

    sram = device.sram_status()
    banks = device.read("nvmlDeviceGetRowRemapperHistogram")
    remapped_corrected, remapped_uncorrected = device.read_fields((_REMAPPED_CORRECTED, _REMAPPED_UNCORRECTED))
    return GpuMemoryErrors(
        ecc_corrected=device.read("nvmlDeviceGetTotalEccErrors", _CORRECTED, _SINCE_LOADED),
        ecc_uncorrected=device.read("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_LOADED),
        ecc_uncorrected_lifetime=device.read("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _LIFETIME),
        ecc_dram_corrected=errors_in(_CORRECTED, _DRAM),
        ecc_dram_uncorrected=errors_in(_UNCORRECTED, _DRAM),
        ecc_sram_corrected=errors_in(_CORRECTED, _SRAM),
        ecc_sram_uncorrected=errors_in(_UNCORRECTED, _SRAM),
        ecc_sram_uncorrected_lifetime=sram and sram.aggregateUncParity + sram.aggregateUncSecDed,
        sram_threshold_exceeded=sram and int(sram.bThresholdExceeded),
        remapped_corrected=remapped_corrected,
        remapped_uncorrected=remapped_uncorrected,
        banks_low_on_spare_rows=banks and banks.low,
        banks_without_spare_rows=banks and banks.none,
        retired_pages=device.retired_pages(),
        retired_pages_pending=device.read("nvmlDeviceGetRetiredPagesPendingStatus"),
    )


def _read_modes(device: GpuDevice) -> GpuDriverModes:
    ecc_mode, ecc_mode_pending = device.read("nvmlDeviceGetEccMode") or (None, None)
    mig_mode, mig_mode_pending = device.read("nvmlDeviceGetMigMode") or (None, None)
    return GpuDriverModes(
        ecc_mode=ecc_mode,
        ecc_mode_pending=ecc_mode_pending,
        mig_mode=mig_mode,
        mig_mode_pending=mig_mode_pending,
        persistence_mode=device.read("nvmlDeviceGetPersistenceMode"),
        vgpu_licensed=read_vgpu_licence(device),
    )


def _number(processes: list[Any] | None) -> int | None:
    return None if processes is None else len(processes)


def _link_values(links: tuple[LinkSample, ...]) -> dict[str, Any]:
    """Return the values of a GPU's links together, by field of ``GpuNvlink``."""
    seen_up = [link for link in links if link.was_up]
    down = tuple(link.link for link in seen_up if link.up is False)
    return {
        "links": links,
        "nvlinks": len(seen_up) or None,
        "nvlinks_down": len(down) if seen_up else None,
        "nvlinks_down_at": down,
        "nvlink_errors": total(link.errors for link in links),
        "nvlink_recovery_failures": total(link.recovery_failures for link in links),
        "nvlink_far_ends": _far_ends(links),
    }


def _far_ends(links: tuple[LinkSample, ...]) -> tuple[str, ...]:
    by_link = {link.link: link.far_end for link in links}
    return tuple(by_link.get(link, "") for link in range(max(by_link, default=-1) + 1))


def _threshold_c(device: GpuDevice, which: int) -> int | None:
    """Return a temperature limit of this very GPU. Drivers may drop the call from Ada on (nvml.h)."""
    limit: int | None = device.read("nvmlDeviceGetTemperatureThreshold", which)
    return limit if limit is not None and 0 < limit <= _HIGHEST_LIMIT_C else None


def _difference(larger: int | None, smaller: int | None) -> int | None:
    return None if larger is None or smaller is None else larger - smaller


def _lesser_limit(offered: int | None, limit: int | None) -> int | None:
    """Return the link's maximum by NVML, unless the platform's is lower."""
    return offered if offered is None or limit is None else min(offered, limit)


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor

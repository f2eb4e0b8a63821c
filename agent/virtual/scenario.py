"""What a virtual machine is at its start, and what its control file may change."""

from __future__ import annotations

from typing import Annotated

import msgspec

DGX_BUS_IDS = ("1b:00", "43:00", "52:00", "61:00", "9d:00", "c3:00", "d1:00", "df:00")
"""Where the eight GPUs of a DGX H100 sit on their PCI bus."""

Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Virtual(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base: a key that nobody knows is an error."""


class VirtualGpu(Virtual, frozen=True, kw_only=True):
    """One GPU; the defaults are a healthy H100 SXM5 at moderate load.

    ``hang``: every call on it blocks until that is taken back. ``lost``: every call says that it is lost.
    ``missing``: it is no longer listed. ``error``: every call returns this NVML error. ``frozen``: its energy counter
    stands still. ``xid``: raise this XID, in the kernel log and as an NVML event, when the value changes.
    ``reset_at`` (wall seconds): it was reset then, and its counters began anew. None: NVML says "not supported".
    """

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = ""
    pci_bus_id: str = ""
    serial: str = ""
    part_number: str = "692-2G520-0200-000"
    vbios: str = "96.00.74.00.01"
    inforom: str = "G520.0200.00.05"
    memory_bytes: int = 85_520_809_984

    hang: bool = False
    lost: bool = False
    missing: bool = False
    error: int = 0
    frozen: bool = False
    xid: int | None = None
    reset_at: float = 0.0

    temperature_c: int = 45
    memory_temperature_c: int | None = 52
    slowdown_c: int = 87
    power_w: float = 320.0
    power_limit_w: float = 700.0
    sm_clock_mhz: int = 1980
    memory_clock_mhz: int = 2619
    throttle_reasons: int = 0
    memory_used_bytes: int = 0
    gpu_utilization: Fraction = 0.0
    memory_utilization: Fraction = 0.0
    recovery_action: int | None = 0

    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    ecc_uncorrected_lifetime: int = 0
    sram_threshold_exceeded: bool = False
    remapped_corrected: int = 0
    remapped_uncorrected: int = 0
    remap_pending: bool = False
    remap_failure: bool = False
    retired_pages: int | None = None
    pcie_replays: int = 0
    pcie_fatal_errors: int = 0
    pcie_generation: int = 5
    pcie_generation_max: int = 5
    pcie_width: int = 16
    pcie_width_max: int = 16
    nvlinks: int = 18
    nvlinks_down: int = 0
    nvlink_errors: int = 0
    nvlink_recovery_failures: int = 0
    processes: int = 0


class VirtualPort(Virtual, frozen=True, kw_only=True):
    """One network port. ``address``, ``pci_bus_id``, ``board``, ``firmware``: by which a vendor knows it."""

    kind: str = "infiniband"
    address: str = ""
    pci_bus_id: str = ""
    board: str = "MT_0000000838"
    firmware: str = "28.39.1002"
    up: bool = True
    rate_gbps: float = 400.0
    errors: int = 0
    link_downs: int = 0


class VirtualHost(Virtual, frozen=True, kw_only=True):
    """The machine around the GPUs."""

    vendor: str = "NVIDIA"
    product: str = "DGXH100"
    serial: str = ""
    chassis_serial: str = ""
    kernel: str = "5.15.0-1046-nvidia"
    uptime_s: float = 86_400.0
    memory_available_fraction: Fraction = 0.9
    memory_total_bytes: int = 2 << 40
    stuck_processes: int = 0
    zombies: int = 0
    load: float = 1.0
    free_fraction: Fraction = 0.5
    mount_silent_s: float = 0.0


class Scenario(Virtual, frozen=True, kw_only=True):
    """A virtual machine. ``nvml_error``: what opening NVML returns (12: no library, 9: driver not loaded)."""

    name: str = "default"
    boot_id: str = "virtual-boot-1"
    driver_version: str = "570.133.20"
    nvml_error: int = 0
    gpu: tuple[VirtualGpu, ...] = ()
    port: dict[str, VirtualPort] = {}
    host: VirtualHost = VirtualHost()


class Control(Virtual, frozen=True, kw_only=True):
    """The control file (JSON, replaced atomically): what is different from the scenario now.

    ``gpus``, ``ports`` and ``host`` hold only the keys that differ, GPUs by index. ``lines`` are lines of the kernel
    log: those beyond the number already said are said. What is left out is as in the scenario.
    """

    boot_id: str | None = None
    nvml_error: int | None = None
    gpus: dict[str, dict[str, msgspec.Raw]] = {}
    ports: dict[str, dict[str, msgspec.Raw]] = {}
    host: dict[str, msgspec.Raw] = {}
    lines: tuple[str, ...] = ()


class ScenarioFile(Virtual, frozen=True, kw_only=True):
    """The scenario as people write it: ``gpus = 8`` makes that many; ``[[gpu]]`` describes single ones by position."""

    name: str = "unnamed"
    boot_id: str = "virtual-boot-1"
    driver_version: str = "570.133.20"
    nvml_error: int = 0
    gpus: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    gpu: tuple[VirtualGpu, ...] = ()
    port: dict[str, VirtualPort] = {}
    host: VirtualHost = VirtualHost()

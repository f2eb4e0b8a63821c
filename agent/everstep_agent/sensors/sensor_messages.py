"""Messages of the sensor process, and the report of everything the sensors know."""

from __future__ import annotations

import msgspec

from everstep.vocabulary import Finding
from everstep.wire.v1.agent import UNKNOWN_HOST, Gpu, Host
from everstep_agent.drivers.gpu_samples import GpuSample, XidEvent
from everstep_agent.drivers.samples import (
    EarlierBoot,
    HardwareSamples,
    HostSample,
    InventorySample,
    NvlinkFabricSample,
    NvmlState,
    OtherGpusSample,
    PathSample,
    PciGpuCounts,
    PortSample,
    Sample,
)
from everstep_agent.virtual.scenario import Scenario

# Messages between the sensor process and its supervisor: one ``SensorConfig``, then one ``PollResult`` after another.

MAX_POLL_BYTES = 4 << 20
ACTIVITY_BYTES = 96
"""Size of the page on which the child writes its next activity, to explain a later silence."""


class SensorConfig(Sample, frozen=True, kw_only=True):
    """To the child: the configuration."""

    interval_s: float
    slow_every: int
    sysfs_root: str
    proc_root: str
    disk_paths: tuple[str, ...]
    scenario: Scenario | None  # the virtual machine to simulate, or None for the real one
    control_file: str
    hang_timeout_s: float = 5.0  # seconds from which on a call of a GPU hangs
    start_timeout_s: float = 60.0  # seconds that opening NVML may take
    reads_gpm: bool = False  # see ``GpuSensor``
    pause_file: str = ""  # while this file exists, NVML stays closed; empty for none
    vault_folder: str = ""  # where the vault keeps its slots; empty for no vault
    watch_units: tuple[str, ...] = ()  # units of systemd
    machine_folder: str = ""  # where the virtual machine keeps its /sys and /proc files
    is_resumed: bool = False  # whether an earlier child of this supervisor has polled before


class PollResult(Sample, frozen=True, kw_only=True):
    """From the child: one poll."""

    is_full: bool  # False for events and kernel lines sent between polls
    boot_id: str = ""
    driver_version: str = ""
    known_gpus: tuple[Gpu, ...] = ()  # every GPU seen since this child began
    gpus: tuple[GpuSample, ...] = ()
    ports: tuple[PortSample, ...] = ()
    paths: tuple[PathSample, ...] = ()
    host: HostSample = HostSample()
    hardware: HardwareSamples = HardwareSamples()
    earlier_boot: EarlierBoot | None = None  # what the boot before left, at one poll
    host_identity: Host = UNKNOWN_HOST
    inventory: InventorySample = InventorySample()
    xids: tuple[XidEvent, ...] = ()
    kernel_lines: tuple[str, ...] = ()
    pci_gpus: PciGpuCounts = PciGpuCounts()
    fabric: NvlinkFabricSample = NvlinkFabricSample()
    other_gpus: tuple[OtherGpusSample, ...] = ()  # of every vendor that is known
    nvml: NvmlState = NvmlState()
    sensor_errors: tuple[tuple[str, str], ...] = ()  # (sensor, reason) for each sensor that failed as a whole
    poll_s: float = 0.0


class SensorReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known of the node.

    ``findings`` is complete: a missing key has cleared. A finding stays equal from report to report until a relevant
    part changes, so that comparing tuples shows whether there is news. A lost GPU stays in ``poll.gpus`` with ``lost``
    set, because its series must not vanish.
    """

    poll: PollResult = PollResult(is_full=True)  # the newest
    polled_at: float = 0.0  # wall time of the newest poll; 0 before the first
    findings: tuple[Finding, ...] = ()
    xid_counts: dict[tuple[str, int], int] = {}
    line_counts: dict[str, int] = {}  # lines of the kernel log by rule, since the agent started
    sensor_restarts: int = 0  # number of times the sensor process has ended
    policy_loaded_at: float = 0.0  # wall time at which the rules in force were loaded
    is_policy_current: bool = True  # false if the site's files have changed and cannot be loaded

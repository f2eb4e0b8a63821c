"""Export ``/metrics``: the agent's own state and the newest GPU samples, as Prometheus families.

A lost GPU keeps its series: ``everstep_gpu_up`` is 0 and its gauges are NaN, so that nothing vanishes or freezes. A
value that the device does not offer has no series. A hung GPU's ``everstep_gpu_up`` is 0, and its gauges have none.

``dcgm_names`` adds all default series of dcgm-exporter (its ``etc/default-counters.csv``), as far as a GPU offers the
values: the profiling ones (DCGM_FI_PROF_*) come from GPM, on Hopper and later. Units are dcgm-exporter's: energy in mJ,
memory in MiB, utilization in percent, activity as a ratio. Three things differ: DCGM_FI_DEV_XID_ERRORS returns to 0
when the XID's finding has cleared, DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL counts KiB, and counters have no type, because
their names do not end as Prometheus asks.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.log_lines import LogThrottle
from everstep.vocabulary import Finding, Severity
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.local import StatisticsAnswer
from everstep_agent.drivers.gpu_samples import THROTTLE_REASONS, GpuSample, LinkSample
from everstep_agent.drivers.samples import (
    HardwareSamples,
    NvlinkFabricSample,
    PathSample,
    PortPresence,
    PortSample,
)
from everstep_agent.sensors.sensor_messages import PollResult, SensorReport

KIB = 1 << 10
MIB = 1 << 20


class AgentMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the agent's numbers, taken in its event loop."""

    node: str
    version: str
    domain: Domain
    sensor_report: SensorReport | None
    findings: tuple[Finding, ...]
    spool_reports: int
    spool_bytes: int
    spool_dropped: int
    spool_refused: int
    requests: Mapping[tuple[str, str], int]
    registrations: int
    controller_silent_s: float | None
    local_event_counts: Mapping[str, int]
    refused_connections: Mapping[str, int]
    refused_scrapes: int
    connections: int
    jobs: int
    snapshot_interval_steps: Mapping[str, int]
    clock_skew_s: float | None
    is_vault_up: bool | None  # None without a vault, in a standalone agent
    log_bundles: int = 0
    vault_restarts: int
    vault_statistics: StatisticsAnswer | None
    processes: Mapping[str, int]


_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


class _Gauge(msgspec.Struct, frozen=True):
    """A value of ``GpuSample``, by name, and its metric family."""

    name: str
    help: str
    field: str
    is_counter: bool = False
    scale: float = 1.0


_GPU = (
    _Gauge("temperature_celsius", "Temperature of the GPU.", "temperature_c"),
    _Gauge("temperature_margin_celsius", "Degrees left until the GPU slows down.", "temperature_margin_c"),
    _Gauge("memory_temperature_celsius", "Temperature of the GPU's memory.", "memory_temperature_c"),
    _Gauge("memory_temperature_margin_celsius", "Degrees left for the memory.", "memory_temperature_margin_c"),
    _Gauge("power_watts", "Power drawn.", "power_w"),
    _Gauge("power_limit_watts", "Current power limit.", "power_limit_w"),
    _Gauge("power_limit_default_watts", "Power limit that the model has by default.", "power_limit_default_w"),
    _Gauge("energy_joules", "Energy used since the driver was loaded.", "energy_j", True),
    _Gauge("sm_clock_hertz", "Clock of the streaming multiprocessors.", "sm_clock_mhz", scale=1e6),
    _Gauge("memory_clock_hertz", "Clock of the memory.", "memory_clock_mhz", scale=1e6),
    _Gauge("utilization_ratio", "Share of the time that a kernel was running.", "gpu_utilization"),
    _Gauge("memory_utilization_ratio", "Share of the time that memory was read or written.", "memory_utilization"),
    _Gauge("memory_used_bytes", "Memory in use.", "memory_used_bytes"),
    _Gauge("memory_total_bytes", "Total memory.", "memory_total_bytes"),
    _Gauge("throttled_by_hardware", "1 while the hardware slows the GPU down.", "hardware_throttled"),
    _Gauge("throttled_by_heat", "1 while heat slows the GPU down.", "heat_throttled"),
    _Gauge("power_braked", "1 while an external power brake slows the GPU down.", "power_braked"),
    _Gauge("ecc_correctable", "Corrected memory errors since the driver was loaded.", "ecc_corrected", True),
    _Gauge("ecc_uncorrectable", "Uncorrected memory errors since the driver was loaded.", "ecc_uncorrected", True),
    _Gauge("ecc_dram_correctable", "Corrected DRAM errors since the driver was loaded.", "ecc_dram_corrected", True),
    _Gauge("ecc_dram_uncorrectable", "Uncorrected DRAM errors since then.", "ecc_dram_uncorrected", True),
    _Gauge("ecc_sram_correctable", "Corrected SRAM errors since then.", "ecc_sram_corrected", True),
    _Gauge("ecc_sram_uncorrectable", "Uncorrected SRAM errors since then.", "ecc_sram_uncorrected", True),
    _Gauge("remapped_rows_correctable", "Memory rows remapped after corrected errors.", "remapped_corrected"),
    _Gauge("remapped_rows_uncorrectable", "Memory rows remapped after uncorrected errors.", "remapped_uncorrected"),
    _Gauge("row_remap_pending", "1 while a row remapping waits for a reset.", "remap_pending"),
    _Gauge("row_remap_failed", "1 when a row could not be remapped.", "remap_failure"),
    _Gauge("banks_low_on_spare_rows", "Memory banks with few spare rows.", "banks_low_on_spare_rows"),
    _Gauge("banks_without_spare_rows", "Memory banks with no spare row.", "banks_without_spare_rows"),
    _Gauge("ecc_mode", "1 while ECC is on.", "ecc_mode"),
    _Gauge("mig_mode", "1 while the GPU is divided (MIG).", "mig_mode"),
    _Gauge("persistence_mode", "1 while the driver stays loaded without clients.", "persistence_mode"),
    _Gauge("retired_pages_pending", "1 while pages wait for a reset to be retired.", "retired_pages_pending"),
    _Gauge("retired_pages", "Memory pages retired (before Ampere).", "retired_pages"),
    _Gauge("pcie_replays", "Retransmitted PCIe packets.", "pcie_replays", True),
    _Gauge("pcie_link_generation", "PCIe generation in use (lower while idle).", "pcie_generation"),
    _Gauge("pcie_link_width", "PCIe lanes in use.", "pcie_width"),
    _Gauge("nvlinks", "Number of NVLinks.", "nvlinks"),
    _Gauge("nvlinks_down", "NVLinks that are down.", "nvlinks_down"),
    _Gauge("nvlink_errors", "NVLink errors.", "nvlink_errors", True),
    _Gauge("nvlink_bytes", "Bytes that all NVLinks sent and received.", "nvlink_bytes", True),
    _Gauge("tensor_activity_ratio", "Share of the time that tensor cores worked.", "tensor_activity"),
    _Gauge("dram_activity_ratio", "Share of the memory's bandwidth in use.", "dram_activity"),
    _Gauge("nvlink_fabric_state", "0: no NVLink fabric, 1: not started, 2: joining, 3: joined.", "fabric_state"),
    _Gauge("c2c_links", "Links to the CPU that were ever active.", "c2c_links"),
    _Gauge("c2c_links_down", "Links to the CPU that fell.", "c2c_links_down"),
    _Gauge("processes", "Compute processes on the GPU.", "processes"),
    _Gauge("graphics_processes", "Graphics processes on the GPU.", "graphics_processes"),
)

_LINK: tuple[tuple[_Kind, str, str, Callable[[LinkSample], float | None]], ...] = (
    (GaugeMetricFamily, "up", "1 while the NVLink is up.", lambda link: link.up),
    (CounterMetricFamily, "errors", "Replays, recoveries and CRC errors, or lost packets.", lambda link: link.errors),
    (CounterMetricFamily, "recoveries", "Times that the NVLink trained anew.", lambda link: link.recoveries),
    (CounterMetricFamily, "recovery_failures", "Failed recoveries.", lambda link: link.recovery_failures),
    (CounterMetricFamily, "discards", "Packets that were not sent.", lambda link: link.discards),
    (CounterMetricFamily, "symbol_errors", "Symbol errors.", lambda link: link.symbol_errors),
    (GaugeMetricFamily, "symbol_error_ratio", "Bit error rate of symbols.", lambda link: link.symbol_ber),
    (GaugeMetricFamily, "raw_error_ratio", "Bit error rate before error correction.", lambda link: link.raw_ber),
)

_DCGM = (
    _Gauge("DEV_SM_CLOCK", "SM clock frequency (in MHz).", "sm_clock_mhz"),
    _Gauge("DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", "memory_clock_mhz"),
    _Gauge("DEV_MEMORY_TEMP", "Memory temperature (in C).", "memory_temperature_c"),
    _Gauge("DEV_GPU_TEMP", "GPU temperature (in C).", "temperature_c"),
    _Gauge("DEV_POWER_USAGE", "Power draw (in W).", "power_w"),
    _Gauge("DEV_TOTAL_ENERGY_CONSUMPTION", "Total energy consumption since boot (in mJ).", "energy_j", True, 1e3),
    _Gauge("DEV_PCIE_REPLAY_COUNTER", "Total number of PCIe retries.", "pcie_replays", True),
    _Gauge("DEV_GPU_UTIL", "GPU utilization (in %).", "gpu_utilization", scale=100.0),
    _Gauge("DEV_MEM_COPY_UTIL", "Memory utilization (in %).", "memory_utilization", scale=100.0),
    _Gauge("DEV_ENC_UTIL", "Encoder utilization (in %).", "encoder_utilization", scale=100.0),
    _Gauge("DEV_DEC_UTIL", "Decoder utilization (in %).", "decoder_utilization", scale=100.0),
    _Gauge("DEV_FB_RESERVED", "Framebuffer memory reserved (in MiB).", "memory_reserved_bytes", scale=1 / MIB),
    _Gauge("DEV_NVLINK_BANDWIDTH_TOTAL", "Traffic of all NVLinks (in KiB).", "nvlink_bytes", True, 1 / KIB),
    _Gauge("DEV_VGPU_LICENSE_STATUS", "vGPU license status.", "vgpu_licensed"),
    _Gauge("DEV_UNCORRECTABLE_REMAPPED_ROWS", "Rows remapped for uncorrectable errors.", "remapped_uncorrected", True),
    _Gauge("DEV_CORRECTABLE_REMAPPED_ROWS", "Rows remapped for correctable errors.", "remapped_corrected", True),
    _Gauge("DEV_ROW_REMAP_FAILURE", "Whether remapping of rows has failed.", "remap_failure"),
    _Gauge("PROF_GR_ENGINE_ACTIVE", "Ratio of time that the graphics engine is active.", "graphics_activity"),
    _Gauge("PROF_PIPE_TENSOR_ACTIVE", "Ratio of cycles that the tensor pipe is active.", "tensor_activity"),
    _Gauge("PROF_DRAM_ACTIVE", "Ratio of cycles that the memory interface is active.", "dram_activity"),
    _Gauge("PROF_PCIE_TX_BYTES", "Bytes sent over PCIe in a second.", "pcie_sent_bytes_per_s"),
    _Gauge("PROF_PCIE_RX_BYTES", "Bytes received over PCIe in a second.", "pcie_received_bytes_per_s"),
)
"""Names after ``DCGM_FI_``; three more need more than one field."""


@dataclass(eq=False)
class AgentCollector(Collector):
    """Yield the metric families of one snapshot."""

    read_metrics: Callable[[], AgentMetrics]  # takes the snapshot; called in the thread that serves the scrape
    dcgm_names: bool  # also yield dcgm-exporter's names

    def collect(self) -> Iterator[Metric]:
        metrics = self.read_metrics()
        yield from _agent_families(metrics)
        yield from _vault_families(metrics)
        if metrics.sensor_report is not None:
            yield from _gpu_families(metrics.node, metrics.sensor_report)
            yield from _link_families(metrics.node, metrics.sensor_report.poll.gpus)
            yield from _port_families(metrics.node, metrics.sensor_report.poll.ports)
            yield from _host_families(metrics.node, metrics.sensor_report.poll)
            yield from _hardware_families(metrics.node, metrics.sensor_report.poll.hardware)
            if self.dcgm_names:
                yield from _dcgm_families(metrics.node, metrics.sensor_report)


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process in bytes, or None if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * 4096


Rows = Iterable[tuple[tuple[str, ...], float]]
"""Label values and the sample of each series."""


def _family(kind: _Kind, name: str, help_text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    family = kind(f"everstep_{name}", help_text, labels=labels)
    for values, sample in rows:
        family.add_metric(values, sample)
    return family


def _agent_families(m: AgentMetrics) -> Iterator[Metric]:
    report = m.sensor_report
    polled_help = "Time of the newest sensor poll (unix time)."
    loaded_help = "Time at which the rules on findings in force were loaded (unix time)."
    current_help = "0 while the site's rules on findings have changed and cannot be loaded."
    gauges: list[tuple[str, str, float | None]] = [
        ("spool_reports", "Reports that the controller has not acknowledged.", m.spool_reports),
        ("spool_bytes", "Bytes of unacknowledged reports.", m.spool_bytes),
        ("controller_silent_seconds", "Seconds since the last answered heartbeat.", m.controller_silent_s),
        ("clock_skew_seconds", "Seconds that this node's clock is ahead of the controller's.", m.clock_skew_s),
        ("connections", "Connected launchers and ranks.", m.connections),
        ("jobs", "Jobs known on the node.", m.jobs),
        ("sensor_poll_seconds", "Duration of the newest sensor poll.", None if report is None else report.poll.poll_s),
        *_fabric_gauges(report),
        ("sensor_polled_at_seconds", polled_help, None if report is None else report.polled_at),
        ("policy_loaded_at_seconds", loaded_help, None if report is None else report.policy_loaded_at),
        ("policy_current", current_help, None if report is None else report.is_policy_current),
    ]
    counters = [
        ("spool_dropped", "Reports dropped because the spool was full.", m.spool_dropped),
        ("reports_refused", "Reports dropped because the controller cannot accept them.", m.spool_refused),
        ("registrations", "Answered registrations.", m.registrations),
        ("sensor_restarts", "Restarts of the sensor process.", 0 if report is None else report.sensor_restarts),
        ("log_bundles", "Bundles of logs kept before remedies or on request.", m.log_bundles),
        ("scrapes_refused", "Requests for metrics without the token.", m.refused_scrapes),
    ]
    by_severity = {str(level): sum(f.severity is level for f in m.findings) for level in Severity}
    by_kind = Counter(str(finding.kind) for finding in m.findings)
    lines = {} if report is None else report.line_counts
    lines_help = "Lines of the kernel log that a rule knows, by rule; sxid: errors of NVSwitches."
    unwatched = {} if report is None else {each.vendor: each.unwatched for each in report.poll.other_gpus}
    memory = {name: size for name, pid in m.processes.items() if (size := resident_bytes(pid)) is not None}
    interval_help = "Steps between snapshots of a job's ranks; 0: only commit candidates are stored."
    memory_help = "Resident memory of the agent's processes."
    events_help = "Events of local ranks and their messages."
    requests_help = "Requests to controllers, by request (session, register, heartbeat, reports) and outcome."
    by_label: list[tuple[_Kind, str, str, str, Mapping[str, float]]] = [
        (GaugeMetricFamily, "build_info", "The agent's version.", "version", {m.version: 1}),
        (GaugeMetricFamily, "snapshot_interval_steps", interval_help, "run", m.snapshot_interval_steps),
        (GaugeMetricFamily, "findings", "Active findings, by severity.", "severity", by_severity),
        (GaugeMetricFamily, "findings_by_kind", "Active findings, by kind.", "kind", by_kind),
        (GaugeMetricFamily, "unwatched_gpus", "GPUs of other vendors than NVIDIA.", "vendor", unwatched),
        (CounterMetricFamily, "kernel_lines", lines_help, "rule", lines),
        (GaugeMetricFamily, "resident_memory_bytes", memory_help, "process", memory),
        (CounterMetricFamily, "local_events", events_help, "event", m.local_event_counts),
        (CounterMetricFamily, "connections_refused", "Refused local connections.", "reason", m.refused_connections),
    ]
    for name, help_text, value in gauges:
        if value is not None:
            yield _family(GaugeMetricFamily, f"agent_{name}", help_text, ("node",), [((m.node,), value)])
    for name, help_text, count in counters:
        yield _family(CounterMetricFamily, f"agent_{name}", help_text, ("node",), [((m.node,), count)])
    for kind, name, help_text, label, values in by_label:
        rows = (((m.node, key), value) for key, value in values.items())
        yield _family(kind, f"agent_{name}", help_text, ("node", label), rows)
    place = (m.node, m.domain.rack, m.domain.switch, m.domain.power)
    place_help = "1; the labels are the node's failure domains, to be joined by node."
    yield _family(
        GaugeMetricFamily, "agent_domain_info", place_help, ("node", "rack", "switch", "power"), [(place, 1.0)]
    )
    outcomes = (((m.node, *key), count) for key, count in m.requests.items())
    yield _family(CounterMetricFamily, "agent_requests", requests_help, ("node", "request", "outcome"), outcomes)


def _fabric_gauges(report: SensorReport | None) -> Iterator[tuple[str, str, float | None]]:
    """Yield the names, help texts and values of the NVLink fabric of the node."""
    fabric = NvlinkFabricSample() if report is None else report.poll.fabric
    manager = fabric.manager_running if fabric.switches else None
    yield "nvswitches", "NVSwitches on the PCI bus that the NVIDIA driver holds.", fabric.switches
    yield "fabric_manager_up", "1 while the Fabric Manager of these NVSwitches runs.", manager
    yield "unreachable_gpu_pairs", "Pairs of GPUs that do not reach each other over NVLink.", fabric.unreachable_pairs


def _vault_families(m: AgentMetrics) -> Iterator[Metric]:
    def one(kind: _Kind, name: str, help_text: str, value: float) -> Metric:
        return _family(kind, f"vault_{name}", help_text, ("node",), [((m.node,), value)])

    if m.is_vault_up is None:
        return
    yield one(GaugeMetricFamily, "up", "1 while the vault serves.", m.is_vault_up)
    yield one(CounterMetricFamily, "restarts", "Restarts of the vault.", m.vault_restarts)
    if m.vault_statistics is None:
        return
    for name, count in m.vault_statistics.counters.items():
        help_text = f"{name.replace('_', ' ').capitalize()} since the vault started."
        yield one(CounterMetricFamily, name, help_text, count)
    for name, level in m.vault_statistics.gauges.items():
        yield one(GaugeMetricFamily, name, f"Current {name.replace('_', ' ')}.", level)
    refused = (((m.node, code), count) for code, count in m.vault_statistics.refused.items())
    refused_help = "Requests that the vault refused, by error code."
    yield _family(CounterMetricFamily, "vault_requests_refused", refused_help, ("node", "code"), refused)


def _value(sample: GpuSample, gauge: _Gauge) -> float | None:
    value = sample.value(gauge.field)
    if value is None:
        return math.nan if sample.lost else None
    return float(value) * gauge.scale


def _gpu_families(node: str, report: SensorReport) -> Iterator[Metric]:
    models = {gpu.uuid: gpu.name for gpu in report.poll.known_gpus}
    labels = ("node", "gpu", "uuid", "pci_bus_id", "model")
    gpus = report.poll.gpus
    rows = [(gpu, (node, str(gpu.index), gpu.uuid, gpu.pci_bus_id, models.get(gpu.uuid, ""))) for gpu in gpus]
    up = [(where, float(not sample.lost and not sample.error)) for sample, where in rows]
    yield _family(GaugeMetricFamily, "gpu_up", "0 when the GPU is lost or cannot be read.", labels, up)
    for gauge in _GPU:
        values = [(where, value) for sample, where in rows if (value := _value(sample, gauge)) is not None]
        if values:
            kind = CounterMetricFamily if gauge.is_counter else GaugeMetricFamily
            yield _family(kind, f"gpu_{gauge.name}", gauge.help, labels, values)
    reasons = [gpu.clocks.throttle_reasons or 0 for gpu in gpus]
    slowed = (((node, name), sum(bool(mask & bits) for mask in reasons)) for name, bits in THROTTLE_REASONS.items())
    slowed_help = "GPUs of the node that slow down, by NVML's reason."
    yield _family(GaugeMetricFamily, "gpu_throttled_gpus", slowed_help, ("node", "reason"), slowed)
    index = {gpu.pci_bus_id: str(gpu.index) for gpu in gpus}
    xids = (((node, index.get(bus, ""), bus, str(xid)), n) for (bus, xid), n in report.xid_counts.items())
    xid_labels = ("node", "gpu", "pci_bus_id", "xid")
    yield _family(CounterMetricFamily, "gpu_xids", "XIDs since the agent started.", xid_labels, xids)


def _port_up(port: PortSample) -> float | None:
    return None if port.presence is PortPresence.ELSEWHERE else port.up


_PORT: tuple[tuple[_Kind, str, str, Callable[[PortSample], float | None]], ...] = (
    (GaugeMetricFamily, "up", "1 while the port is active.", _port_up),
    (
        GaugeMetricFamily,
        "rate_bits_per_second",
        "Rate that the link negotiated.",
        lambda port: None if port.rate_gbps is None else port.rate_gbps * 1e9,
    ),
    (CounterMetricFamily, "errors", "Errors that the port counted.", lambda port: port.errors),
    (CounterMetricFamily, "link_downs", "Times that the link went down.", lambda port: port.link_downs),
)


def _link_families(node: str, gpus: tuple[GpuSample, ...]) -> Iterator[Metric]:
    for kind, name, help_text, read in _LINK:
        rows = [
            ((node, str(gpu.index), gpu.pci_bus_id, str(link.link)), value)
            for gpu in gpus
            for link in gpu.nvlink.links
            if (value := read(link)) is not None
        ]
        if rows:
            yield _family(kind, f"nvlink_{name}", help_text, ("node", "gpu", "pci_bus_id", "link"), rows)


def _port_families(node: str, ports: tuple[PortSample, ...]) -> Iterator[Metric]:
    for kind, name, help_text, read in _PORT:
        rows = [((node, port.name, port.kind), value) for port in ports if (value := read(port)) is not None]
        yield _family(kind, f"port_{name}", help_text, ("node", "port", "kind"), rows)
    counts = [
        ((node, port.name, port.kind, counter), count) for port in ports for counter, count in port.counters.items()
    ]
    counts_help = "What the port's device counted, by the kernel's name; a fixed list of names."
    yield _family(CounterMetricFamily, "port_counts", counts_help, ("node", "port", "kind", "counter"), counts)


_PATH: tuple[tuple[str, str, Callable[[PathSample], float | None]], ...] = (
    ("free_ratio", "Free part of the file system.", lambda path: path.free_fraction),
    ("free_inodes_ratio", "Free part of its inodes.", lambda path: path.free_inode_fraction),
    ("free_memory_ratio", "Free part of what the vault leaves.", lambda path: path.free_memory_fraction),
    ("silent_seconds", "Time that the file system has not answered.", lambda path: path.silent_s),
)


def _host_families(node: str, poll: PollResult) -> Iterator[Metric]:
    host = poll.host
    pressures = {"cpu": host.cpu_pressure, "memory": host.memory_pressure, "io": host.io_pressure}
    rows = [((node, name), share) for name, share in pressures.items() if share is not None]
    pressure_help = "Share of five minutes in which a process (cpu) or all busy ones (memory, io) waited."
    yield _family(GaugeMetricFamily, "host_pressure_ratio", pressure_help, ("node", "resource"), rows)
    for name, help_text, value in (
        ("memory_available_ratio", "Available part of memory.", host.memory_available_fraction),
        ("open_files_ratio", "Open files out of those that the kernel permits.", host.open_files_fraction),
    ):
        if value is not None:
            yield _family(GaugeMetricFamily, f"host_{name}", help_text, ("node",), [((node,), value)])
    for name, help_text, read in _PATH:
        free = [((node, path.path), value) for path in poll.paths if (value := read(path)) is not None]
        yield _family(GaugeMetricFamily, f"host_path_{name}", help_text, ("node", "path"), free)


_HARDWARE: tuple[tuple[_Kind, str, str, str, str, str], ...] = (
    (CounterMetricFamily, "memory_corrected", "Corrected errors of a memory module.", "module", "memory", "corrected"),
    (CounterMetricFamily, "memory_uncorrected", "Uncorrected ones.", "module", "memory", "uncorrected"),
    (CounterMetricFamily, "pcie_corrected", "Corrected PCIe errors of a link's end.", "pci_bus_id", "pci", "corrected"),
    (CounterMetricFamily, "pcie_nonfatal", "Uncorrected ones after which it is good.", "pci_bus_id", "pci", "nonfatal"),
    (CounterMetricFamily, "pcie_fatal", "Uncorrected ones after which it is not.", "pci_bus_id", "pci", "fatal"),
    (GaugeMetricFamily, "raid_lost_disks", "Disks that a RAID array has lost.", "array", "array", "lost_disks"),
    (GaugeMetricFamily, "disk_up", "1 while the disk takes commands.", "disk", "disk", "is_up"),
    (CounterMetricFamily, "disk_failed_commands", "SCSI commands that failed.", "disk", "disk", "io_errors"),
    (GaugeMetricFamily, "unit_active", "1 while the unit is active.", "unit", "unit", "is_active"),
    (CounterMetricFamily, "unit_restarts", "Restarts of the unit by systemd.", "unit", "unit", "restarts"),
)
"""Kind, name and help of a family; its label; scope and field of the samples."""


def _hardware_families(node: str, hardware: HardwareSamples) -> Iterator[Metric]:
    for kind, name, help_text, label, scope, field in _HARDWARE:
        parts = ((part.name, getattr(part, field)) for part in hardware.by_scope[scope])
        rows = [((node, part), float(value)) for part, value in parts if value is not None]
        yield _family(kind, f"host_{name}", help_text, ("node", label), rows)


def _dcgm_families(node: str, report: SensorReport) -> Iterator[Metric]:
    models = {gpu.uuid: gpu.name for gpu in report.poll.known_gpus}
    families: list[tuple[str, str, str, Callable[[GpuSample], float | None]]] = [
        *(
            (each.name, "unknown" if each.is_counter else "gauge", each.help, partial(_value, gauge=each))
            for each in _DCGM
        ),
        ("DEV_FB_FREE", "gauge", "Framebuffer memory free (in MiB).", _free_mib),
        ("DEV_FB_USED", "gauge", "Framebuffer memory used (in MiB).", _used_mib),
        ("DEV_XID_ERRORS", "gauge", "Newest XID with an active finding, 0 for none.", partial(_xid, report=report)),
    ]
    driver = report.poll.driver_version
    for name, kind, help_text, read in families:
        family = Metric(f"DCGM_FI_{name}", help_text, kind)
        for sample in report.poll.gpus:
            if (value := read(sample)) is not None:
                labels = {
                    "gpu": str(sample.index),
                    "UUID": sample.uuid,
                    "pci_bus_id": sample.pci_bus_id,
                    "device": f"nvidia{sample.index}",
                    "modelName": models.get(sample.uuid, ""),
                    "hostname": node,
                    **({"DCGM_FI_DRIVER_VERSION": driver} if driver else {}),
                }
                family.add_sample(family.name, labels, value)
        if family.samples:
            yield family


def _dcgm_type(gauge: _Gauge) -> str:
    return "unknown" if gauge.is_counter else "gauge"


def _free_mib(sample: GpuSample) -> float | None:
    memory = sample.memory
    if memory.memory_total_bytes is None or memory.memory_used_bytes is None:
        return None
    return (memory.memory_total_bytes - memory.memory_used_bytes) / MIB


def _used_mib(sample: GpuSample) -> float | None:
    """Return the memory in use without the driver's, which is a series of its own."""
    memory = sample.memory
    if memory.memory_used_bytes is None:
        return None
    return max(0, memory.memory_used_bytes - (memory.memory_reserved_bytes or 0)) / MIB


def _xid(sample: GpuSample, report: SensorReport) -> float:
    """Return the XID of the GPU's newest finding; the subjects of GPU findings are bus ids or UUIDs."""
    names = (sample.pci_bus_id, sample.uuid)
    active = ((f.since, f.xid) for f in report.findings if f.xid is not None and f.subject in names)
    return float(max(active, default=(0.0, 0))[1])


# HTTP server of ``/metrics``: an event loop in a thread of its own, so that idle connections delay no scrape.

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Open connections. One more closes the oldest: a scraper sends its request at once and is answered in milliseconds."""
REQUEST_TIMEOUT_S = 4.0
"""Seconds for one whole request and answer."""
MAX_HEAD_BYTES = 16 << 10
STOP_TIMEOUT_S = 2.0


class MetricsServer:
    """Serve the metrics of ``collector`` to clients that present ``token``; to all clients if ``token`` is None.

    ``address`` is the listening address. ``close`` ends the thread. Raises OSError if the address cannot be bound.
    """

    def __init__(
        self, host: str, port: int, token: Callable[[], str] | None, collector: Collector, clock: Clock
    ) -> None:
        # Without describing, or registering would collect before there are metrics.
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        self._token = token
        self._log = LogThrottle(log, clock.monotonic)
        self._open: dict[asyncio.Task[None], None] = {}
        self.refused_count = 0
        """The number of requests without the token."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        async with await asyncio.start_server(self._on_connection, sock=listener, limit=MAX_HEAD_BYTES):
            await self._ending.wait()
            for task in self._open:
                task.cancel()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = None
        if len(self._open) > MAX_CONNECTIONS:
            next(iter(self._open)).cancel()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
        except (OSError, EOFError, asyncio.LimitOverrunError, EverstepError) as error:
            if not isinstance(error, asyncio.IncompleteReadError) or error.partial:  # else a check of the port
                peer = writer.get_extra_info("peername")
                self._log(logging.INFO, "a scrape from %s failed: %s", peer, str(error) or type(error).__name__)
            writer.transport.abort()
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._open.pop(task, None)
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        """Return the whole answer to a request."""
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path = [*first.split(" "), "", ""][:2]
        if method != "GET":
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"use GET\n", more=("Allow: GET",))
        if path.partition("?")[0] != "/metrics":
            return _response(HTTPStatus.NOT_FOUND, b"only /metrics is served here\n")
        if self._token is not None and (refusal := self._refusal(self._token(), lines)):
            return refusal
        try:
            content = generate_latest(self._registry)
        except TimeoutError:
            return _response(HTTPStatus.SERVICE_UNAVAILABLE, b"the agent's event loop does not answer\n")
        return _response(HTTPStatus.OK, content, CONTENT_TYPE_LATEST)

    def _refusal(self, token: str, lines: list[str]) -> bytes:
        """Return the answer to a request without the token; empty if the request has it."""
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        shown = headers.get("authorization", "").encode("latin-1")
        if token and hmac.compare_digest(shown, f"Bearer {token}".encode()):
            return b""
        self.refused_count += 1
        why = b"send the token of --metrics-token-file as a Bearer token\n"
        return _response(HTTPStatus.UNAUTHORIZED, why, more=("WWW-Authenticate: Bearer",))


def _response(
    status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8", more: tuple[str, ...] = ()
) -> bytes:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Type: {content_type}"]
    lines += [f"Content-Length: {len(body)}", "Connection: close", *more]
    return "\r\n".join((*lines, "", "")).encode() + body

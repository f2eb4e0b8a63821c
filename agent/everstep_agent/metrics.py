"""Export ``/metrics``: the agent's own state and the newest GPU samples, as Prometheus families.

A lost GPU keeps its series: ``everstep_gpu_up`` is 0 and its gauges are NaN, so that nothing vanishes or freezes. A
value that the device does not offer has no series.

``dcgm_names`` adds those default series of dcgm-exporter that NVML can fill; the profiling ones (DCGM_FI_PROF_*) and
the encoder's need DCGM's own counters. Units are dcgm-exporter's: energy in mJ, memory in MiB, utilization in percent.
Unlike there, DCGM_FI_DEV_XID_ERRORS returns to 0 when the XID's finding has cleared.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import http.server
import logging
import math
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from everstep.clock import Clock
from everstep.log_throttle import LogThrottle
from everstep.vocabulary import Finding, Severity
from everstep.wire.v1.local import StatisticsAnswer
from everstep_agent.sensors.samples import GpuSample
from everstep_agent.sensors.sensor_messages import SensorReport

MIB = 1 << 20


class AgentMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the agent's numbers, taken in its event loop."""

    node: str
    version: str
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
    is_vault_up: bool
    vault_restarts: int
    vault_statistics: StatisticsAnswer | None
    processes: Mapping[str, int]


class _Gauge(msgspec.Struct, frozen=True):
    """A field of ``GpuSample`` and its metric family."""

    name: str
    help: str
    field: str
    is_counter: bool = False
    scale: float = 1.0


_GPU = (
    _Gauge("temperature_celsius", "Temperature of the GPU.", "temperature_c"),
    _Gauge("temperature_margin_celsius", "Degrees left until the GPU slows down.", "temperature_margin_c"),
    _Gauge("memory_temperature_celsius", "Temperature of the GPU's memory.", "memory_temperature_c"),
    _Gauge("power_watts", "Power drawn.", "power_w"),
    _Gauge("power_limit_watts", "Power limit in force.", "power_limit_w"),
    _Gauge("energy_joules", "Energy used since the driver was loaded.", "energy_j", is_counter=True),
    _Gauge("sm_clock_hertz", "Clock of the streaming multiprocessors.", "sm_clock_mhz", scale=1e6),
    _Gauge("memory_clock_hertz", "Clock of the memory.", "memory_clock_mhz", scale=1e6),
    _Gauge("utilization_ratio", "Share of the time that a kernel was running.", "gpu_utilization"),
    _Gauge("memory_utilization_ratio", "Share of the time that memory was read or written.", "memory_utilization"),
    _Gauge("memory_used_bytes", "Memory in use.", "memory_used_bytes"),
    _Gauge("memory_total_bytes", "Memory there is.", "memory_total_bytes"),
    _Gauge("throttled_by_hardware", "1 while the hardware slows the GPU down.", "hardware_throttled"),
    _Gauge("throttled_by_heat", "1 while heat slows the GPU down.", "heat_throttled"),
    _Gauge("ecc_correctable", "Corrected memory errors since the driver was loaded.", "ecc_corrected", is_counter=True),
    _Gauge(
        "ecc_uncorrectable",
        "Uncorrected memory errors since the driver was loaded.",
        "ecc_uncorrected",
        is_counter=True,
    ),
    _Gauge("remapped_rows_correctable", "Memory rows remapped after corrected errors.", "remapped_corrected"),
    _Gauge("remapped_rows_uncorrectable", "Memory rows remapped after uncorrected errors.", "remapped_uncorrected"),
    _Gauge("row_remap_pending", "1 while a row waits for a reset to be remapped.", "remap_pending"),
    _Gauge("row_remap_failed", "1 when a row could not be remapped.", "remap_failure"),
    _Gauge("retired_pages", "Memory pages retired (before Ampere).", "retired_pages"),
    _Gauge("pcie_replays", "PCIe packets sent again.", "pcie_replays", is_counter=True),
    _Gauge("pcie_link_generation", "PCIe generation in use (lower while idle).", "pcie_generation"),
    _Gauge("pcie_link_width", "PCIe lanes in use.", "pcie_width"),
    _Gauge("nvlinks", "NVLinks there are.", "nvlinks"),
    _Gauge("nvlinks_down", "NVLinks that are down.", "nvlinks_down"),
    _Gauge("nvlink_errors", "NVLink errors.", "nvlink_errors", is_counter=True),
    _Gauge("processes", "Compute processes on the GPU.", "processes"),
)

_DCGM = (
    _Gauge("SM_CLOCK", "SM clock frequency (in MHz).", "sm_clock_mhz"),
    _Gauge("MEM_CLOCK", "Memory clock frequency (in MHz).", "memory_clock_mhz"),
    _Gauge("MEMORY_TEMP", "Memory temperature (in C).", "memory_temperature_c"),
    _Gauge("GPU_TEMP", "GPU temperature (in C).", "temperature_c"),
    _Gauge("POWER_USAGE", "Power draw (in W).", "power_w"),
    _Gauge("TOTAL_ENERGY_CONSUMPTION", "Total energy consumption since boot (in mJ).", "energy_j", scale=1e3),
    _Gauge("PCIE_REPLAY_COUNTER", "Total number of PCIe retries.", "pcie_replays"),
    _Gauge("GPU_UTIL", "GPU utilization (in %).", "gpu_utilization", scale=100.0),
    _Gauge("MEM_COPY_UTIL", "Memory utilization (in %).", "memory_utilization", scale=100.0),
    _Gauge("FB_USED", "Framebuffer memory used (in MiB).", "memory_used_bytes", scale=1 / MIB),
    _Gauge("UNCORRECTABLE_REMAPPED_ROWS", "Rows remapped for uncorrectable errors.", "remapped_uncorrected"),
    _Gauge("CORRECTABLE_REMAPPED_ROWS", "Rows remapped for correctable errors.", "remapped_corrected"),
    _Gauge("ROW_REMAP_FAILURE", "Whether remapping of rows has failed.", "remap_failure"),
)


class AgentCollector(Collector):
    """Yield the metric families of one snapshot.

    Args:
        read_metrics: Takes the snapshot; called in the thread that serves the scrape.
        dcgm_names: Also yield dcgm-exporter's names.
    """

    def __init__(self, read_metrics: Callable[[], AgentMetrics], *, dcgm_names: bool) -> None:
        self._numbers = read_metrics
        self._dcgm_names = dcgm_names

    def collect(self) -> Iterator[Metric]:
        numbers = self._numbers()
        yield from _agent_families(numbers)
        yield from _vault_families(numbers)
        if numbers.sensor_report is not None:
            yield from _gpu_families(numbers.node, numbers.sensor_report)
            if self._dcgm_names:
                yield from _dcgm_families(numbers.node, numbers.sensor_report)


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process in bytes, or None if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * 4096


def _gauge(name: str, help_text: str, node: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        family = GaugeMetricFamily(f"everstep_agent_{name}", help_text, labels=("node",))
        family.add_metric((node,), value)
        yield family


def _counter(
    name: str, help_text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"everstep_{name}", help_text, labels=labels)
    for values, count in rows:
        family.add_metric(values, count)
    return family


def _agent_families(metrics: AgentMetrics) -> Iterator[Metric]:
    build = GaugeMetricFamily("everstep_agent_build_info", "The agent's version.", labels=("node", "version"))
    build.add_metric((metrics.node, metrics.version), 1)
    yield build
    yield from _gauge(
        "spool_reports", "Reports the controller has not acknowledged.", metrics.node, metrics.spool_reports
    )
    yield from _gauge("spool_bytes", "Bytes of them.", metrics.node, metrics.spool_bytes)
    yield from _gauge(
        "controller_silent_seconds",
        "Seconds since a controller answered a beat.",
        metrics.node,
        metrics.controller_silent_s,
    )
    yield from _gauge("clock_skew_seconds", "This clock ahead of the controller's.", metrics.node, metrics.clock_skew_s)
    yield from _gauge("connections", "Launchers and ranks connected.", metrics.node, metrics.connections)
    yield from _gauge("jobs", "Jobs known on the node.", metrics.node, metrics.jobs)
    apart = "Steps from one snapshot of a job's ranks to the next; 0: of announced steps only."
    paces = GaugeMetricFamily("everstep_agent_snapshot_interval_steps", apart, labels=("node", "run"))
    for job, every in metrics.snapshot_interval_steps.items():
        paces.add_metric((metrics.node, job), every)
    yield paces
    if metrics.sensor_report is not None:
        yield from _gauge(
            "sensor_poll_seconds", "How long the newest sensor poll took.", metrics.node, metrics.sensor_report.poll_s
        )
        yield from _gauge(
            "sensor_polled_at_seconds", "When it came (wall clock).", metrics.node, metrics.sensor_report.polled_at
        )
    node = ("node",)
    yield _counter(
        "agent_spool_dropped", "Reports lost over the spool's bounds.", node, [((metrics.node,), metrics.spool_dropped)]
    )
    yield _counter(
        "agent_reports_refused", "Reports no controller takes.", node, [((metrics.node,), metrics.spool_refused)]
    )
    yield _counter("agent_registrations", "Registrations answered.", node, [((metrics.node,), metrics.registrations)])
    restarts = metrics.sensor_report.sensor_restarts if metrics.sensor_report is not None else 0
    yield _counter("agent_sensor_restarts", "Ends of the sensor process.", node, [((metrics.node,), restarts)])
    yield _counter(
        "agent_requests",
        "What was asked of controllers, by request (session, register, heartbeat, reports) and outcome.",
        ("node", "request", "outcome"),
        (((metrics.node, request, outcome), count) for (request, outcome), count in metrics.requests.items()),
    )
    yield _counter(
        "agent_local_events",
        "What happened to local ranks and their words.",
        ("node", "event"),
        (((metrics.node, event), count) for event, count in metrics.local_event_counts.items()),
    )
    yield _counter(
        "agent_connections_refused",
        "Local connections turned away or cut.",
        ("node", "reason"),
        (((metrics.node, reason), count) for reason, count in metrics.refused_connections.items()),
    )
    yield _counter(
        "agent_scrapes_refused",
        "Requests for metrics without the token.",
        node,
        [((metrics.node,), metrics.refused_scrapes)],
    )
    yield _findings(metrics)
    memory = GaugeMetricFamily(
        "everstep_agent_resident_memory_bytes", "Resident memory of the agent's processes.", labels=("node", "process")
    )
    for process, pid in metrics.processes.items():
        if (size := resident_bytes(pid)) is not None:
            memory.add_metric((metrics.node, process), size)
    yield memory


def _findings(metrics: AgentMetrics) -> Metric:
    family = GaugeMetricFamily(
        "everstep_agent_findings", "Findings that hold, by severity.", labels=("node", "severity")
    )
    for severity in Severity:
        family.add_metric((metrics.node, str(severity)), sum(f.severity is severity for f in metrics.findings))
    return family


def _vault_families(metrics: AgentMetrics) -> Iterator[Metric]:
    up = GaugeMetricFamily("everstep_vault_up", "1 while the node's vault serves.", labels=("node",))
    up.add_metric((metrics.node,), float(metrics.is_vault_up))
    yield up
    yield _counter(
        "vault_restarts", "Ends of the vault's process.", ("node",), [((metrics.node,), metrics.vault_restarts)]
    )
    if metrics.vault_statistics is None:
        return
    for name, count in metrics.vault_statistics.counters.items():
        yield _counter(
            f"vault_{name}", f"{name.replace('_', ' ')} since the vault started.", ("node",), [((metrics.node,), count)]
        )
    for name, level in metrics.vault_statistics.gauges.items():
        family = GaugeMetricFamily(f"everstep_vault_{name}", f"{name.replace('_', ' ')} now.", labels=("node",))
        family.add_metric((metrics.node,), level)
        yield family
    yield _counter(
        "vault_requests_refused",
        "Requests the vault refused, by reason.",
        ("node", "code"),
        (((metrics.node, code), count) for code, count in metrics.vault_statistics.refused.items()),
    )


def _value(sample: GpuSample, gauge: _Gauge) -> float | None:
    value = getattr(sample, gauge.field)
    if value is None:
        return math.nan if sample.lost else None
    return float(value) * gauge.scale


def _gpu_families(node: str, report: SensorReport) -> Iterator[Metric]:
    models = {gpu.uuid: gpu.name for gpu in report.gpu_identities}
    labels = ("node", "gpu", "uuid", "pci_bus_id", "model")
    rows = [(gpu, (node, str(gpu.index), gpu.uuid, gpu.pci_bus_id, models.get(gpu.uuid, ""))) for gpu in report.gpus]
    up = GaugeMetricFamily("everstep_gpu_up", "0 when the GPU is lost or cannot be read.", labels=labels)
    for sample, where in rows:
        up.add_metric(where, float(not sample.lost and not sample.error))
    yield up
    for gauge in _GPU:
        kind = CounterMetricFamily if gauge.is_counter else GaugeMetricFamily
        family = kind(f"everstep_gpu_{gauge.name}", gauge.help, labels=labels)
        for sample, where in rows:
            if (value := _value(sample, gauge)) is not None:
                family.add_metric(where, value)
        if family.samples:
            yield family
    yield _xids(node, report)


def _xids(node: str, report: SensorReport) -> Metric:
    index = {gpu.pci_bus_id: str(gpu.index) for gpu in report.gpus}
    return _counter(
        "gpu_xids",
        "XIDs seen since the agent started.",
        ("node", "gpu", "pci_bus_id", "xid"),
        (((node, index.get(bus, ""), bus, str(xid)), n) for (bus, xid), n in report.xid_counts.items()),
    )


def _dcgm_families(node: str, report: SensorReport) -> Iterator[Metric]:
    models = {gpu.uuid: gpu.name for gpu in report.gpu_identities}
    extra = [
        (_Gauge("FB_FREE", "Framebuffer memory free (in MiB).", ""), _free_mib),
        (_Gauge("XID_ERRORS", "Newest XID whose finding holds, 0 for none.", ""), lambda s: _xid(s, report)),
    ]
    plain = [(gauge, lambda s, g=gauge: _value(s, g)) for gauge in _DCGM]
    for gauge, read in plain + extra:
        family = Metric(f"DCGM_FI_DEV_{gauge.name}", gauge.help, "unknown")
        for sample in report.gpus:
            value = read(sample)
            if value is not None:
                family.add_sample(family.name, _dcgm_labels(node, sample, models.get(sample.uuid, "")), value)
        if family.samples:
            yield family


def _dcgm_labels(node: str, sample: GpuSample, model: str) -> dict[str, str]:
    return {
        "gpu": str(sample.index),
        "UUID": sample.uuid,
        "pci_bus_id": sample.pci_bus_id,
        "device": f"nvidia{sample.index}",
        "modelName": model,
        "hostname": node,
    }


def _free_mib(sample: GpuSample) -> float | None:
    if sample.memory_total_bytes is None or sample.memory_used_bytes is None:
        return None
    return (sample.memory_total_bytes - sample.memory_used_bytes) / MIB


def _xid(sample: GpuSample, report: SensorReport) -> float:
    """Return the XID of the GPU's newest finding; the subjects of GPU findings are bus ids or UUIDs."""
    names = (sample.pci_bus_id, sample.uuid)
    held = [f for f in report.findings if f.xid is not None and f.subject in names]
    newest = max(held, key=lambda f: f.since, default=None)
    return float(newest.xid or 0) if newest is not None else 0.0


# HTTP server of ``/metrics``: one thread, one request at a time, a bearer token.

log = logging.getLogger(__name__)

SOCKET_TIMEOUT_S = 2.0
"""Seconds to wait for a scraper's next byte."""
MAX_HEAD_BYTES = 16 << 10
"""Bytes of a scrape's request line and headers. The standard library's own limits add up to 6.5 MB."""
REQUEST_TIMEOUT_S = 4.0
"""Seconds for one whole request and answer; other scrapers wait meanwhile."""


class MetricsServer:
    """Serve the metrics of ``collector`` to clients that present ``token``.

    ``address`` is the listening address and ``refused_count`` the number of requests without the token. ``close`` ends
    the thread. Raises OSError if the address cannot be bound.
    """

    def __init__(self, host: str, port: int, token: Callable[[], str], collector: Collector, clock: Clock) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_LazyCollector(collector))
        self.refused_count = 0
        self._server = _MetricsTcpServer((host, port), _handler(registry, token, self._count_refused), clock)
        bound = self._server.server_address
        self.address = f"{host}:{bound[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.5,), name="metrics", daemon=True)
        self._thread.start()

    def _count_refused(self) -> None:
        self.refused_count += 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(SOCKET_TIMEOUT_S)


class _LazyCollector(Collector):
    """Keep the registry from collecting at registration, when no metrics exist yet."""

    def __init__(self, inner: Collector) -> None:
        self._inner = inner

    def collect(self):  # type: ignore[no-untyped-def]
        return self._inner.collect()

    def describe(self) -> list[object]:
        return []


class _MetricsTcpServer(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(
        self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler], clock: Clock
    ) -> None:
        self._say = LogThrottle(log, clock.monotonic)
        super().__init__(address, handler)

    def process_request(self, request: socket.socket, client_address: Any) -> None:  # type: ignore[override]
        late = threading.Timer(REQUEST_TIMEOUT_S, _close_connection, (request,))
        late.daemon = True
        late.start()
        try:
            super().process_request(request, client_address)
        finally:
            late.cancel()

    def handle_error(self, request: object, client_address: object) -> None:
        self._say(logging.INFO, "a scrape from %s failed: %s", client_address, sys.exception() or "no reason")


def _close_connection(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # already answered
        request.shutdown(socket.SHUT_RDWR)


class _RequestHead:
    """Read a request's head from ``inner``; refuse one longer than MAX_HEAD_BYTES like an overlong line."""

    def __init__(self, inner: BufferedIOBase) -> None:
        self._inner = inner
        self._remaining_bytes = MAX_HEAD_BYTES

    def readline(self, size: int) -> bytes:
        """Read one line. Raises LineTooLong if the head exceeds its limit."""
        if self._remaining_bytes < 0:
            raise http.client.LineTooLong("head")
        line = self._inner.readline(min(size, self._remaining_bytes + 1))
        self._remaining_bytes -= len(line)
        return line

    def close(self) -> None:
        self._inner.close()


def _handler(
    registry: CollectorRegistry, token: Callable[[], str], count_refused: Callable[[], None]
) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = SOCKET_TIMEOUT_S
        raw_requestline: bytes

        def setup(self) -> None:
            super().setup()
            self.rfile = _RequestHead(self.rfile)  # type: ignore[assignment]

        def parse_request(self) -> bool:
            if len(self.raw_requestline) <= MAX_HEAD_BYTES:
                return super().parse_request()
            self.command, self.request_version, self.requestline = "GET", self.protocol_version, ""
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return False

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self._answer(HTTPStatus.NOT_FOUND, b"only /metrics is here\n", "text/plain")
            elif not self._allowed():
                count_refused()
                self._answer(
                    HTTPStatus.UNAUTHORIZED, b"show the token of --metrics-token-file as Bearer\n", "text/plain"
                )
            else:
                self._show()

        def _show(self) -> None:
            try:
                content = generate_latest(registry)
            except TimeoutError:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the agent's event loop does not answer\n", "text/plain")
            else:
                self._answer(HTTPStatus.OK, content, CONTENT_TYPE_LATEST)

        def _allowed(self) -> bool:
            shown = self.headers.get("Authorization", "").encode()
            expected = token()
            return bool(expected) and hmac.compare_digest(shown, f"Bearer {expected}".encode())

        def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            if status is HTTPStatus.UNAUTHORIZED:
                self.send_header("WWW-Authenticate", "Bearer")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    return Handler

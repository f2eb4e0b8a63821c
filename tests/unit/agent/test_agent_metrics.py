"""The metrics on ``/metrics``, and the access to them."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import urllib.error
import urllib.request
from typing import Any

import msgspec
import pytest
from prometheus_client.core import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from everstep.clock import ManualClock
from everstep.vocabulary import Finding, FindingKind, Severity
from everstep.wire.v1.agent import Domain, Gpu
from everstep.wire.v1.local import StatisticsAnswer
from everstep_agent import metrics
from everstep_agent.drivers.gpu_samples import FabricSample, GpuSample, LinkSample
from everstep_agent.drivers.samples import (
    DiskSample,
    HardwareSamples,
    HostSample,
    MemoryModuleSample,
    NvlinkFabricSample,
    OtherGpusSample,
    PathSample,
    PortPresence,
    PortSample,
)
from everstep_agent.metrics import AgentCollector, AgentMetrics, MetricsServer, resident_bytes
from everstep_agent.sensors.gpu import GpuSensor
from everstep_agent.sensors.sensor_messages import PollResult, SensorReport
from everstep_agent.virtual.scenario import VirtualMachine
from tests.support.agents.sensors import BUS, Control, gpu, with_values

DEADLINE_S = 60.0
SAMPLE = gpu(
    uuid="GPU-0",
    temperature_c=45,
    power_w=320.0,
    energy_j=12.5,
    gpu_utilization=0.9,
    memory_used_bytes=3 << 30,
    memory_total_bytes=80 << 30,
    ecc_uncorrected=2,
)
XID = Finding(kind=FindingKind.GPU_XID, subject=BUS, severity=Severity.CRITICAL, message="m", xid=79, since=1.0)


def a_report(*gpus: GpuSample, ports: tuple[PortSample, ...] = (), **more: Any) -> SensorReport:
    identity = Gpu(index=0, uuid="GPU-0", name="H100", pci_bus_id=BUS, memory_bytes=80 << 30)
    poll = PollResult(is_full=True, known_gpus=(identity,), gpus=gpus, ports=ports)
    return SensorReport(poll=poll, xid_counts={(BUS, 79): 3}, line_counts={"nfs-not-responding": 5, "sxid": 2}, **more)


def numbers(**changes: Any) -> AgentMetrics:
    fields: dict[str, Any] = {
        "node": "n1",
        "version": "0.1.0",
        "domain": Domain(rack="r1"),
        "sensor_report": a_report(SAMPLE),
        "findings": (XID,),
        "spool_reports": 4,
        "spool_bytes": 100,
        "spool_dropped": 1,
        "spool_refused": 0,
        "requests": {("heartbeat", "ok"): 7},
        "registrations": 1,
        "controller_silent_s": 0.5,
        "local_event_counts": {"ranks_lost": 2},
        "refused_connections": {"forbidden": 1},
        "refused_scrapes": 5,
        "connections": 3,
        "jobs": 1,
        "snapshot_interval_steps": {"job": 3},
        "clock_skew_s": 0.25,
        "is_vault_up": True,
        "vault_restarts": 0,
        "vault_statistics": StatisticsAnswer(
            request=1, counters={"fetched_bytes": 9}, refused={"stale": 1}, gauges={"sealed_slots": 4}
        ),
        "processes": {"supervisor": 1},
    }
    return AgentMetrics(**{**fields, **changes})


def shown(*, dcgm_names: bool = False, **changes: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    collector = AgentCollector(lambda: numbers(**changes), dcgm_names=dcgm_names)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def value(samples: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    found = [v for (n, have), v in samples.items() if n == name and labels.items() <= dict(have).items()]
    assert len(found) == 1, f"{name} {labels}: {len(found)} series"
    return found[0]


def test_agents_own_state_is_shown() -> None:
    samples = shown()
    assert value(samples, "everstep_agent_spool_reports", node="n1") == 4
    assert value(samples, "everstep_agent_spool_dropped_total") == 1
    assert value(samples, "everstep_agent_requests_total", request="heartbeat", outcome="ok") == 7
    assert value(samples, "everstep_agent_local_events_total", event="ranks_lost") == 2
    assert value(samples, "everstep_agent_connections_refused_total", reason="forbidden") == 1
    assert value(samples, "everstep_agent_findings", severity="critical") == 1
    assert value(samples, "everstep_agent_findings_by_kind", kind="gpu.xid") == 1
    assert value(samples, "everstep_agent_kernel_lines_total", rule="nfs-not-responding") == 5
    assert value(samples, "everstep_agent_kernel_lines_total", rule="sxid") == 2
    assert value(samples, "everstep_agent_controller_silent_seconds") == 0.5
    assert value(samples, "everstep_agent_clock_skew_seconds") == 0.25
    assert value(samples, "everstep_agent_snapshot_interval_steps", node="n1", run="job") == 3


def test_vault_counters_and_vault_absence_are_shown() -> None:
    samples = shown()
    assert value(samples, "everstep_vault_up") == 1
    assert value(samples, "everstep_vault_fetched_bytes_total") == 9
    assert value(samples, "everstep_vault_sealed_slots") == 4
    assert value(samples, "everstep_vault_requests_refused_total", code="stale") == 1
    assert value(shown(is_vault_up=False, vault_statistics=None), "everstep_vault_up") == 0


def test_failure_domains_are_labels_of_an_info_series() -> None:
    assert value(shown(), "everstep_agent_domain_info", node="n1", rack="r1", switch="", power="") == 1


def test_nvlinks_have_series_of_their_own() -> None:
    links = (LinkSample(link=0, up=True, errors=0), LinkSample(link=7, up=False, errors=5))
    samples = shown(sensor_report=a_report(gpu(uuid="GPU-0", links=links)))
    assert value(samples, "everstep_nvlink_up", gpu="0", link="7") == 0
    assert value(samples, "everstep_nvlink_errors_total", gpu="0", link="7") == 5
    assert value(samples, "everstep_nvlink_errors_total", gpu="0", link="0") == 0
    assert not any(name == "everstep_nvlink_discards_total" for name, _ in samples)


def test_fabric_and_gpus_of_other_vendors_have_series() -> None:
    fabric = NvlinkFabricSample(switches=4, manager_running=False, unreachable_pairs=1)
    other = OtherGpusSample(vendor="AMD", unwatched=8)
    joining = gpu(uuid="GPU-0", fabric=FabricSample(state=2), c2c_links_down=1)
    report = a_report(joining)
    poll = msgspec.structs.replace(report.poll, fabric=fabric, other_gpus=(other,))
    samples = shown(sensor_report=msgspec.structs.replace(report, poll=poll))
    assert value(samples, "everstep_agent_nvswitches", node="n1") == 4
    assert value(samples, "everstep_agent_fabric_manager_up") == 0
    assert value(samples, "everstep_agent_unreachable_gpu_pairs") == 1
    assert value(samples, "everstep_agent_unwatched_gpus", vendor="AMD") == 8
    assert value(samples, "everstep_gpu_nvlink_fabric_state", gpu="0") == 2
    assert value(samples, "everstep_gpu_c2c_links_down", gpu="0") == 1


def test_lost_gpu_keeps_its_series_with_up_zero() -> None:
    samples = shown(sensor_report=a_report(gpu(uuid="GPU-0", lost=True)))
    assert value(samples, "everstep_gpu_up", gpu="0") == 0
    assert math.isnan(value(samples, "everstep_gpu_temperature_celsius", gpu="0"))


def test_port_that_moved_into_a_container_has_no_series() -> None:
    here = PortSample(name="mlx5_0/1", kind="infiniband", up=False, was_up=True)
    moved = PortSample(name="mlx5_1/1", kind="infiniband", up=False, was_up=True, presence=PortPresence.ELSEWHERE)
    samples = shown(sensor_report=a_report(ports=(here, moved)))
    ports = [dict(labels)["port"] for name, labels in samples if name == "everstep_port_up"]
    assert ports == ["mlx5_0/1"]


def test_counters_of_a_port_are_series_by_name() -> None:
    counters = {"symbol_error": 3, "port_rcv_errors": 4, "out_of_buffer": 9}
    port = PortSample(name="mlx5_0/1", kind="infiniband", up=True, was_up=True, counters=counters)
    samples = shown(sensor_report=a_report(ports=(port,)))
    assert value(samples, "everstep_port_counts_total", port="mlx5_0/1", counter="out_of_buffer") == 9
    assert value(samples, "everstep_port_errors_total", port="mlx5_0/1") == 7


def test_machine_around_the_gpus_has_series() -> None:
    host = HostSample(io_pressure=0.25, open_files_fraction=0.5)
    paths = (PathSample(path="/", free_fraction=0.75), PathSample(path="/dev/shm", free_memory_fraction=0.5))
    hardware = HardwareSamples(
        memory=(MemoryModuleSample(name="mc0/dimm1", corrected=3),), disks=(DiskSample(name="nvme0", state="dead"),)
    )
    poll = PollResult(is_full=True, host=host, paths=paths, hardware=hardware)
    samples = shown(sensor_report=SensorReport(poll=poll))
    assert value(samples, "everstep_host_pressure_ratio", resource="io") == 0.25
    assert value(samples, "everstep_host_open_files_ratio") == 0.5
    assert value(samples, "everstep_host_path_free_ratio", path="/") == 0.75
    assert value(samples, "everstep_host_memory_corrected_total", module="mc0/dimm1") == 3
    assert value(samples, "everstep_host_disk_up", disk="nvme0") == 0
    assert value(samples, "everstep_host_path_free_memory_ratio", path="/dev/shm") == 0.5


def test_dcgm_exporters_names_units_and_labels_are_exact() -> None:
    samples = shown(dcgm_names=True)
    labels = {
        "gpu": "0",
        "UUID": "GPU-0",
        "pci_bus_id": BUS,
        "device": "nvidia0",
        "modelName": "H100",
        "hostname": "n1",
    }
    assert value(samples, "DCGM_FI_DEV_GPU_TEMP", **labels) == 45
    assert value(samples, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", **labels) == 12500
    assert value(samples, "DCGM_FI_DEV_GPU_UTIL", **labels) == 90
    assert value(samples, "DCGM_FI_DEV_FB_USED", **labels) == 3 << 10
    assert value(samples, "DCGM_FI_DEV_FB_FREE", **labels) == 77 << 10
    assert not any(name.startswith("DCGM") for name, _ in shown())


DCGM_DEFAULTS = [
    "SM_CLOCK",
    "MEM_CLOCK",
    "MEMORY_TEMP",
    "GPU_TEMP",
    "POWER_USAGE",
    "TOTAL_ENERGY_CONSUMPTION",
    "PCIE_REPLAY_COUNTER",
    "GPU_UTIL",
    "MEM_COPY_UTIL",
    "ENC_UTIL",
    "DEC_UTIL",
    "XID_ERRORS",
    "FB_FREE",
    "FB_USED",
    "FB_RESERVED",
    "NVLINK_BANDWIDTH_TOTAL",
    "VGPU_LICENSE_STATUS",
    "UNCORRECTABLE_REMAPPED_ROWS",
    "CORRECTABLE_REMAPPED_ROWS",
    "ROW_REMAP_FAILURE",
]
DCGM_PROFILING = ["GR_ENGINE_ACTIVE", "PIPE_TENSOR_ACTIVE", "DRAM_ACTIVE", "PCIE_TX_BYTES", "PCIE_RX_BYTES"]
DASHBOARD_12239 = (
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
)
"""What the panels of Grafana's dashboard 12239 ask for, with gpu and instance as labels."""


def dcgm_names(machine: VirtualMachine) -> set[str]:
    """Return the families of dcgm-exporter for the GPUs of a machine, through the real sensor."""
    sensor = GpuSensor(slow_every=1, set_activity=lambda activity: None, reads_gpm=True)
    sensor.poll()
    poll = PollResult(is_full=True, gpus=sensor.poll(), driver_version="570.1")
    collector = AgentCollector(lambda: numbers(sensor_report=SensorReport(poll=poll)), dcgm_names=True)
    families = [family for family in collector.collect() if family.name.startswith("DCGM_FI_")]
    labels = [sample.labels for family in families for sample in family.samples]
    assert all(each["DCGM_FI_DRIVER_VERSION"] == "570.1" and each["gpu"].isdigit() for each in labels)
    assert all(len(family.samples) == len(machine.gpus) for family in families)
    return {family.name.removeprefix("DCGM_FI_") for family in families}


def test_all_default_series_of_dcgm_exporter_are_shown(machine: VirtualMachine, control: Control) -> None:
    devices, profiling = (
        {f"{kind}_{name}" for name in names} for kind, names in (("DEV", DCGM_DEFAULTS), ("PROF", DCGM_PROFILING))
    )
    assert dcgm_names(machine) == devices | profiling
    assert {name.removeprefix("DCGM_FI_") for name in DASHBOARD_12239} <= devices | profiling
    control.write(gpus={str(index): {"gpm": False} for index in range(len(machine.gpus))})
    machine.reload_control()
    assert dcgm_names(machine) == devices


def test_memory_that_the_driver_reserves_is_not_used() -> None:
    reserving = with_values(SAMPLE, memory_reserved_bytes=1 << 30)
    samples = shown(dcgm_names=True, sensor_report=a_report(reserving))
    assert value(samples, "DCGM_FI_DEV_FB_USED") == 2 << 10
    assert value(samples, "DCGM_FI_DEV_FB_RESERVED") == 1 << 10
    assert value(samples, "DCGM_FI_DEV_FB_FREE") == 77 << 10


def test_every_family_has_a_help_and_one_type() -> None:
    registry = CollectorRegistry()
    registry.register(AgentCollector(numbers, dcgm_names=True))
    families = list(registry.collect())
    assert len({f.name for f in families}) == len(families)
    assert all(f.documentation for f in families)


def test_missing_process_has_no_resident_bytes() -> None:
    assert resident_bytes(1 << 22) is None


def ask(server: MetricsServer, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{server.address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_server_requires_the_token() -> None:
    tokens = ["secret"]
    server = MetricsServer("127.0.0.1", 0, lambda: tokens[0], AgentCollector(numbers, dcgm_names=True), ManualClock())
    try:
        status, text = ask(server, Authorization="Bearer secret")
        assert status == 200
        assert any(f.name == "everstep_gpu_up" for f in text_string_to_metric_families(text))
        assert ask(server)[0] == 401
        assert ask(server, Authorization="Bearer other")[0] == 401
        assert ask(server, "/", Authorization="Bearer secret")[0] == 404
        tokens[0] = ""
        assert ask(server, Authorization="Bearer ")[0] == 401
        assert server.refused_count == 3
    finally:
        server.close()


@pytest.mark.slow
def test_failed_scrape_does_not_stop_the_metrics_server(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> AgentMetrics:
        raise TimeoutError("the event loop is busy")

    server = MetricsServer("127.0.0.1", 0, lambda: "secret", AgentCollector(fails, dcgm_names=False), ManualClock())
    try:
        for _ in range(2):
            assert ask(server, Authorization="Bearer secret")[0] == 503
    finally:
        server.close()


@pytest.mark.slow
def test_slow_scraper_does_not_block_other_scrapers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 0.2)
    server = MetricsServer("127.0.0.1", 0, lambda: "secret", AgentCollector(numbers, dcgm_names=False), ManualClock())
    ended = threading.Event()

    def drip(slow: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(0.02):
                slow.sendall(b"x")

    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as slow:
        dripping = threading.Thread(target=drip, args=(slow,))
        dripping.start()
        try:
            assert ask(server, Authorization="Bearer secret")[0] == 200
        finally:
            ended.set()
            dripping.join()
            server.close()


@pytest.mark.parametrize("head", [b"", b"GET /met"], ids=["silent", "unfinished"])
def test_idle_strangers_do_not_delay_scrapes(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 2 * DEADLINE_S)  # no stranger leaves before the scraper gives up
    server = MetricsServer("127.0.0.1", 0, lambda: "secret", AgentCollector(numbers, dcgm_names=False), ManualClock())
    host, _, port = server.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        for _ in range(2 * metrics.MAX_CONNECTIONS):
            line = stack.enter_context(socket.create_connection((host, int(port)), DEADLINE_S))
            line.sendall(head)
        assert ask(server, Authorization="Bearer secret")[0] == 200


def test_metrics_server_answers_strange_requests() -> None:
    server = MetricsServer("127.0.0.1", 0, lambda: "secret", AgentCollector(numbers, dcgm_names=False), ManualClock())
    host, _, port = server.address.rpartition(":")
    try:
        for request, status in (
            (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
            (b"\xff\r\n\r\n", b"405"),
            (b"GET /metrics\r\nAuthorization: Bearer \xc3\xa9\r\n\r\n", b"401"),
            (b"GET /metrics HTTP/1.1\r\nauthorization:Bearer secret\r\n\r\n", b"200"),
        ):
            with socket.create_connection((host, int(port)), DEADLINE_S) as line:
                line.sendall(request)
                assert line.recv(4096).split(b" ")[1] == status
        with socket.create_connection((host, int(port)), DEADLINE_S) as line, contextlib.suppress(ConnectionError):
            line.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * metrics.MAX_HEAD_BYTES * 4)
            assert line.recv(4096) == b""
    finally:
        server.close()

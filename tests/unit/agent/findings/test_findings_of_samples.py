from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.vocabulary import Action, Finding, Mode, Severity
from everstep_agent.drivers.gpu_samples import XidEvent
from everstep_agent.drivers.samples import (
    HardwareSamples,
    MemoryModuleSample,
    OtherGpusSample,
    PciErrorSample,
    PortRole,
    PortSample,
    RaidArraySample,
    SensorState,
)
from everstep_agent.findings.assessment import AssessorState
from everstep_agent.findings.kernel_lines import MAX_LINE_FINDINGS
from everstep_agent.findings.xid_history import MAX_XID_RECORDS
from tests.support.agents.sensors import BUS, FELL_OFF, TimedAssessor, gpu

XID_79 = f"gpu.xid/{BUS}/79"


def only(judge: TimedAssessor) -> Finding:
    (finding,) = judge.assessor.findings
    return finding


def test_healthy_node_has_no_findings() -> None:
    judge = TimedAssessor()
    assert judge.polls(200, gpu(temperature_margin_c=40, ecc_uncorrected=0, nvlinks_down=0)) == set()


def test_gpu_off_the_bus_is_critical_at_its_first_line() -> None:
    judge = TimedAssessor()
    assert judge.lines(FELL_OFF) == {XID_79}
    finding = only(judge)
    assert (finding.xid, finding.severity, finding.action, finding.mode) == (
        79,
        Severity.CRITICAL,
        Action.DRAIN,
        Mode.ENFORCE,
    )
    assert finding.evidence["line"] == FELL_OFF
    assert finding.trace


def test_reboot_clears_a_fatal_xid() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu())
    judge.lines(FELL_OFF)
    assert judge.polls(5, gpu()) == {XID_79}
    assert judge.polls(1, gpu(), boot_id="boot-2") == set()


def test_energy_counter_reset_clears_a_fatal_xid() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu(energy_j=5000.0))
    judge.lines(FELL_OFF)
    assert judge.polls(1, gpu(energy_j=5010.0)) == {XID_79}
    assert judge.polls(1, gpu(energy_j=3.0)) == set()


def test_lost_gpu_answering_again_counts_as_reset() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu())
    judge.lines(FELL_OFF)
    assert judge.polls(3, gpu(lost=True, error="GPU is lost")) == {XID_79, f"gpu.lost/{BUS}"}
    assert judge.polls(1, gpu()) == {f"gpu.lost/{BUS}"}
    assert judge.polls(11, gpu()) == set()


def test_replaced_gpu_clears_findings_pending_repair() -> None:
    judge = TimedAssessor()
    assert judge.polls(1, gpu(remap_failure=1)) == {f"gpu.row_remap_failure/{BUS}"}
    assert judge.polls(100, gpu(remap_failure=0)) == {f"gpu.row_remap_failure/{BUS}"}
    assert judge.polls(1, gpu(uuid="GPU-b")) == set()


def test_application_xid_is_observed_and_expires_when_quiet() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu())
    judge.lines(f"NVRM: Xid (PCI:{BUS}): 13, pid=1, Graphics SM Warp Exception")
    assert (only(judge).severity, only(judge).mode) == (Severity.WARNING, Mode.OBSERVE)
    judge.clock.advance(590.0)
    assert judge.polls(1, gpu()) == {f"gpu.xid/{BUS}/13"}
    judge.clock.advance(20.0)
    assert judge.polls(1, gpu()) == set()


def test_event_seen_by_kernel_log_and_nvml_counts_once() -> None:
    judge = TimedAssessor()
    judge.lines(FELL_OFF)
    judge.assessor.process_xid_events([XidEvent(pci_bus_id=BUS, xid=79, source="nvml")], judge.now())
    assert judge.keys() == {XID_79}
    assert judge.assessor.xid_history.totals == {(BUS, 79): 1}


def test_garbage_log_keeps_findings_bounded() -> None:
    judge = TimedAssessor()
    judge.assessor.process_kernel_lines(
        (f"NVRM: Xid (PCI:0000:1b:00): {xid}, x" for xid in range(1000, 6000)), judge.now()
    )
    judge.assessor.process_kernel_lines((f"SXid (PCI:0000:{n:x}:00.0): 1, Fatal" for n in range(5000)), judge.now())
    assert len(judge.assessor.findings) == MAX_XID_RECORDS + MAX_LINE_FINDINGS + 1
    (overflow,) = [finding for finding in judge.assessor.findings if finding.rule == "kernel-lines-overflow"]
    assert (overflow.severity, overflow.action) == (Severity.WARNING, Action.NONE)
    assert judge.assessor.lines.totals == {"sxid": 5000, "kernel-lines-overflow": 9680}
    assert len(judge.assessor.xid_history.totals) == MAX_XID_RECORDS


def test_stronger_driver_action_overrides_the_xid_table() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu())
    judge.lines(f"NVRM: Xid (PCI:{BUS}): 13, pid=1, Graphics Exception")
    judge.lines(
        f"NVRM: Xid (PCI:{BUS}): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    )
    findings = {finding.key: finding for finding in judge.assessor.findings}
    assert findings.keys() == {f"gpu.xid/{BUS}/13", f"gpu.recovery_action/{BUS}"}
    assert {finding.action for finding in findings.values()} == {Action.REBOOT_NODE}
    assert {finding.severity for finding in findings.values()} == {Severity.CRITICAL}


def test_nvml_recovery_action_makes_a_finding_until_cleared() -> None:
    judge = TimedAssessor()
    assert judge.polls(1, gpu(recovery_action=1)) == {f"gpu.recovery_action/{BUS}"}
    assert only(judge).action is Action.RESET_GPU
    assert judge.polls(12, gpu(recovery_action=0)) == set()


@pytest.mark.parametrize("number", [8, 99, 0xFFFFFFFF])
def test_unknown_recovery_action_warns_without_eviction(number: int) -> None:
    """A newer driver may have a mild action of that number, and a broken field answers with all bits set."""
    judge = TimedAssessor()
    judge.lines(f"NVRM: Xid (PCI:{BUS}): 13, pid=1, Graphics Exception")
    judge.lines(f"NVRM: Xid (PCI:{BUS}): 154, GPU recovery action changed from 0x0 (None) to {number:#x} (Unheard of)")
    judge.polls(3, gpu(recovery_action=number))
    finding = next(finding for finding in judge.assessor.findings if finding.kind == "gpu.recovery_action")
    assert (finding.severity, finding.action) == (Severity.WARNING, Action.NONE)
    assert str(number) in finding.message
    assert not [each for each in judge.assessor.findings if each.mode is Mode.ENFORCE]


def test_unknown_uuid_is_no_exchange_of_the_gpu() -> None:
    judge = TimedAssessor()
    judge.polls(2, gpu())
    judge.lines(FELL_OFF)
    assert f"gpu.xid/{BUS}/79" in judge.polls(2, gpu(uuid=""))
    assert f"gpu.xid/{BUS}/79" in judge.polls(2, gpu())


def test_findings_of_one_key_show_the_worst_since_the_first() -> None:
    judge = TimedAssessor()
    judge.assessor.process_sensor_state(SensorState(hangs=1, detail="at gpu 3"), judge.now())
    first = only(judge)
    assert first.severity is Severity.WARNING
    judge.clock.advance(30.0)
    judge.assessor.process_sensor_state(SensorState(hangs=3, detail="at gpu 3"), judge.now())
    last = only(judge)
    assert (last.severity, last.since, last.trace, last.key) == (
        Severity.CRITICAL,
        first.since,
        first.trace,
        first.key,
    )


def test_unloadable_nvml_on_a_gpu_node_is_critical() -> None:
    judge = TimedAssessor()
    assert judge.polls(3, nvml_error="Unknown Error", nvml_error_code=999, pci_gpus_usable=8) == {"sensor.failed/nvml"}
    assert only(judge).severity is Severity.CRITICAL
    assert only(judge).mode is Mode.RECOMMEND


@pytest.mark.parametrize(
    ("code", "subject", "cure"),
    [(9, "nvidia-driver", "modprobe"), (12, "nvml-library", "install"), (18, "nvml-version", "reboot")],
)
def test_nvml_that_software_cures_is_no_ground_to_evict(code: int, subject: str, cure: str) -> None:
    closed = gpu(error="NVML is closed", is_closed=True)
    judge = TimedAssessor()
    upgrade = {"nvml_error": "closed", "nvml_error_code": code, "pci_gpus_usable": 0, "pci_gpus_unbound": 1}
    assert judge.polls(59, closed, **upgrade) == set()
    assert judge.polls(1, closed, **upgrade) == {f"sensor.failed/{subject}"}
    assert (only(judge).severity, only(judge).action) == (Severity.WARNING, Action.NONE)
    assert cure in only(judge).message
    assert judge.polls(7, gpu()) == set()


def test_hung_gpu_is_one_finding_that_names_it() -> None:
    judge = TimedAssessor()
    hung = gpu(error="NVML has not answered for 6 s about gpu 0", hung_s=6.0)
    assert judge.polls(10, hung) == {f"sensor.hung/{BUS}"}
    assert (only(judge).severity, only(judge).mode) == (Severity.WARNING, Mode.RECOMMEND)
    assert "about gpu 0" in only(judge).message
    judge.polls(1, msgspec.structs.replace(hung, hung_s=120.0))
    assert (only(judge).severity, only(judge).action) == (Severity.CRITICAL, Action.REBOOT_NODE)
    assert judge.polls(31, gpu()) == set()


def test_hung_initialization_of_nvml_is_not_an_absence_of_gpus() -> None:
    judge = TimedAssessor()
    assert judge.polls(50, pci_gpus_usable=8, nvml_busy_with="nvml initialization") == set()
    hung = {"nvml_busy_with": "nvml initialization", "nvml_hung_s": 3.0}
    assert judge.polls(3, pci_gpus_usable=8, **hung) == {"sensor.hung/nvml"}
    assert "nvml initialization" in only(judge).message


def test_nvml_let_go_by_order_is_quiet_for_an_hour() -> None:
    judge = TimedAssessor()
    closed = gpu(error="let go", is_closed=True)
    quiet = {"nvml_error_code": 9, "nvml_error": "closed", "pci_gpus_usable": 0, "pci_gpus_unbound": 1}
    assert judge.polls(100, closed, nvml_paused_s=100.0, **quiet) == set()
    assert judge.polls(10, nvml_paused_s=200.0, pci_gpus_usable=8) == set()
    assert judge.polls(1, closed, nvml_paused_s=3600.0, **quiet) == {"sensor.failed/nvml-pause"}
    assert (only(judge).severity, only(judge).action) == (Severity.WARNING, Action.NONE)


def test_machine_without_gpus_of_its_own_lacks_no_driver() -> None:
    assert TimedAssessor().polls(100, nvml_error="closed", nvml_error_code=9, pci_gpus_usable=0) == set()


def test_hidden_gpus_are_told_and_not_missed() -> None:
    judge = TimedAssessor()
    assert judge.polls(3, gpu(), pci_gpus_usable=1, pci_gpus_hidden=7) == {"sensor.failed/hidden-gpus"}
    assert (only(judge).severity, only(judge).action) == (Severity.INFO, Action.NONE)


def test_gpu_on_the_bus_missing_from_nvml_is_lost() -> None:
    judge = TimedAssessor()
    assert judge.polls(3, gpu(), pci_gpus_usable=2) == {"gpu.lost/gpus"}
    assert judge.polls(11, gpu(), pci_gpus_usable=1) == set()


def test_gpu_lost_before_agent_start_is_reported() -> None:
    judge = TimedAssessor()
    assert judge.polls(3, gpu(), pci_gpus_usable=2, nvml_error="GPU 1: handle: GPU is lost") == {"gpu.lost/gpus"}
    assert "GPU 1: handle" in only(judge).message


def test_nvml_listing_no_gpu_on_a_gpu_node_is_a_failure() -> None:
    assert TimedAssessor().polls(3, pci_gpus_usable=8) == {"sensor.failed/nvml"}


def test_frozen_telemetry_is_stale() -> None:
    judge = TimedAssessor()
    assert judge.polls(31, gpu(energy_j=42.0)) == {f"sensor.stale/{BUS}"}


@pytest.mark.parametrize(
    ("reasons", "key", "action"),
    [
        (0x48, f"gpu.throttled/{BUS}", Action.DRAIN),
        (0x20, f"gpu.throttled/{BUS}", Action.NONE),
        (0x88, "gpu.throttled/power-brake", Action.NONE),
    ],
)
def test_slowdowns_are_told_apart_by_cause(reasons: int, key: str, action: Action) -> None:
    judge = TimedAssessor()
    assert judge.polls(60, gpu(throttle_reasons=reasons)) == {key}
    assert (only(judge).action, only(judge).mode) == (action, Mode.RECOMMEND)
    assert judge.polls(121, gpu(throttle_reasons=0)) == set()


@pytest.mark.parametrize("reasons", [0x0, 0x1, 0x2, 0x4, 0x10, 0x100])
def test_power_cap_and_set_clocks_are_no_finding(reasons: int) -> None:
    assert TimedAssessor().polls(120, gpu(throttle_reasons=reasons)) == set()


def test_short_heat_is_no_finding_and_lasting_heat_is() -> None:
    hot = gpu(temperature_margin_c=0, memory_temperature_c=96, throttle_reasons=0x60)
    judge = TimedAssessor()
    assert judge.polls(9, hot) == set()
    assert judge.polls(60, gpu(temperature_margin_c=30, memory_temperature_c=60, throttle_reasons=0)) == set()
    assert judge.polls(20, hot) == {f"gpu.temperature/{BUS}", f"gpu.throttled/{BUS}"}
    tolerant = gpu(memory_temperature_c=96, memory_temperature_limit_c=105)
    assert TimedAssessor().polls(60, tolerant) == set()


@pytest.mark.parametrize(
    ("values", "key", "severity"),
    [
        ({"banks_without_spare_rows": 1}, f"gpu.row_remap_failure/{BUS}", Severity.WARNING),
        ({"retired_pages_pending": 1}, f"gpu.retired_pages/{BUS}", Severity.WARNING),
        ({"ecc_mode": 1, "ecc_mode_pending": 0}, f"gpu.setting/{BUS}", Severity.INFO),
        ({"mig_mode": 0, "mig_mode_pending": 1}, f"gpu.setting/{BUS}", Severity.INFO),
    ],
)
def test_spare_rows_and_pending_modes_are_told_until_over(values: dict[str, int], key: str, severity: Severity) -> None:
    judge = TimedAssessor()
    assert judge.polls(1, gpu(**values)) == {key}
    assert (only(judge).severity, only(judge).mode is Mode.ENFORCE) == (severity, False)
    assert judge.polls(62, gpu(**dict.fromkeys(values, 0))) == set()
    assert TimedAssessor().polls(1, gpu(**dict.fromkeys(values))) == set()


LEFT: dict[str, Any] = {
    "memory_used_bytes": 60 << 30,
    "processes": 0,
    "graphics_processes": 0,
    "sees_all_processes": True,
    "links_were_read": True,
}


def test_memory_without_a_process_is_information_after_minutes() -> None:
    judge = TimedAssessor()
    assert judge.polls(59, gpu(**LEFT)) == set()
    assert judge.polls(1, gpu(**LEFT)) == {f"gpu.memory_left/{BUS}"}
    assert (only(judge).severity, only(judge).message[:6]) == (Severity.INFO, "60 GiB")
    assert judge.polls(1, gpu(**LEFT | {"processes": 1})) == set()


@pytest.mark.parametrize(
    "values",
    [
        {"sees_all_processes": False},
        {"processes": None},
        {"graphics_processes": 1},
        {"mig_mode": 1},
        {"memory_used_bytes": 600 << 20},
        {"links_were_read": False},
    ],
)
def test_memory_of_hidden_or_other_processes_is_no_finding(values: dict[str, Any]) -> None:
    assert TimedAssessor().polls(200, gpu(**LEFT | values)) == set()


CARD = {"address": "946d:ae03:00f1:0000", "board": "MT_0000000838"}


def port(up: bool, was_up: bool = True) -> PortSample:
    return PortSample(name="mlx5_0/1", kind="infiniband", up=up, was_up=was_up, role=PortRole.COMPUTE, identity=CARD)


def test_fallen_port_is_a_fault_and_a_never_up_port_is_not() -> None:
    assert TimedAssessor().polls(10, ports=(port(up=False, was_up=False),)) == set()
    judge = TimedAssessor()
    assert judge.polls(3, ports=(port(up=False),)) == {"network.port_down/mlx5_0/1"}
    assert only(judge).evidence == CARD
    assert judge.polls(31, ports=(port(up=True),)) == set()


def test_kernel_panic_is_critical_until_the_next_boot() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu())
    judge.lines("Kernel panic - not syncing: Fatal exception")
    assert only(judge).severity is Severity.CRITICAL
    assert judge.polls(100, gpu()) == {"host.kernel/kernel-panic"}
    assert judge.polls(1, gpu(), boot_id="boot-2") == set()


def test_reset_only_findings_survive_an_agent_restart() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu(ecc_uncorrected=0))
    judge.lines(FELL_OFF)
    judge.polls(1, gpu(ecc_uncorrected=3))
    before = judge.assessor.findings
    kept = msgspec.json.decode(msgspec.json.encode(judge.assessor.export_state()), type=AssessorState)
    again = TimedAssessor(memory=kept)
    assert again.keys() == {XID_79, f"gpu.ecc_uncorrectable/{BUS}"}
    assert {f.since for f in again.assessor.findings} == {f.since for f in before}
    again.clock.advance(100.0)
    assert again.polls(2, gpu(ecc_uncorrected=3)) == {XID_79, f"gpu.ecc_uncorrectable/{BUS}"}
    assert again.polls(1, gpu(energy_j=0.5)) == set()


def test_boot_during_agent_absence_clears_boot_findings() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu())
    judge.lines(FELL_OFF)
    again = TimedAssessor(memory=judge.assessor.export_state())
    assert again.keys() == {XID_79}
    assert again.assessor.process_boot("boot-2")
    assert again.keys() == set()


@pytest.mark.parametrize("skew_s", [3.0, -3.0])
def test_clock_skew_from_the_controller_is_reported(skew_s: float) -> None:
    judge = TimedAssessor()
    from tests.support.agents.sensors import poll

    for _ in range(10):
        judge.clock.advance(1.0)
        judge.assessor.process_poll(poll(), skew_s, judge.now())
    assert judge.keys() == {"host.clock_skew/host"}


def test_gpus_of_another_vendor_are_told_until_they_leave() -> None:
    judge = TimedAssessor()
    assert judge.polls(1, other_gpus=(OtherGpusSample(vendor="AMD", unwatched=8),)) == {"sensor.failed/AMD"}
    (finding,) = judge.assessor.findings
    assert (finding.severity, finding.action) == (Severity.INFO, Action.NONE)
    assert "GPUs of AMD are not watched: this node has 8" in finding.message
    assert judge.polls(12, other_gpus=(OtherGpusSample(vendor="AMD", unwatched=0),)) == set()


def test_memory_module_is_named_below_its_controller() -> None:
    judge = TimedAssessor()
    module = MemoryModuleSample(name="mc0/dimm3", label="CPU0_C1_D0", corrected=0, uncorrected=1)
    judge.polls(1, hardware=HardwareSamples(is_new=True, memory=(module,)))
    assert (only(judge).key, only(judge).mode) == ("host.memory/MC0", Mode.RECOMMEND)
    assert only(judge).evidence == {"module": "mc0/dimm3", "label": "CPU0_C1_D0"}
    assert "memory module CPU0_C1_D0" in only(judge).message


def test_errors_of_a_link_name_the_gpu() -> None:
    judge = TimedAssessor()
    for errors in (7, 2007):
        end = PciErrorSample(name=f"{BUS}.0", device=f"{BUS}.0", corrected=errors)
        judge.polls(1, gpu(), hardware=HardwareSamples(is_new=True, pci=(end,)))
    assert (only(judge).key, only(judge).value) == (f"host.kernel/{BUS}.0", 2000)
    assert only(judge).evidence == {"uuid": "GPU-a"}


def test_stopped_array_has_no_finding() -> None:
    judge = TimedAssessor()
    degraded = RaidArraySample(name="md0", level="raid1", state="clean", missing=1)
    assert judge.polls(1, hardware=HardwareSamples(is_new=True, arrays=(degraded,))) == {"host.disk/md0"}
    assert judge.polls(40, hardware=HardwareSamples(is_new=True, arrays=(RaidArraySample(name="md0"),))) == set()

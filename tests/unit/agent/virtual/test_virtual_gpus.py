from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from everstep.clock import ManualClock
from everstep.errors import ConfigurationError
from everstep_agent.drivers.nvml import GpuDevice
from everstep_agent.sensors.gpu import REOPEN_EVERY, GpuSensor
from everstep_agent.virtual.scenario import VirtualMachine, load_scenario
from everstep_agent.virtual.virtual_nvml import install, uninstall
from tests.support.agents.sensors import Control


def sensor(machine: VirtualMachine | None = None) -> GpuSensor:
    """Return a sensor of all GPUs; without ``machine`` it has no PCI bus to look at."""
    sensed = GpuSensor(slow_every=1, set_activity=lambda activity: None)
    if machine is not None:
        sensed.on_bus = machine.pci_gpus
    return sensed


def test_real_library_functions_see_virtual_gpus(machine: VirtualMachine) -> None:
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 8
    handle = pynvml.nvmlDeviceGetHandleByIndex(3)
    assert pynvml.nvmlDeviceGetPciInfo(handle).busId == "00000000:61:00.0"
    assert pynvml.nvmlDeviceGetName(handle) == "NVIDIA H100 80GB HBM3"
    assert pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) == 45
    with pytest.raises(pynvml.NVMLError):
        pynvml.nvmlDeviceGetHandleByIndex(8)


@pytest.mark.promise("vendor-document")
def test_gpu_identity_has_the_vendor_numbers(machine: VirtualMachine) -> None:
    sensed = sensor()
    sensed.poll()
    gpu = next(iter(sensed.known_gpus.values()))
    labels = (gpu.serial, gpu.part_number, gpu.vbios, gpu.inforom)
    first = machine.gpus[0]
    assert labels == (first.serial, "692-2G520-0200-000", "96.00.74.00.01", "G520.0200.00.05")


def test_two_nodes_have_different_gpus() -> None:
    assert load_scenario("default", "n1").gpu[0].uuid != load_scenario("default", "n2").gpu[0].uuid
    assert load_scenario("default", "n1") == load_scenario("default", "n1")


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"temperature_c": 85}, "temperature_margin_c", 2),
        ({"ecc_uncorrected": 2}, "ecc_uncorrected", 2),
        ({"remap_pending": True}, "remap_pending", 1),
        ({"throttle_reasons": 0x40}, "hardware_throttled", 1),
        ({"throttle_reasons": 0x4}, "hardware_throttled", 0),
        ({"throttle_reasons": 0x8}, "hardware_slowdown", 1),
        ({"throttle_reasons": 0x88}, "hardware_slowdown", 0),
        ({"throttle_reasons": 0x88}, "power_braked", 1),
        ({"throttle_reasons": 0x20}, "software_thermal_slowdown", 1),
        ({"throttle_reasons": 0x60}, "software_thermal_slowdown", 0),
        ({"memory_temperature_c": 96, "memory_limit_c": 105}, "memory_temperature_margin_c", 9),
        ({"memory_temperature_c": 96, "memory_limit_c": 0}, "memory_temperature_margin_c", -1),
        ({"calls": {"nvmlDeviceGetMarginTemperature": {"error": 3}}}, "temperature_margin_c", 42),
        ({"pcie_width": 8, "gpu_utilization": 1.0}, "pcie_lanes_missing", 8),
        ({"recovery_action": 2}, "recovery_action", 2),
        ({"sram_threshold_exceeded": True}, "sram_threshold_exceeded", 1),
        ({"processes": 2}, "processes", 2),
        ({"power_limit_w": 500.0}, "power_limit_cut_w", 200),
        ({"ecc_corrected": 7, "ecc_sram_corrected": 2}, "ecc_corrected", 9),
        ({"ecc_corrected": 7, "ecc_sram_corrected": 2}, "ecc_dram_corrected", 7),
        ({"ecc_corrected": 7, "ecc_sram_corrected": 2}, "ecc_sram_corrected", 2),
        ({"ecc_sram_uncorrected": 3}, "ecc_sram_uncorrected", 3),
        ({"ecc_sram_uncorrected": 3}, "ecc_sram_uncorrected_lifetime", 3),
        ({"ecc_uncorrected": 3}, "ecc_dram_uncorrected", 3),
        ({"banks_without_spare_rows": 1}, "banks_without_spare_rows", 1),
        ({"banks_low_on_spare_rows": 4}, "banks_low_on_spare_rows", 4),
        ({"ecc_mode": [1, 0]}, "ecc_mode_waits", 1),
        ({"mig_mode": [0, 1]}, "mig_mode_waits", 1),
        ({"persistence_mode": 0}, "persistence_mode", 0),
        ({"persistence_mode": None}, "persistence_mode", None),
        ({"mig_mode": None}, "mig_mode", None),
        ({"graphics_processes": 2}, "graphics_processes", 2),
        ({"lost": True}, "is_lost", 1),
        ({"missing": True}, "is_lost", 1),
        ({"error": 999}, "unreadable", 1),
    ],
)
def test_control_file_reaches_the_sample(
    machine: VirtualMachine, control: Control, change: dict[str, object], field: str, value: int | None
) -> None:
    gpus = sensor(machine)
    gpus.poll()
    control.write(gpus={"2": change})
    assert machine.reload_control()
    samples = gpus.poll()
    assert samples[2].value(field) == value
    assert not samples[0].error


def test_vanished_gpu_is_reported_as_lost_until_its_return(machine: VirtualMachine, control: Control) -> None:
    gpus = sensor(machine)
    assert len(gpus.poll()) == 8
    control.write(gpus={"2": {"missing": True}})
    machine.reload_control()
    samples = [gpus.poll() for _ in range(REOPEN_EVERY + 1)][-1]
    assert [sample.lost for sample in samples] == [False, False, True, False, False, False, False, False]
    control.write()
    machine.reload_control()
    samples = [gpus.poll() for _ in range(REOPEN_EVERY + 1)][-1]
    assert not any(sample.lost for sample in samples)


def test_gpu_lost_from_the_start_is_lost(machine: VirtualMachine, control: Control) -> None:
    control.write(gpus={"2": {"lost": True}})
    machine.reload_control()
    samples = sensor(machine).poll()
    assert [(sample.pci_bus_id, sample.lost) for sample in samples if sample.error] == [("0000:52:00", True)]


def test_gpu_requiring_a_reset_reports_the_action(machine: VirtualMachine, control: Control) -> None:
    control.write(gpus={"0": {"error": pynvml.NVML_ERROR_RESET_REQUIRED}})
    gpus = sensor()
    gpus.poll()
    machine.reload_control()
    sample = gpus.poll()[0]
    assert (sample.recovery_action, sample.lost) == (1, False)
    assert "requires restart" in sample.error


def test_failing_library_is_an_error_and_is_retried(machine: VirtualMachine, control: Control) -> None:
    control.write(nvml_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    machine.reload_control()
    gpus = sensor()
    assert gpus.poll() == ()
    assert "Driver Not Loaded" in gpus.error
    control.write()
    machine.reload_control()
    assert len([gpus.poll() for _ in range(REOPEN_EVERY)][-1]) == 8
    assert not gpus.error


def test_hang_blocks_the_call_until_cleared(machine: VirtualMachine, control: Control) -> None:
    gpus = sensor()
    gpus.poll()
    control.write(gpus={"1": {"hang": True}})
    machine.reload_control()
    polled = threading.Event()

    def poll() -> None:
        gpus.poll()
        polled.set()

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    assert not polled.wait(0.3)
    control.write()
    assert polled.wait(60)
    thread.join()


def test_xid_is_emitted_once_as_event_and_line(machine: VirtualMachine, control: Control) -> None:
    gpus = sensor()
    gpus.poll()
    control.write(gpus={"0": {"xid": 48}}, kernel_lines=["a line"])
    events = gpus.wait_xid_events(60.0)
    assert events is not None
    assert [(event.pci_bus_id, event.xid) for event in events] == [("0000:1b:00", 48)]
    assert machine.take_lines() == ["a line", "NVRM: Xid (PCI:0000:1b:00): 48, raised by the control file"]
    control.write(gpus={"0": {"xid": 48}}, kernel_lines=["a line", "another"])
    assert gpus.wait_xid_events(0.2) == []
    assert machine.take_lines() == ["another"]


def test_resumed_machine_repeats_no_event_or_line(control: Control) -> None:
    control.write(gpus={"0": {"xid": 48}}, kernel_lines=["said"])
    resumed = VirtualMachine(load_scenario("default", "n1"), str(control.path), is_resumed=True)
    resumed.reload_control()
    assert (resumed.take_events(), resumed.take_lines()) == ([], [])


def test_reset_restarts_the_energy_counter(control: Control) -> None:
    clock = ManualClock()
    machine = VirtualMachine(load_scenario("default:1", "n1"), str(control.path))
    install(machine, clock)
    try:
        gpus = sensor()
        before = gpus.poll()[0].power.energy_j
        control.write(gpus={"0": {"reset_at": clock.wall()}})
        machine.reload_control()
        clock.advance(1.0)
        after = gpus.poll()[0].power.energy_j
    finally:
        uninstall()
    assert before is not None
    assert after is not None
    assert after < before


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"gpus": {"0": {"temprature_c": 95}}}', "did you mean `temperature_c`"),
        ('{"gpus": {"9": {}}}', "no GPU 9: this machine has 8"),
        ('{"gpu": {}}', "did you mean `gpus`"),
        ('{"ports": {"eth9": {}}}', "no port eth9"),
        ('{"gpus": {"0": {"temperature_c": "hot"}}}', "Expected `int`"),
        ("{", "control file"),
    ],
)
def test_bad_control_file_is_ignored_and_explained(
    machine: VirtualMachine, control: Control, content: str, says: str
) -> None:
    control.path.write_text(content)
    assert machine.reload_control()
    assert says in machine.error
    assert machine.gpus == list(load_scenario("default", "n1").gpu)
    control.write()
    machine.reload_control()
    assert not machine.error


def test_scenario_file_describes_single_gpus_and_fills_up(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('name = "two"\ngpus = 2\nboot_id = "b"\n[[gpu]]\ntemperature_c = 91\n[host]\nzombies = 3\n')
    scenario = load_scenario(str(path), "n1")
    assert [gpu.temperature_c for gpu in scenario.gpu] == [91, 45]
    assert (scenario.boot_id, scenario.host.zombies) == ("b", 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpus = 1\n[[gpu]]\ntemprature_c = 91\n", r"s\.toml line 3: unknown key `temprature_c`.*`temperature_c`"),
        ("gpuz = 1\n", r"s\.toml line 1: unknown key `gpuz`"),
        ("gpus = 100\n", r"<= 64"),
        ("gpus = 0\n[[gpu]]\n", "are described"),
        ("gpus = \n", "not TOML"),
    ],
)
def test_mistake_in_a_scenario_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        load_scenario(str(path), "n1")


@pytest.mark.parametrize("which", ["default:x", "default:65", "nowhere.toml"])
def test_unknown_scenario_is_refused(which: str) -> None:
    with pytest.raises(ConfigurationError):
        load_scenario(which, "n1")


def test_sram_status_is_handed_to_c_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of the real library takes an address; pynvml would hand over a copy of the struct just as well."""
    status, given = pynvml.c_nvmlEccSramErrorStatus_v1_t(), list[int]()

    def answer(_handle: int, address: int) -> int:
        given.append(address)
        if address == ctypes.addressof(status):
            status.bThresholdExceeded = 1
        return int(pynvml.NVML_SUCCESS)

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(answer)
    callback_address = ctypes.cast(callback, ctypes.c_void_p).value
    assert callback_address is not None
    untyped = ctypes.CDLL(None)._FuncPtr(callback_address)
    monkeypatch.setattr(pynvml, "c_nvmlEccSramErrorStatus_v1_t", lambda: status)
    monkeypatch.setattr(pynvml, "nvmlLib", SimpleNamespace(nvmlDeviceGetSramEccErrorStatus=untyped))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    assert GpuDevice(ctypes.c_void_p(1)).sram_status().bThresholdExceeded == 1
    assert given == [ctypes.addressof(status)]

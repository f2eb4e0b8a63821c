"""Errors of single NVML calls, through the real driver code over a library that returns them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pynvml
import pytest

from everstep.system_clock import SYSTEM_CLOCK
from everstep_agent.drivers.gpu_samples import GpuSample
from everstep_agent.drivers.samples import flat_fields
from everstep_agent.sensors.gpu import GpuSensor
from everstep_agent.virtual.scenario import VirtualMachine, load_scenario
from everstep_agent.virtual.virtual_nvml import install, uninstall
from tests.support.agents.sensors import Control

READS = (
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetPowerManagementDefaultLimit",
    "nvmlDeviceGetMemoryErrorCounter",
    "nvmlDeviceGetRowRemapperHistogram",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetSramEccErrorStatus",
    "nvmlDeviceGetRetiredPages_v2",
    "nvmlDeviceGetPcieReplayCounter",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceRegisterEvents",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetC2cModeInfoV",
    "nvmlDeviceGetP2PStatus",
    "nvmlDeviceGetEncoderUtilization",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetGridLicensableFeatures_v4",
    "nvmlGpmQueryDeviceSupport",
    "nvmlGpmSampleGet",
)
IDENTITY = (
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetSerial",
    "nvmlDeviceGetBoardPartNumber",
    "nvmlDeviceGetVbiosVersion",
    "nvmlDeviceGetInforomImageVersion",
)
FIELDS = ("field 82", "field 83", "field 230")
ERRORS = (1, 2, 3, 4, 6, 8, 10, 11, 13, 15, 16, 17, 20, 21, 25, 27, 999)
"""The errors of nvml.h that a call on a GPU may return."""

assert (len(READS) + len(IDENTITY) + len(FIELDS), len(ERRORS)) == (50, 17)

NAMES_SINCE_12_570 = (
    "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetSramEccErrorStatus",
    "c_nvmlEccSramErrorStatus_v1_t",
    "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
    "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
    "NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR",
    "nvmlEventTypeGpuUnavailableError",
    "nvmlEventTypeGpuRecoveryAction",
    "nvmlEventTypeDramRetirementEvent",
    "nvmlEventTypeDramRetirementFailure",
    "NVML_ERROR_GPU_NOT_FOUND",
)
"""Names that some release before 12.570 lacks."""


@pytest.fixture
def machine(control: Control) -> Iterator[VirtualMachine]:
    """Three GPUs with two links each: enough for one GPU to fail between two others."""
    scenario = load_scenario("default:3", "n1")
    gpus = tuple(msgspec.structs.replace(gpu, nvlinks=2) for gpu in scenario.gpu)  # each link costs calls
    machine = VirtualMachine(msgspec.structs.replace(scenario, gpu=gpus), str(control.path))
    install(machine, SYSTEM_CLOCK)
    yield machine
    uninstall()


def sensor_of(machine: VirtualMachine) -> GpuSensor:
    return GpuSensor(slow_every=1, set_activity=lambda activity: None, on_bus=machine.pci_gpus, reads_gpm=True)


def missing(sample: GpuSample) -> set[str]:
    return {name for name, value in flat_fields(sample).items() if value is None}


def reopened(sensor: GpuSensor) -> GpuSensor:
    """Return a sensor that knows the same GPUs and has yet to open NVML."""
    sensor.close()
    return replace(sensor, _polls=0)


@pytest.mark.parametrize("call", [*READS, *IDENTITY, *FIELDS])
def test_failing_call_costs_its_own_values_only(machine: VirtualMachine, control: Control, call: str) -> None:
    healthy = sensor_of(machine).poll()
    for code in ERRORS:
        control.write(gpus={"1": {"calls": {call: {"error": code}}}})
        machine.reload_control()
        sensor = sensor_of(machine)
        samples = sensor.poll()
        assert len(samples) == 3
        assert not any(sample.lost for sample in samples)
        assert {sample.pci_bus_id for sample in samples} == {sample.pci_bus_id for sample in healthy}
        sample = samples[1]
        most = 11 if call == "nvmlDeviceGetFieldValues" else 5
        assert len(missing(sample) - missing(healthy[1])) <= most, (code, sample)
        assert sample.temperatures.temperature_c is not None or call == "nvmlDeviceGetTemperature"
        assert sample.recovery_action != 1
        assert not sample.error
        control.write()
        machine.reload_control()
        again = [sensor.poll() for _ in range(2)][-1][1]
        if code not in (2, 3, 4, 13, 25) and "Event" not in call:  # these are not asked for again
            assert missing(again) <= missing(healthy[1]), code  # activity is known from the second poll on
            assert again.failed_values == 0


@pytest.mark.parametrize(
    ("call", "code"),
    [
        *(("nvmlDeviceGetHandleByIndex_v2", code) for code in ERRORS),
        *((call, code) for call in IDENTITY for code in (15, 16, 999)),
    ],
)
def test_only_nvml_loss_makes_a_reopened_gpu_lost(
    machine: VirtualMachine, control: Control, call: str, code: int
) -> None:
    sensor = sensor_of(machine)
    sensor.poll()
    control.write(gpus={"1": {"calls": {call: {"error": code}, "nvmlDeviceGetHandleByPciBusId_v2": {"error": code}}}})
    machine.reload_control()
    sample = reopened(sensor).poll()[1]
    is_handle = call == "nvmlDeviceGetHandleByIndex_v2"
    assert sample.pci_bus_id == "0000:43:00"
    assert sample.uuid == machine.gpus[1].uuid
    assert sample.lost == (is_handle and code == pynvml.NVML_ERROR_GPU_IS_LOST)
    assert (sample.recovery_action == 1) == (is_handle and code == pynvml.NVML_ERROR_RESET_REQUIRED)
    assert bool(sample.error) == is_handle


def test_gpu_is_unreadable_when_most_values_fail(machine: VirtualMachine, control: Control) -> None:
    sensor = sensor_of(machine)
    sensor.poll()

    def sample_with(*calls: str) -> GpuSample:
        control.write(gpus={"1": {"calls": {call: {"error": 999} for call in calls}}})
        machine.reload_control()
        return sensor.poll()[1]

    few = sample_with("nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage")
    assert (few.unreadable, few.partly_unreadable) == (0, 2)
    assert "nvmlDeviceGetTemperature: Unknown Error" in few.failures
    most = sample_with("nvmlDeviceGetFieldValues", *READS[3:8])
    assert (most.unreadable, most.partly_unreadable) == (1, 0)
    assert most.memory.memory_used_bytes is not None


def test_uuid_that_fails_is_no_exchange_of_the_gpu(machine: VirtualMachine, control: Control) -> None:
    sensor = sensor_of(machine)
    before = sensor.poll()[1]
    control.write(gpus={"1": {"calls": {"nvmlDeviceGetUUID": {"error": 999}}}})
    machine.reload_control()
    assert reopened(sensor).poll()[1].uuid == before.uuid


def test_older_library_lacks_values_only(machine: VirtualMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES_SINCE_12_570:
        monkeypatch.delattr(pynvml, name, raising=False)
    sample = sensor_of(machine).poll()[0]
    assert (sample.temperatures.temperature_margin_c, sample.memory_errors.sram_threshold_exceeded) == (42, None)
    assert (sample.temperatures.temperature_c, sample.recovery_action, sample.failed_values) == (45, 0, 0)


OLD_LIBRARY = f"""
import pynvml
for name in {NAMES_SINCE_12_570!r}:
    vars(pynvml).pop(name, None)
import everstep_agent.sensors.sampler
"""


def test_sensor_process_starts_with_an_older_library() -> None:
    done = subprocess.run([sys.executable, "-c", OLD_LIBRARY], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from everstep_agent.drivers.gpu_samples import GpuSample
from everstep_agent.sensors.gpu import GpuSensor
from everstep_agent.virtual.scenario import VirtualMachine
from everstep_agent.virtual.virtual_nvml import VirtualNvml
from tests.support.agents.sensors import Control

BUSY = {
    "tensor_activity": 0.4,
    "gpu_utilization": 0.9,
    "memory_utilization": 0.3,
    "encoder_utilization": 0.25,
    "memory_reserved_bytes": 1 << 20,
    "nvlink_kib": 5,
}


@pytest.fixture
def sensor(machine: VirtualMachine) -> GpuSensor:
    return GpuSensor(slow_every=1, set_activity=lambda activity: None, reads_gpm=True)


def second_sample(sensor: GpuSensor, machine: VirtualMachine, control: Control, **change: Any) -> GpuSample:
    control.write(gpus={"0": change})
    machine.reload_control()
    assert sensor.poll()[0].utilization.tensor_activity is None  # activity is known between two readings
    return sensor.poll()[0]


def test_activity_between_two_readings_is_known(sensor: GpuSensor, machine: VirtualMachine, control: Control) -> None:
    sample = second_sample(sensor, machine, control, **BUSY)
    busy = sample.utilization
    shares = [busy.tensor_activity, busy.graphics_activity, busy.dram_activity]
    assert shares == pytest.approx([0.4, 0.9, 0.3])
    assert (busy.pcie_sent_bytes_per_s, busy.pcie_received_bytes_per_s) == (0.0, 0.0)
    assert (busy.encoder_utilization, busy.decoder_utilization, sample.modes.vgpu_licensed) == (0.25, 0.0, 0)
    assert (sample.memory.memory_reserved_bytes, sample.nvlink.nvlink_bytes) == (1 << 20, 10 << 10)


def test_gpu_without_gpm_has_no_activity(sensor: GpuSensor, machine: VirtualMachine, control: Control) -> None:
    sample = second_sample(sensor, machine, control, gpm=False, nvlinks=0)
    assert (sample.utilization.tensor_activity, sample.nvlink.nvlink_bytes, sample.failed_values) == (None, None, 0)


def test_failed_reading_starts_the_activity_anew(sensor: GpuSensor, machine: VirtualMachine, control: Control) -> None:
    second_sample(sensor, machine, control, **BUSY)
    control.write(gpus={"0": {"calls": {"nvmlGpmSampleGet": {"error": 999}}}})
    machine.reload_control()
    assert (sensor.poll()[0].utilization.tensor_activity, sensor.poll()[0].failed_values) == (None, 1)
    assert second_sample(sensor, machine, control, **BUSY).utilization.tensor_activity == pytest.approx(0.4)


def test_memory_of_gpm_is_given_back(machine: VirtualMachine, sensor: GpuSensor) -> None:
    sensor.poll()
    library: VirtualNvml = pynvml.nvmlLib
    assert len(library._gpm_samples) == 16
    sensor.close()
    assert library._gpm_samples == {}


def test_activity_is_not_counted_unless_asked_for(machine: VirtualMachine) -> None:
    sensor = GpuSensor(slow_every=1, set_activity=lambda activity: None)
    sensor.poll()
    busy = [sensor.poll()[0].utilization for _ in range(2)]
    assert (busy[0].tensor_activity, busy[1].encoder_utilization) == (None, 0.0)

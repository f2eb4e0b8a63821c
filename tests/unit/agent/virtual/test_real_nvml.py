from __future__ import annotations

import pytest

from everstep_agent.sensors.gpu import GpuSensor
from everstep_agent.virtual.virtual_nvml import uninstall


@pytest.mark.gpu
def test_real_gpu_reports_every_field() -> None:
    uninstall()
    sensor = GpuSensor(slow_every=1, set_activity=lambda activity: None)
    try:
        samples = sensor.poll()
        if not samples:
            pytest.skip(f"no GPU here: {sensor.error}")
        for sample in samples:
            assert not sample.error
            assert not sample.failures
            assert not sample.lost
            assert sample.temperatures.temperature_c is not None
            assert sample.power.power_w is not None
            assert sample.power.energy_j is not None
            assert sample.memory.memory_total_bytes
            assert len(sample.pci_bus_id) == len("0000:1b:00")
        for gpu in sensor.known_gpus.values():
            assert gpu.vbios
            assert gpu.part_number == gpu.part_number.strip()
        assert sensor.wait_xid_events(0.0) in (None, [])
    finally:
        sensor.close()

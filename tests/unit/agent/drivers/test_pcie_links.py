"""PCIe links that are too slow or too narrow, apart from idle links that save power."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep_agent.drivers import sysfs
from everstep_agent.drivers.gpu_samples import GpuSample
from everstep_agent.drivers.sysfs import PcieLimit
from everstep_agent.sensors.gpu import GpuSensor
from everstep_agent.virtual.scenario import VirtualMachine
from tests.support.agents.sensors import BUS, Control, TimedAssessor, gpu

LINK = f"gpu.pcie_link/{BUS}"


def link(generation: int = 5, width: int = 16, busy: float | None = 0.95) -> GpuSample:
    """Return a GPU capable of generation 5 with 16 lanes, whose link was read while the GPU was ``busy``."""
    return gpu(
        pcie_generation=generation,
        pcie_generation_max=5,
        pcie_width=width,
        pcie_width_max=16,
        pcie_utilization=busy,
    )


@pytest.mark.parametrize("sample", [link(generation=4), link(width=8)])
def test_link_below_its_maximum_under_load_is_found(sample: GpuSample) -> None:
    assert TimedAssessor().polls(6, sample) == {LINK}


@pytest.mark.parametrize("busy", [0.0, 0.01, 0.3, None])
def test_link_of_an_idle_gpu_is_not_judged(busy: float | None) -> None:
    assert TimedAssessor().polls(100, link(generation=1, width=4, busy=busy)) == set()


def test_link_slow_only_briefly_is_not_reported() -> None:
    judge = TimedAssessor()
    for _ in range(20):
        assert judge.polls(2, link(generation=1)) == set()
        assert judge.polls(1, link()) == set()


def test_link_finding_clears_at_full_speed_under_load() -> None:
    judge = TimedAssessor()
    assert judge.polls(6, link(generation=4)) == {LINK}
    assert judge.polls(61, link()) == set()


@pytest.mark.parametrize("sample", [link(generation=4), link(width=8)])
def test_link_finding_clears_on_a_gpu_that_goes_idle(sample: GpuSample) -> None:
    judge = TimedAssessor()
    assert judge.polls(6, sample) == {LINK}
    assert judge.polls(599, link(generation=1, busy=0.0)) == {LINK}
    assert judge.polls(2, link(generation=1, busy=0.0)) == set()
    assert judge.polls(6, sample) == {LINK}


@pytest.mark.parametrize("sample", [link(generation=4), link(width=8)])
def test_boot_clears_the_link_finding(sample: GpuSample) -> None:
    judge = TimedAssessor()
    assert judge.polls(6, sample) == {LINK}
    assert judge.polls(1, link(busy=0.0), boot_id="boot-2") == set()


def _pci(root: Path, port: dict[str, str], device: dict[str, str]) -> Path:
    """Return a GPU at 0000:1b:00.0 behind a port, as the kernel shows both."""
    folder = root / "devices/pci0000:15/0000:15:01.0/0000:1b:00.0"
    folder.mkdir(parents=True)
    for place, files in ((folder.parent, port), (folder, device)):
        for name, text in files.items():
            (place / name).write_text(f"{text}\n")
    links = root / "bus/pci/devices"
    links.mkdir(parents=True)
    (links / "0000:1b:00.0").symlink_to(folder)
    return root


def _limit(speed: str, width: str) -> dict[str, str]:
    return {"max_link_speed": speed, "max_link_width": width}


@pytest.mark.parametrize(
    ("port", "device", "expected"),
    [
        (_limit("32.0 GT/s PCIe", "16"), _limit("32.0 GT/s PCIe", "16"), PcieLimit(5, 16)),
        (_limit("16.0 GT/s PCIe", "8"), _limit("32.0 GT/s PCIe", "16"), PcieLimit(4, 8)),
        (_limit("64.0 GT/s PCIe", "16"), _limit("32.0 GT/s PCIe", "16"), PcieLimit(5, 16)),
        (_limit("2.5 GT/s PCIe", "1"), _limit("32.0 GT/s PCIe", "16"), PcieLimit(1, 1)),
        (_limit("8 GT/s", "16"), _limit("Unknown", "255"), PcieLimit(3, 16)),
        ({}, _limit("32.0 GT/s PCIe", "16"), PcieLimit(5, 16)),
        (_limit("Unknown", "0"), _limit("nonsense", "-"), PcieLimit(None, None)),
        ({}, {}, PcieLimit(None, None)),
    ],
)
def test_platform_limits_a_link(
    tmp_path: Path, port: dict[str, str], device: dict[str, str], expected: PcieLimit
) -> None:
    assert sysfs.pcie_limit(_pci(tmp_path, port, device), "0000:1b:00") == expected


def test_link_as_fast_as_its_slot_lacks_nothing(machine: VirtualMachine, control: Control) -> None:
    control.write(gpus={"0": {"pcie_generation": 4, "pcie_width": 8, "gpu_utilization": 1.0}})
    machine.reload_control()
    sensor = GpuSensor(slow_every=1, set_activity=lambda activity: None, platform=lambda bus_id: PcieLimit(4, 8))
    sample = sensor.poll()[0]
    assert (sample.pcie.pcie_generation_max, sample.pcie.pcie_width_max) == (4, 8)
    assert (sample.pcie.pcie_generations_missing, sample.pcie.pcie_lanes_missing) == (0, 0)

from __future__ import annotations

from pathlib import Path

from everstep.host.pci_devices import pci_devices
from everstep_agent.drivers.pci_gpus import PciGpu, pci_gpus
from everstep_agent.sensors.gpu import REOPEN_EVERY, GpuSensor
from everstep_agent.virtual.scenario import VirtualMachine
from tests.support.agents.sensors import Control

GPU = "0x030200"


def add_device(root: Path, address: str, driver: str = "", kind: str = GPU, vendor: str = "0x10de") -> Path:
    device = root / "sys/bus/pci/devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    if driver:
        folder = root / "sys/bus/pci/drivers" / driver
        folder.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(folder)
    return device


def add_proc(root: Path, address: str, minor: int, has_file: bool = True) -> None:
    folder = root / "proc/driver/nvidia/gpus" / address
    folder.mkdir(parents=True)
    (folder / "information").write_text(f"Model: \t\t NVIDIA H100\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n")
    (root / "dev").mkdir(exist_ok=True)
    if has_file:
        (root / f"dev/nvidia{minor}").touch()


def read(root: Path) -> tuple[PciGpu, ...] | None:
    return pci_gpus(pci_devices(root / "sys"), root / "proc", root / "dev")


def test_gpus_on_the_bus_have_their_driver(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    add_device(tmp_path, "0000:1b:00.0", "nvidia")
    add_device(tmp_path, "0000:43:00.0", "vfio-pci")
    add_device(tmp_path, "0000:52:00.0")
    add_device(tmp_path, "0000:61:00.0", "nvidia", kind="0x068000")
    add_device(tmp_path, "0000:62:00.0", "i915", vendor="0x8086")
    (add_device(tmp_path, "0000:1b:00.4", "nvidia") / "physfn").mkdir()
    gpus = read(tmp_path)
    assert gpus == (
        PciGpu("0000:1b:00", "nvidia"),
        PciGpu("0000:43:00", "vfio-pci"),
        PciGpu("0000:52:00", ""),
    )
    assert [gpu.is_usable for gpu in gpus] == [True, False, False]
    assert [gpu.is_given_away for gpu in gpus] == [False, True, False]


def test_container_sees_the_gpus_that_it_was_given(tmp_path: Path) -> None:
    for address in ("0000:1b:00.0", "0000:43:00.0", "0000:52:00.0"):
        add_device(tmp_path, address, "nvidia")
    add_proc(tmp_path, "0000:1b:00.0", 0)
    add_proc(tmp_path, "0000:43:00.0", 1, has_file=False)
    gpus = read(tmp_path)
    assert gpus is not None
    assert [gpu.is_visible for gpu in gpus] == [True, False, False]


def lost_after(machine: VirtualMachine, control: Control, **change: object) -> tuple[int, list[str]]:
    """Return the number of GPUs after a change of GPU 2 and a new look, and the addresses of the lost ones."""
    control.write()
    machine.reload_control()
    sensor = GpuSensor(slow_every=1, set_activity=lambda activity: None, on_bus=machine.pci_gpus)
    sensor.poll()
    control.write(gpus={"2": change})
    machine.reload_control()
    sensor.close()
    samples = [sensor.poll() for _ in range(REOPEN_EVERY)][-1]
    assert not any(sample.error for sample in samples if not sample.lost)
    return len(samples), [sample.pci_bus_id for sample in samples if sample.lost]


def test_gpu_that_comes_back_is_listed_and_never_missed(machine: VirtualMachine, control: Control) -> None:
    control.write(gpus={"2": {"driver": "vfio-pci"}})
    machine.reload_control()
    sensor = GpuSensor(slow_every=1, set_activity=lambda activity: None, on_bus=machine.pci_gpus)
    seen = []
    for poll in range(2 * REOPEN_EVERY):
        samples = sensor.poll()
        assert sensor.bus is not None
        seen.append((len(samples), sum(gpu.is_usable for gpu in sensor.bus)))
        if poll == 2:
            control.write()
            machine.reload_control()
        sensor.check_bus(machine.pci_gpus())
    assert seen[0] == (7, 7)
    assert seen[-1] == (8, 8)
    assert all(listed == expected for listed, expected in seen)


def test_gpu_that_was_given_away_is_not_lost(machine: VirtualMachine, control: Control) -> None:
    assert lost_after(machine, control, driver="vfio-pci") == (7, [])
    assert lost_after(machine, control, driver="") == (7, [])
    assert lost_after(machine, control, hidden=True) == (7, [])
    assert lost_after(machine, control, missing=True) == (8, ["0000:52:00"])

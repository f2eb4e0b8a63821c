from __future__ import annotations

from pathlib import Path

import pytest

from everstep_agent.drivers.error_counters import memory_modules, pci_errors, watched_pci_devices
from everstep_agent.drivers.samples import MemoryModuleSample
from tests.unit.agent.sensors.port_tree import PortTree

EDAC = "sys/devices/system/edac/mc"
CORRECTABLE = "RxErr 2\nBadTLP 3\nRollover 0\nNonFatalErr 70\nTOTAL_ERR_COR 75"
NONFATAL = "Undefined 0\nCmpltTO 1\nUnsupReq 40\nTOTAL_ERR_NONFATAL 41"


@pytest.fixture
def tree(tmp_path: Path) -> PortTree:
    return PortTree(tmp_path)


def test_memory_errors_are_counted_by_module(tree: PortTree, tmp_path: Path) -> None:
    values = {
        "dimm0/dimm_label": "A1",
        "dimm0/dimm_ce_count": 4,
        "dimm0/dimm_ue_count": 1,
        "ce_count": 6,
        "ue_count": 1,
    }
    for file, value in (values | {"ce_noinfo_count": 2, "ue_noinfo_count": 0, "mc_name": "skx"}).items():
        tree.write(tmp_path / EDAC / "mc0" / file, value)
    tree.write(tmp_path / EDAC / "power/control", "auto")
    assert memory_modules(tree.sys) == [
        MemoryModuleSample(name="mc0/dimm0", label="A1", corrected=4, uncorrected=1),
        MemoryModuleSample(name="mc0", corrected=2, uncorrected=0),
    ]


def test_old_kernel_counts_by_controller(tree: PortTree, tmp_path: Path) -> None:
    for file, value in {"rank0/dimm_label": "A1", "ce_count": 6, "ue_count": 1, "ce_noinfo_count": 0}.items():
        tree.write(tmp_path / EDAC / "mc0" / file, value)
    assert memory_modules(tree.sys) == [MemoryModuleSample(name="mc0", corrected=6, uncorrected=1)]


def test_pcie_errors_are_those_of_the_link(tree: PortTree) -> None:
    gpu = tree.gpu("pci0000:15/0000:15:01.0/0000:1b:00.0")
    tree.pci("pci0000:15/0000:15:02.0/0000:16:00.0", "nvme", kind="0x010802", vendor="0x144d")
    for end in (gpu, gpu.parent):
        tree.write(end / "aer_dev_correctable", CORRECTABLE)
    tree.write(gpu / "aer_dev_nonfatal", NONFATAL)
    of_gpu, of_port = pci_errors(watched_pci_devices(tree.sys))
    assert (of_gpu.name, of_gpu.corrected, of_gpu.nonfatal, of_gpu.fatal) == ("0000:1b:00.0", 5, 1, None)
    assert (of_port.name, of_port.device, of_port.corrected) == ("0000:15:01.0", "0000:1b:00.0", 5)


def test_switches_and_rdma_adapters_are_watched(tree: PortTree) -> None:
    switch = tree.pci("pci0000:15/0000:15:01.0/0000:07:00.0", "nvidia", kind="0x068000", vendor="0x10de")
    adapter = tree.pci("pci0000:15/0000:15:03.0/0000:5e:00.0", "mlx5_core")
    tree.infiniband("mlx5_0", adapter)
    tree.pci("pci0000:15/0000:15:04.0/0000:01:00.0", "igb", vendor="0x8086")
    assert watched_pci_devices(tree.sys)[::2] == [switch.resolve(), adapter.resolve()]


def test_device_without_error_reporting_has_no_sample(tree: PortTree) -> None:
    tree.gpu("pci0000:15/0000:15:01.0/0000:1b:00.0")
    assert pci_errors(watched_pci_devices(tree.sys)) == []

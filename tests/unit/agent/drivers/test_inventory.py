"""Parts of the machine from files of /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.host.pci_devices import pci_devices
from everstep_agent.drivers.inventory import read_inventory
from everstep_agent.drivers.samples import InventorySample


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_processors_and_network_devices_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "devices/system/cpu/online", "0-63,128-190,192")
    for address, kind in {"0000:01:00.0": "0x020700", "0000:02:00.0": "0x020000", "0000:1b:00.0": "0x030200"}.items():
        write(tmp_path / "bus/pci/devices" / address / "class", kind)
    found = read_inventory(tmp_path, pci_devices(tmp_path) or (), 1)
    assert found == InventorySample(cpus=128, gpus=1, network_devices=("0000:01:00.0", "0000:02:00.0"))


@pytest.mark.parametrize("online", ["", "many", "0-"])
def test_unreadable_files_are_unknown(tmp_path: Path, online: str) -> None:
    write(tmp_path / "devices/system/cpu/online", online)
    assert read_inventory(tmp_path, (), None) == InventorySample()

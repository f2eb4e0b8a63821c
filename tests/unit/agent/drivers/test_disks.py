from __future__ import annotations

from pathlib import Path

import pytest

from everstep_agent.drivers import disks
from everstep_agent.drivers.samples import DiskSample, RaidArraySample
from tests.unit.agent.sensors.port_tree import PortTree


@pytest.fixture
def tree(tmp_path: Path) -> PortTree:
    return PortTree(tmp_path)


def test_array_reports_its_failed_disk(tree: PortTree) -> None:
    values = {"level": "raid1", "array_state": "active", "sync_action": "idle", "degraded": 1}
    values |= {"dev-nvme0n1p2/state": "in_sync", "dev-nvme1n1p2/state": "faulty,write_mostly"}
    for file, text in values.items():
        tree.write(tree.sys / "block/md0/md" / file, text)
    tree.write(tree.sys / "block/nvme0n1/size", 1)
    (array,) = disks.raid_arrays(tree.sys)
    assert (array.name, array.level, array.faulty, array.lost_disks) == ("md0", "raid1", ("nvme1n1p2",), 1)


def test_array_without_redundancy_lacks_no_disk(tree: PortTree) -> None:
    tree.write(tree.sys / "block/md127/md/array_state", "inactive")
    assert disks.raid_arrays(tree.sys)[0].lost_disks is None


@pytest.mark.parametrize(
    ("array", "lost", "not_yet_added"),
    [
        (RaidArraySample(name="md0", missing=0, sync_action="check"), 0, 0),
        (RaidArraySample(name="md0", missing=1, sync_action="recover"), 0, 0),
        (RaidArraySample(name="md0", missing=1, sync_action="recover", faulty=("sda",)), 1, 0),
        (RaidArraySample(name="md0", missing=1), 1, 0),
        (RaidArraySample(name="md0", missing=1, was_whole=False), 0, 1),
        (RaidArraySample(name="md0", missing=2, was_whole=False, faulty=("sda",)), 1, 2),
    ],
)
def test_only_lost_disks_of_an_array_count(array: RaidArraySample, lost: int, not_yet_added: int) -> None:
    assert (array.lost_disks, array.not_yet_added) == (lost, not_yet_added)


def test_nvme_controllers_are_paths_of_a_subsystem(tree: PortTree) -> None:
    for name, state in {"nvme0": "live", "nvme1": "connecting"}.items():
        tree.write(tree.sys / f"class/nvme/{name}/state", state)
        tree.link(tree.sys / f"class/nvme-subsystem/nvme-subsys0/{name}", tree.sys / f"class/nvme/{name}")
    tree.write(tree.sys / "class/nvme-subsystem/nvme-subsys0/nvme0n1/size", 1)
    live, lost = disks.nvme_controllers(tree.sys)
    assert (live.is_unready, lost.is_unready, lost.is_dead) == (0, 1, 0)
    assert lost.detail == "connecting, one of 2 paths of nvme-subsys0"


@pytest.mark.parametrize("state", ["live", "deleting", "deleting (no IO)", "resetting", ""])
def test_living_controller_is_not_dead(state: str) -> None:
    assert not DiskSample(name="nvme0", state=state).is_dead


@pytest.mark.parametrize(
    ("place", "files", "count"),
    [
        ("ata1/host0", {}, 1),
        ("ata1/host0", {"device/type": 5}, 0),  # an optical drive
        ("ata1/host0", {"removable": 1}, 0),  # a card reader
        ("usb1/1-1", {}, 0),
    ],
)
def test_only_fixed_disks_are_read(tree: PortTree, place: str, files: dict[str, int], count: int) -> None:
    folder = tree.sys / "devices/pci0000:00/0000:00:17.0" / place / "block/sda"
    values = {"device/type": 0, "device/state": "running", "device/ioerr_cnt": "0x1f", "removable": 0}
    for file, text in (values | files).items():
        tree.write(folder / file, text)
    tree.link(tree.sys / "block/sda", folder)
    assert [disk.io_errors for disk in disks.scsi_disks(tree.sys)] == [31] * count

from __future__ import annotations

from pathlib import Path

from everstep_agent.drivers.samples import DiskSample, HardwareSamples
from everstep_agent.sensors.hardware import COUNTERS_EVERY, DISKS_EVERY, HostHardwareSensor
from tests.unit.agent.sensors.port_tree import PortTree


def write_array(tree: PortTree, name: str, degraded: int) -> None:
    for file, text in {"level": "raid1", "array_state": "clean", "degraded": degraded}.items():
        tree.write(tree.sys / "block" / name / "md" / file, text)


def next_reading(sensor: HostHardwareSensor) -> HardwareSamples:
    """Poll until the next reading, and return it."""
    return next(samples for samples in (sensor.poll() for _ in range(DISKS_EVERY)) if samples.is_new)


def test_machine_without_such_parts_has_no_samples(tmp_path: Path) -> None:
    assert HostHardwareSensor(tmp_path).poll() == HardwareSamples(is_new=True)


def test_files_are_read_at_each_tenth_poll(tmp_path: Path) -> None:
    sensor = HostHardwareSensor(tmp_path)
    polls = [sensor.poll().is_new for _ in range(COUNTERS_EVERY)]
    assert [number for number, is_new in enumerate(polls) if is_new] == [0, 10, 20]


def test_array_of_the_start_was_whole_and_a_new_one_was_not(tmp_path: Path) -> None:
    tree = PortTree(tmp_path)
    write_array(tree, "md0", 1)
    sensor = HostHardwareSensor(tree.sys)
    next_reading(sensor)
    write_array(tree, "md1", 1)
    old, new = next_reading(sensor).arrays
    assert (old.lost_disks, new.lost_disks, new.not_yet_added) == (1, 0, 1)
    write_array(tree, "md1", 0)
    next_reading(sensor)
    write_array(tree, "md1", 1)
    assert next_reading(sensor).arrays[1].lost_disks == 1


def test_disk_that_left_is_unknown(tmp_path: Path) -> None:
    tree = PortTree(tmp_path)
    tree.write(tree.sys / "class/nvme/nvme0/state", "live")
    sensor = HostHardwareSensor(tree.sys)
    next_reading(sensor)
    (tree.sys / "class/nvme/nvme0/state").unlink()
    for _ in range(2):
        assert next_reading(sensor).disks == (DiskSample(name="nvme0"),)

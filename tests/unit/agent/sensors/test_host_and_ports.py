from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from everstep_agent.drivers import sysfs
from everstep_agent.sensors import host as host_module
from everstep_agent.sensors.host import COUNTERS_EVERY, HostSensor, NetworkSensor, PathSensor

from everstep.clock import ManualClock


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def infiniband(root: Path, state: str, downs: int = 0) -> Path:
    port = "class/infiniband/mlx5_0/ports/1"
    return tree(
        root,
        **{
            f"{port}/state": f"{state}\n",
            f"{port}/rate": "400 Gb/sec (4X NDR)\n",
            f"{port}/counters/symbol_error": "3\n",
            f"{port}/counters/port_rcv_errors": "2\n",
            f"{port}/counters/link_downed": f"{downs}\n",
        },
    )


def ethernet(root: Path, name: str, state: str, physical: bool) -> Path:
    port = f"class/net/{name}"
    tree(root, **{f"{port}/operstate": state, f"{port}/type": "1", f"{port}/speed": "25000"})
    if physical:
        (root / port / "device").mkdir(exist_ok=True)
    return root


def test_an_infiniband_port_is_read_whole(tmp_path: Path) -> None:
    (port,) = NetworkSensor(infiniband(tmp_path, "4: ACTIVE", downs=5)).poll()
    assert (port.name, port.up, port.rate_gbps, port.errors, port.link_downs) == ("mlx5_0/1", True, 400.0, 5, 5)


def test_only_physical_ethernet_ports_count(tmp_path: Path) -> None:
    ethernet(tmp_path, "eth0", "up", physical=True)
    ethernet(tmp_path, "veth1", "up", physical=False)
    (port,) = NetworkSensor(tmp_path).poll()
    assert (port.name, port.up, port.rate_gbps) == ("eth0", True, 25.0)


def test_fallen_port_is_known_to_have_been_up(tmp_path: Path) -> None:
    sensor = NetworkSensor(infiniband(tmp_path, "4: ACTIVE"))
    sensor.poll()
    infiniband(tmp_path, "1: DOWN")
    (port,) = sensor.poll()
    assert (port.up, port.lost_link) == (False, 1)


def test_never_connected_port_is_no_loss(tmp_path: Path) -> None:
    (port,) = NetworkSensor(infiniband(tmp_path, "1: DOWN")).poll()
    assert port.lost_link is None


def test_vanished_port_is_down(tmp_path: Path) -> None:
    sensor = NetworkSensor(infiniband(tmp_path, "4: ACTIVE"))
    sensor.poll()
    (tmp_path / "class/infiniband/mlx5_0/ports/1/state").unlink()
    (port,) = sensor.poll()
    assert (port.name, port.lost_link) == ("mlx5_0/1", 1)


def test_counters_and_new_ports_are_read_periodically(tmp_path: Path) -> None:
    sensor = NetworkSensor(infiniband(tmp_path, "4: ACTIVE", downs=1))
    sensor.poll()
    infiniband(tmp_path, "4: ACTIVE", downs=2)
    ethernet(tmp_path, "eth0", "up", physical=True)
    polls = [sensor.poll() for _ in range(COUNTERS_EVERY)]
    assert [len(poll) for poll in polls] == [1] * (COUNTERS_EVERY - 1) + [2]
    assert polls[-1][0].link_downs == 2


def test_a_machine_without_ports_has_none(tmp_path: Path) -> None:
    assert NetworkSensor(tmp_path).poll() == ()


def test_gpus_on_the_pci_bus_are_counted_and_switches_are_not(tmp_path: Path) -> None:
    assert sysfs.count_nvidia_gpus_on_pci(tmp_path) is None
    for index, (vendor, kind) in enumerate(
        [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x068000"), ("0x8086", "0x030000")]
    ):
        tree(tmp_path, **{f"bus/pci/devices/d{index}/vendor": vendor, f"bus/pci/devices/d{index}/class": kind})
    assert sysfs.count_nvidia_gpus_on_pci(tmp_path) == 2


def proc(root: Path, states: str) -> Path:
    tree(
        root,
        meminfo="MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 250 kB\nBuffers: 1 kB\n",
        uptime="12345.6 1.0\n",
        loadavg="0.5 0.4 0.3 1/2 3\n",
        **{"self/mounts": "/dev/sda / ext4 rw 0 0\n", "sys/kernel/random/boot_id": "b-1\n"},
    )
    for pid, state in enumerate(states, start=100):
        tree(root, **{f"{pid}/stat": f"{pid} (odd) name) {state} 1 1"})
    return root


def test_the_hosts_state_is_read(tmp_path: Path) -> None:
    sample = HostSensor(proc(tmp_path, "RDDZS")).poll()
    assert (sample.memory_available_fraction, sample.uptime_s, sample.load) == (0.25, 12345.6, 0.5)
    assert (sample.stuck_processes, sample.zombies, sample.error) == (2, 1, "")


def test_waiting_kernel_thread_is_not_stuck(tmp_path: Path) -> None:
    proc(tmp_path, "")
    tree(tmp_path, **{"200/stat": "200 (kworker) D 2 0"})
    assert HostSensor(tmp_path).poll().stuck_processes == 0


def test_unreadable_host_sample_states_the_error(tmp_path: Path) -> None:
    sample = HostSensor(tmp_path).poll()
    assert "FileNotFoundError" in sample.error
    assert sample.unreadable == 1


def test_network_mounts_are_found_by_their_kind(tmp_path: Path) -> None:
    tree(tmp_path, **{"self/mounts": "srv:/x /data\\0401 nfs4 rw 0 0\n/dev/sda / ext4 rw 0 0\n"})
    assert sysfs.network_mounts(tmp_path) == ["/data 1"]


def test_network_mounts_stand_beside_odd_names(tmp_path: Path) -> None:
    tree(tmp_path, **{"self/mounts": "fuse /a\x0bb fuse rw 0 0\nsrv:/x /data nfs4 rw 0 0\n"})
    assert sysfs.network_mounts(tmp_path) == ["/data"]


@contextmanager
def threads_ended() -> Iterator[None]:
    """Wait for the threads that the block has started. Others may belong to servers of earlier tests."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(60)


def test_path_on_a_network_mount_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, **{"self/mounts": "srv:/x / nfs4 rw 0 0\n"})
    asked: list[list[str]] = []
    monkeypatch.setattr(PathSensor, "_check_paths", lambda _, paths: asked.append(paths))
    with threads_ended():
        PathSensor(("/",), tmp_path, ManualClock(monotonic=100.0)).poll()
    assert asked == [["/"]]


def test_hung_mount_is_timed_and_blocks_no_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, **{"self/mounts": "srv:/x /dead nfs4 rw 0 0\n"})
    answer = threading.Event()
    real = os.statvfs

    def statvfs(path: str) -> os.statvfs_result:
        if path == "/dead":
            answer.wait(60)
        return real("/")

    monkeypatch.setattr(host_module.os, "statvfs", statvfs)
    clock = ManualClock(monotonic=100.0)
    sensor = PathSensor(("/",), tmp_path, clock)
    with threads_ended():
        sensor.poll()
        clock.advance(15.0)
        try:
            dead = next(sample for sample in sensor.poll() if sample.path == "/dead")
            assert (dead.silent_s, dead.free_fraction) == (15.0, None)
        finally:
            answer.set()
    assert all(sample.silent_s == 0 and sample.free_fraction is not None for sample in sensor.poll())


# --- by which a vendor knows the parts ------------------------------------------------------------------------------


@pytest.mark.promise("vendor-document")
def test_port_keeps_its_vendor_identity_after_removal(tmp_path: Path) -> None:
    card = tmp_path / "devices/0000:5e:00.0"
    card.mkdir(parents=True)
    folder = "class/infiniband/mlx5_0"
    infiniband(tmp_path, "4: ACTIVE")
    tree(tmp_path, **{f"{folder}/board_id": "MT_0000000838\n", f"{folder}/fw_ver": "28.39.1002\n"})
    tree(tmp_path, **{f"{folder}/node_guid": "946d:ae03:00f1:0000\n"})
    (tmp_path / folder / "device").symlink_to(card)
    sensor = NetworkSensor(tmp_path)
    told = {"address": "946d:ae03:00f1:0000", "board": "MT_0000000838", "firmware": "28.39.1002"}
    assert [port.identity for port in sensor.poll()] == [told | {"pci_bus_id": "0000:5e:00.0"}]
    shutil.rmtree(tmp_path / folder)
    for _ in range(COUNTERS_EVERY):
        (port,) = sensor.poll()
    assert (port.up, port.identity) == (False, told | {"pci_bus_id": "0000:5e:00.0"})


def test_an_ethernet_port_has_its_address(tmp_path: Path) -> None:
    ethernet(tmp_path, "eth0", "up", physical=True)
    tree(tmp_path, **{"class/net/eth0/address": "94:6d:ae:03:00:f1\n"})
    assert NetworkSensor(tmp_path).poll()[0].identity == {"address": "94:6d:ae:03:00:f1"}


def test_host_identity_skips_files_readable_only_by_root(tmp_path: Path) -> None:
    dmi, kernel = "class/dmi/id", "sys/kernel/osrelease"
    tree(
        tmp_path, **{f"{dmi}/sys_vendor": "NVIDIA\n", f"{dmi}/product_name": "DGXH100\n", kernel: "6.8.0-40-generic\n"}
    )
    tree(tmp_path, **{f"{dmi}/product_serial": "1660224000170\n"})
    named = sysfs.Host(vendor="NVIDIA", product="DGXH100", serial="1660224000170", kernel="6.8.0-40-generic")
    assert sysfs.host_identity(tmp_path, tmp_path) == named
    assert sysfs.host_identity(tmp_path / "nothing", tmp_path / "nothing") == sysfs.Host()

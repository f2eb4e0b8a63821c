from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from everstep.clock import ManualClock
from everstep.wire.v1.agent import Host
from everstep_agent.drivers import sysfs
from everstep_agent.drivers.ports import default_route_ports
from everstep_agent.drivers.samples import PathSample
from everstep_agent.sensors.host import HostSensor, PathSensor
from everstep_agent.sensors.network import COUNTERS_EVERY, NetworkSensor
from tests.unit.agent.sensors.port_tree import PortTree


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


CARD = "pci0000:15/0000:15:01.0/0000:5e:00.0"


def network(tmp_path: Path) -> tuple[PortTree, NetworkSensor]:
    """Return a tree with an InfiniBand port, and its sensor."""
    tree_of_ports = PortTree(tmp_path)
    tree_of_ports.infiniband("mlx5_0", tree_of_ports.pci(CARD, "mlx5_core"))
    return tree_of_ports, NetworkSensor(tree_of_ports.sys, tree_of_ports.proc)


def test_infiniband_port_reports_every_field(tmp_path: Path) -> None:
    ports, sensor = network(tmp_path)
    counters = ports.sys / "class/infiniband/mlx5_0/ports/1/counters"
    for name, count in {"symbol_error": 3, "port_rcv_errors": 2, "link_downed": 5}.items():
        ports.write(counters / name, count)
    (port,) = sensor.poll()
    assert (port.name, port.up, port.rate_gbps, port.errors, port.link_downs) == ("mlx5_0/1", True, 400.0, 5, 5)
    assert (port.state, port.phys_state, port.link_layer, port.width) == ("ACTIVE", "LinkUp", "InfiniBand", 4)


def test_ethernet_port_reports_every_field(tmp_path: Path) -> None:
    ports = PortTree(tmp_path)
    device = ports.pci("pci0000:15/0000:5e:00.0", "mlx5_core")
    ports.ethernet("eth0", device, address="94:6d:ae:03:00:f1")
    ports.ethernet("veth1", None)
    (port,) = NetworkSensor(ports.sys, ports.proc).poll()
    assert (port.name, port.up, port.rate_gbps, port.link_downs) == ("eth0", True, 25.0, 0)
    assert (port.state, port.flags, port.link_layer) == ("up", 0x1003, "Ethernet")
    assert port.identity == {"address": "94:6d:ae:03:00:f1", "pci_bus_id": "0000:5e:00.0"}


def test_fallen_port_is_known_to_have_been_up(tmp_path: Path) -> None:
    ports, sensor = network(tmp_path)
    sensor.poll()
    ports.set_infiniband("mlx5_0", "1: DOWN", "2: Polling")
    (port,) = sensor.poll()
    assert (port.up, port.lost_link, port.phys_state) == (False, 1, "Polling")


def test_counters_and_new_ports_are_read_periodically(tmp_path: Path) -> None:
    ports, sensor = network(tmp_path)
    sensor.poll()
    ports.write(ports.sys / "class/infiniband/mlx5_0/ports/1/counters/link_downed", 2)
    ports.ethernet("eth0", ports.pci("pci0000:15/0000:5f:00.0", "mlx5_core"))
    polls = [sensor.poll() for _ in range(COUNTERS_EVERY)]
    assert [len(poll) for poll in polls] == [1] * (COUNTERS_EVERY - 1) + [2]
    assert polls[-1][0].link_downs == 2


@pytest.mark.parametrize("text", ["", "eth1\t00000000\n", "noise\n"])
def test_unreadable_routes_name_no_port(tmp_path: Path, text: str) -> None:
    tree(tmp_path, **{"net/route": text, "net/ipv6_route": text})
    assert default_route_ports(tmp_path, tmp_path) == frozenset()


def test_default_route_of_ipv6_counts(tmp_path: Path) -> None:
    zero, routes = "0" * 32, ["", ""]
    for index, (place, name) in enumerate(((zero, "eno1"), ("fe80" + "0" * 28, "eth9"))):
        routes[index] = f"{place} 00 {zero} 00 fd{'0' * 30} 00000400 00000003 00000000 00000003 {name}"
    tree(tmp_path, **{"net/ipv6_route": "\n".join(routes)})
    assert default_route_ports(tmp_path, tmp_path) == {"eno1"}


def test_default_route_is_that_of_the_first_process(tmp_path: Path) -> None:
    line = "{} 00000000 0100000A 0003 0 0 0 00000000 0 0 0\n"
    tree(tmp_path, **{"net/route": line.format("pod0"), "1/net/route": line.format("eno1")})
    assert default_route_ports(tmp_path, tmp_path) == {"eno1"}


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


def test_hosts_state_is_read(tmp_path: Path) -> None:
    sample = HostSensor(proc(tmp_path, "RDDZS")).poll()
    assert (sample.memory_available_fraction, sample.uptime_s, sample.load) == (0.25, 12345.6, 0.5)
    assert (sample.stuck_processes, sample.zombies, sample.error) == (2, 1, "")


def test_unreadable_host_sample_states_the_error(tmp_path: Path) -> None:
    sample = HostSensor(tmp_path).poll()
    assert "FileNotFoundError" in sample.error
    assert sample.unreadable == 1


def test_network_mounts_are_found_by_their_kind(tmp_path: Path) -> None:
    tree(tmp_path, **{"self/mounts": "srv:/x /data\\0401 nfs4 rw 0 0\n/dev/sda / ext4 rw 0 0\n"})
    assert sysfs.network_mounts(tmp_path) == ["/data 1"]


@contextmanager
def threads_ended() -> Iterator[None]:
    """Wait for the threads that the block has started. Others may belong to servers of earlier tests."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(60)


def test_hung_mount_is_timed_and_blocks_no_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, **{"self/mounts": "srv:/x /dead nfs4 rw 0 0\n"})
    answer = threading.Event()
    real = os.statvfs

    def statvfs(path: str) -> os.statvfs_result:
        if path == "/dead":
            answer.wait(60)
        return real("/")

    monkeypatch.setattr(os, "statvfs", statvfs)
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


def test_pressure_is_the_average_of_five_minutes(tmp_path: Path) -> None:
    some, full = (
        f"{kind} avg10=90.00 avg60=80.00 avg300={share} total=1" for kind, share in (("some", 40), ("full", 2))
    )
    files = {f"pressure/{name}": f"{some}\n{full}\n" for name in ("cpu", "memory", "io")}
    tree(proc(tmp_path, ""), **files, **{"sys/fs/file-nr": "1984\t0\t9920\n"})
    sample = HostSensor(tmp_path).poll()
    assert (sample.cpu_pressure, sample.memory_pressure, sample.io_pressure) == (0.4, 0.02, 0.02)
    assert sample.open_files_fraction == 0.2


def test_kernel_without_pressure_has_unknown_values(tmp_path: Path) -> None:
    sample = HostSensor(proc(tmp_path, "")).poll()
    assert (sample.cpu_pressure, sample.io_pressure, sample.open_files_fraction, sample.error) == (None, None, None, "")


SPACE = {"f_frsize": 4096, "f_blocks": 1000, "f_bavail": 100, "f_files": 500, "f_favail": 5, "f_flag": 0}


@pytest.mark.parametrize(
    ("status", "free", "free_inodes"),
    [
        ({}, 0.1, 0.01),
        ({"f_files": 0, "f_favail": 0}, 0.1, None),  # btrfs
        ({"f_bavail": 0, "f_favail": 0, "f_flag": os.ST_RDONLY}, None, None),  # squashfs
        ({"f_blocks": 0, "f_bavail": 0}, None, None),  # autofs
    ],
)
def test_file_systems_without_limits_are_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: dict[str, int], free: float, free_inodes: float
) -> None:
    tree(tmp_path, **{"self/mounts": ""})
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**SPACE | status))
    sensor = PathSensor(("/",), tmp_path, ManualClock())
    with threads_ended():
        sensor.poll()
    assert sensor.poll() == (PathSample(path="/", free_fraction=free, free_inode_fraction=free_inodes),)


def test_vault_files_do_not_fill_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, **{"self/mounts": f"tmpfs {tmp_path} tmpfs rw 0 0\n", "vault/job/slot": "x" * (980 * 4096)})
    monkeypatch.setattr("everstep_agent.sensors.host.SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**SPACE | {"f_bavail": 10}))
    sensor = PathSensor((), tmp_path, ManualClock(), tmp_path / "vault")
    with threads_ended():
        sensor.poll()
    (sample,) = sensor.poll()
    assert (sample.free_memory_fraction, sample.free_fraction) == (0.5, None)


@pytest.mark.promise("vendor-document")
def test_port_keeps_its_vendor_identity_after_removal(tmp_path: Path) -> None:
    ports, sensor = network(tmp_path)
    folder = ports.sys / "class/infiniband/mlx5_0"
    attributes = {"address": "946d:ae03:00f1:0000", "board": "MT_0000000838", "firmware": "28.39.1002"}
    for name, file in {"address": "node_guid", "board": "board_id", "firmware": "fw_ver"}.items():
        ports.write(folder / file, attributes[name])
    assert [port.identity for port in sensor.poll()] == [attributes | {"pci_bus_id": "0000:5e:00.0"}]
    ports.remove_device(ports.sys / "devices" / CARD)
    for _ in range(COUNTERS_EVERY):
        (port,) = sensor.poll()
    assert (port.device_gone, port.identity) == (1, attributes | {"pci_bus_id": "0000:5e:00.0"})


def test_host_identity_skips_files_readable_only_by_root(tmp_path: Path) -> None:
    dmi, kernel = "class/dmi/id", "sys/kernel/osrelease"
    tree(
        tmp_path, **{f"{dmi}/sys_vendor": "NVIDIA\n", f"{dmi}/product_name": "DGXH100\n", kernel: "6.8.0-40-generic\n"}
    )
    tree(tmp_path, **{f"{dmi}/product_serial": "1660224000170\n"})
    named = Host(vendor="NVIDIA", product="DGXH100", serial="1660224000170", kernel="6.8.0-40-generic")
    assert sysfs.host_identity(tmp_path, tmp_path) == named
    assert sysfs.host_identity(tmp_path / "nothing", tmp_path / "nothing") == Host()

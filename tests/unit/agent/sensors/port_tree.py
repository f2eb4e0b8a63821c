"""Build and change a tree of /sys and /proc files as the kernel makes them for PCI and USB devices and their ports."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from everstep.vocabulary import Finding
from everstep_agent.sensors.network import NetworkSensor
from tests.support.agents.sensors import TimedAssessor


class PortTree:
    """A tree below ``root``. Devices are named by their path below ``sys/devices``."""

    def __init__(self, root: Path) -> None:
        self.sys, self.proc = root / "sys", root / "proc"
        self.write(self.proc / "net/route", "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n")

    def write(self, path: Path, text: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def link(self, path: Path, target: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(os.path.relpath(target, path.parent))

    # Devices

    def pci(self, device: str, driver: str, numa: int = 0, kind: str = "0x020000", vendor: str = "0x15b3") -> Path:
        """Add a PCI device and its driver."""
        folder = self.sys / "devices" / device
        for name, text in {"class": kind, "vendor": vendor, "numa_node": numa}.items():
            self.write(folder / name, text)
        self.link(folder / "driver", self.sys / "bus/pci/drivers" / driver)
        self.link(folder / "subsystem", self.sys / "bus/pci")
        self.link(self.sys / "bus/pci/devices" / folder.name, folder)
        return folder

    def gpu(self, device: str, numa: int = 0) -> Path:
        return self.pci(device, "nvidia", numa, kind="0x030200", vendor="0x10de")

    def usb(self, device: str, driver: str) -> Path:
        folder = self.sys / "devices" / device
        self.link(folder / "driver", self.sys / "bus/usb/drivers" / driver)
        self.link(folder / "subsystem", self.sys / "bus/usb")
        return folder

    def remove_device(self, folder: Path) -> None:
        """Remove a device and its ports, as the kernel does when it is unplugged."""
        for kind in ("net", "infiniband"):
            for port in list((folder / kind).glob("*")):
                (self.sys / "class" / kind / port.name).unlink()
        (self.sys / "bus/pci/devices" / folder.name).unlink(missing_ok=True)
        shutil.rmtree(folder)

    # Ports

    def ethernet(self, name: str, device: Path | None, state: str = "up", gbps: int = 25, **files: object) -> Path:
        """Add an Ethernet interface; without a device a virtual one."""
        folder = (device or self.sys / "devices/virtual") / "net" / name
        index = len(list((self.sys / "class/net").glob("*"))) + 1
        values = {"type": 1, "operstate": state, "flags": "0x1003", "speed": gbps * 1000, "ifindex": index}
        for file, text in (values | {"iflink": index, "carrier_down_count": 0} | files).items():
            self.write(folder / file, text)
        if device is not None:
            self.link(folder / "device", device)
        self.link(self.sys / "class/net" / name, folder)
        return folder

    def infiniband(self, name: str, device: Path | None, link_layer: str = "InfiniBand", gbps: int = 400) -> Path:
        """Add an RDMA device with one active port, and return the port's folder."""
        folder = (device or self.sys / "devices/virtual") / "infiniband" / name
        port = folder / "ports/1"
        values = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "link_layer": link_layer}
        values |= {"rate": f"{gbps} Gb/sec (4X NDR)", "counters/symbol_error": "0", "counters/link_downed": "0"}
        for file, text in values.items():
            self.write(port / file, text)
        if device is not None:
            self.link(folder / "device", device)
        self.link(self.sys / "class/infiniband" / name, folder)
        return port

    def bond(self, name: str, *members: str) -> None:
        bond = self.ethernet(name, None)
        self.write(bond / "bonding/mode", "802.3ad 4")
        for member in members:
            port = (self.sys / "class/net" / member).resolve()
            self.link(port / "master", bond)
            self.link(bond / f"lower_{member}", port)

    def default_route(self, name: str) -> None:
        with (self.proc / "net/route").open("a") as file:
            file.write(f"{name}\t00000000\t0102000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n")

    def set_ethernet(self, name: str, state: str, flags: int = 0x1003, gbps: int = 200) -> None:
        folder = self.sys / "class/net" / name
        self.write(folder / "operstate", state)
        self.write(folder / "flags", hex(flags))
        self.write(folder / "speed", gbps * 1000 if state == "up" else -1)

    def set_infiniband(self, name: str, state: str, phys_state: str, rate: str = "400 Gb/sec (4X NDR)") -> None:
        port = self.sys / "class/infiniband" / name / "ports/1"
        for file, text in {"state": state, "phys_state": phys_state, "rate": rate}.items():
            self.write(port / file, text)

    def take_away(self, kind: str, name: str) -> tuple[Path, Path]:
        """Hide a port, as if another network namespace had it; the device stays."""
        link = self.sys / "class" / kind / name
        folder, hidden = link.resolve(), self.sys.parent / "elsewhere" / kind / name
        hidden.parent.mkdir(parents=True, exist_ok=True)
        link.unlink()
        folder.rename(hidden)
        return hidden, folder

    def bring_back(self, kind: str, name: str, moved: tuple[Path, Path]) -> None:
        hidden, folder = moved
        hidden.rename(folder)
        self.link(self.sys / "class" / kind / name, folder)


def training_node(root: Path) -> PortTree:
    """Return a node with two GPUs, each with an InfiniBand port below its switch, and every other kind of port."""
    tree = PortTree(root)
    for index, complex_ in enumerate(("15", "97")):
        switch = f"pci0000:{complex_}/0000:{complex_}:01.0/0000:{complex_}:02.0"
        tree.gpu(f"{switch}/0000:{complex_}:1b.0", numa=index)
        nic = tree.pci(f"{switch}/0000:{complex_}:1c.0", "mlx5_core", numa=index, kind="0x020700")
        tree.infiniband(f"mlx5_{index}", nic)
    storage = tree.pci("pci0000:e0/0000:e0:01.0/0000:e1:00.0", "mlx5_core", numa=1)
    tree.infiniband("mlx5_2", storage, link_layer="Ethernet", gbps=200)
    tree.ethernet("ens3f0np0", storage, gbps=200, phys_port_name="p0", address="94:6d:ae:03:00:f1")
    function = tree.pci("pci0000:e0/0000:e0:01.0/0000:e1:00.2", "mlx5_core", numa=1)
    tree.link(function / "physfn", storage)
    tree.infiniband("mlx5_3", function, link_layer="Ethernet", gbps=200)
    tree.ethernet("ens3f0v0", function, gbps=200)
    tree.ethernet("ens3f0r0", storage, gbps=200, phys_port_name="pf0vf0")
    tree.ethernet("eno1", tree.pci("pci0000:00/0000:00:1c.0/0000:02:00.0", "igb"), gbps=1)
    tree.ethernet("eno2", tree.pci("pci0000:00/0000:00:1d.0/0000:03:00.0", "mlx5_core"), gbps=25)
    tree.ethernet("usb0", tree.usb("pci0000:00/0000:00:14.0/usb1/1-8/1-8:2.0", "cdc_ether"), gbps=1)
    for name in ("docker0", "bond0", "cilium_host"):
        tree.ethernet(name, None)
    tree.ethernet("lo", None, "unknown", type=772)
    tree.link(tree.sys / "class/net/bond0/lower_eno2", tree.sys / "class/net/eno2")
    tree.default_route("bond0")
    return tree


class Watched:
    """A node whose ports are polled once a second."""

    def __init__(self, tree: PortTree) -> None:
        self.tree = tree
        self.sensor = NetworkSensor(tree.sys, tree.proc)
        self.judge = TimedAssessor()
        self.seen: dict[str, Finding] = {}

    def poll(self, count: int, every_s: float = 1.0) -> None:
        for _ in range(count):
            self.judge.clock.advance(every_s - 1.0)
            self.judge.polls(1, ports=self.sensor.poll())
            self.seen |= {finding.rule: finding for finding in self.judge.assessor.findings}

    def watch(self, seconds: int) -> None:
        """Poll each second at first, and then more seldom, which costs less."""
        self.poll(10)
        self.poll((seconds - 10) // 5, every_s=5.0)

    def active(self) -> set[tuple[str, str]]:
        return {(finding.rule, finding.subject) for finding in self.judge.assessor.findings}

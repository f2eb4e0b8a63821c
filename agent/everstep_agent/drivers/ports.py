"""Read network ports, and what each is used for, from /sys and /proc below injectable roots.

Functions return None, "" or leave a port out if the kernel does not offer a value; they never raise OSError. Facts are
from the kernel's Documentation/ABI/stable/sysfs-class-infiniband, Documentation/ABI/testing/sysfs-class-net and
Documentation/networking/operstates.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from everstep.host.pci_devices import pci_devices
from everstep_agent.drivers.pci_gpus import is_nvidia_gpu
from everstep_agent.drivers.samples import PortRole
from everstep_agent.drivers.sysfs import entries, leading_number, read_int, read_text

COUNTERS: dict[str, dict[str, tuple[str, ...]]] = {
    "infiniband": {
        "counters": (
            "symbol_error",
            "link_error_recovery",
            "port_rcv_errors",
            "port_rcv_remote_physical_errors",
            "port_rcv_switch_relay_errors",
            "port_xmit_discards",
            "port_xmit_wait",
            "local_link_integrity_errors",
            "excessive_buffer_overrun_errors",
            "VL15_dropped",
        ),
        "hw_counters": (
            "rnr_nak_retry_err",
            "local_ack_timeout_err",
            "req_transport_retries_exceeded",
            "out_of_sequence",
            "out_of_buffer",
            "packet_seq_err",
            "implied_nak_seq_err",
            "roce_slow_restart",
            "roce_adp_retrans",
            "rx_icrc_encapsulated",
            "rp_cnp_handled",
            "np_ecn_marked_roce_packets",
        ),
    },
    "efa": {
        "hw_counters": (
            "rx_drops",
            "rdma_read_wr_err",
            "rdma_write_wr_err",
            "retrans_pkts",
            "retrans_timeout_events",
            "impaired_remote_conn_events",
            "unresponsive_remote_events",
            "no_completion_cmds",
        ),
        "../../hw_counters": ("no_completion_cmds",),  # newer drivers: of the device
    },
    "ethernet": {
        "statistics": (
            "rx_errors",
            "rx_crc_errors",
            "rx_missed_errors",
            "rx_dropped",
            "tx_errors",
            "tx_dropped",
            "tx_carrier_errors",
        )
    },
}
"""Counters by kind of port and by folder below the port's. A device has those that it knows."""
_UNREADABLE_COUNTS = (2**32 - 1, 2**64 - 1)
"""All bits set: what a register of a device that does not answer shows. Narrower counters stop at that value."""
_ARPHRD_ETHER = "1"
_ETHERNET_UP = ("up", "unknown")
"""Values of ``operstate``: a driver that sets none shows "unknown", and the port has to be taken for usable."""

EFA_DRIVER = "efa"
"""Driver of Amazon's EFA: an RDMA device for collectives, always active, with counters of its own."""

FABRIC_DRIVERS = frozenset(
    ("mlx5_core", "mlx4_core", "ice", "bnxt_en", "ionic", "cxgb4", "fbnic", EFA_DRIVER, "gve", "mana", "hfi1", "ib_qib")
)
"""Drivers of adapters that clusters train and store over. A port of any other driver counts as a management port: a
missed loss costs less than the eviction of a healthy node. ``ena`` is not among them, because cloud software attaches
and detaches its ports at run time."""

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_USB_INTERFACE = re.compile(r"\d+-[\d.]+:\d+\.\d+")
_SUBFUNCTION = re.compile(r"\.sf\.\d+")
_REPRESENTOR = re.compile(r"pf\d+(vf|sf)\d+$")
_WIDTH = re.compile(r"\((\d+)X")


class PortDevice(NamedTuple):
    """The device that a port belongs to."""

    folder: Path  # resolved, below /sys/devices; it exists as long as the kernel knows the device
    driver: str
    numa_node: int | None
    is_usb: bool
    is_virtual_function: bool  # an SR-IOV function or a subfunction of a device of this host

    @property
    def bridges(self) -> tuple[str, ...]:
        """PCI bridges above the device, from the root port on."""
        parts = [part for part in self.folder.parts if _PCI_ADDRESS.fullmatch(part)]
        return tuple(parts[:-1])


class PortReading(NamedTuple):
    """One port as the kernel shows it; counters are since the driver was loaded."""

    sysfs_folder: Path
    name: str
    kind: str  # "infiniband" for everything in class/infiniband, RoCE and EFA included, or "ethernet"
    state: str  # "ACTIVE" or other InfiniBand states, or RFC 2863's operational state
    phys_state: str  # "LinkUp", "Polling", "Disabled", ...; "" for Ethernet
    flags: int | None  # interface flags of an Ethernet port
    is_asleep: bool  # whether the port or its device saves power
    link_layer: str
    rate_gbps: float | None
    width: int | None  # lanes of an InfiniBand link
    bond: str  # bond whose other ports are up, of an Ethernet port that is down
    link_downs: int | None
    device: PortDevice | None
    is_virtual: bool
    has_rdma: bool
    identity: dict[str, str]  # as in ``PortSample``

    @property
    def up(self) -> bool:
        return is_up(self.kind, self.state)


def is_up(kind: str, state: str) -> bool:
    """Return whether the state is that of a usable port."""
    return "ACTIVE" in state if kind == "infiniband" else state in _ETHERNET_UP


def infiniband_ports(root: Path) -> list[PortReading]:
    """Return the ports of RDMA devices, such as ``mlx5_0/1``."""
    ports = []
    for adapter in entries(root / "class/infiniband"):
        device = _device(adapter / "device")
        files = {"board": adapter / "board_id", "firmware": adapter / "fw_ver", "address": adapter / "node_guid"}
        for port in entries(adapter / "ports"):
            if (state := read_text(port / "state")) is None:
                continue
            width = _WIDTH.search(read_text(port / "rate") or "")
            phys_state = _without_number(read_text(port / "phys_state"))
            ports.append(
                PortReading(
                    sysfs_folder=port,
                    name=f"{adapter.name}/{port.name}",
                    kind="infiniband",
                    state=_without_number(state),
                    phys_state=phys_state,
                    flags=None,
                    is_asleep=phys_state == "Sleep",
                    link_layer=read_text(port / "link_layer") or "",
                    rate_gbps=leading_number(port / "rate"),
                    width=int(width[1]) if width else None,
                    bond="",
                    link_downs=read_int(port / "counters/link_downed"),
                    device=device,
                    is_virtual=device is None or device.is_virtual_function,
                    has_rdma=True,
                    identity=_identity(device, **files) | _efa_address(port, device),
                )
            )
    return ports


def ethernet_ports(root: Path) -> list[PortReading]:
    """Return Ethernet ports with a device; bridges, bonds, tunnels and container interfaces have none."""
    ports = []
    for port in entries(root / "class/net"):
        device = _device(port / "device")
        if device is None or read_text(port / "type") != _ARPHRD_ETHER:
            continue
        state = read_text(port / "operstate") or ""
        speed = read_int(port / "speed")
        adapters = [adapter.name for adapter in entries(port / "device/infiniband")]
        found = _identity(device, address=port / "address")
        ports.append(
            PortReading(
                sysfs_folder=port,
                name=port.name,
                kind="ethernet",
                state=state,
                phys_state="",
                flags=_flags(port),
                is_asleep=_is_suspended(port, state),
                link_layer="Ethernet",
                rate_gbps=speed / 1000 if speed is not None and speed > 0 else None,
                width=None,
                bond=_bond_that_works(port, state),
                link_downs=read_int(port / "carrier_down_count"),
                device=device,
                is_virtual=device.is_virtual_function or _is_upper(port) or _is_representor(port),
                has_rdma=bool(adapters),
                identity=found | ({"rdma": ", ".join(adapters)} if adapters else {}),
            )
        )
    return ports


def refresh_port(port: PortReading) -> PortReading | None:
    """Return the port with its state read again and other values unchanged; None if it is gone.

    Rate and width of a port that is not up are None, so that they are read again after the link has come up.
    """
    folder = port.sysfs_folder
    rate, width = (port.rate_gbps, port.width) if port.up else (None, None)
    if port.kind == "infiniband":
        if (state := read_text(folder / "state")) is None:
            return None
        # Each file is a question to the firmware, and an active port's link is up.
        phys_state = "LinkUp" if is_up(port.kind, state) else _without_number(read_text(folder / "phys_state"))
        is_asleep = phys_state == "Sleep"
        return port._replace(
            state=_without_number(state), phys_state=phys_state, is_asleep=is_asleep, rate_gbps=rate, width=width
        )
    if (state := read_text(folder / "operstate")) is None:
        return None
    return port._replace(
        state=state,
        flags=_flags(folder),
        is_asleep=_is_suspended(folder, state),
        bond=_bond_that_works(folder, state),
        rate_gbps=rate,
    )


def read_counters(port: PortReading) -> dict[str, int]:
    """Return the port's counters by name; those that cannot be read, or have all bits set, are left out."""
    kind = EFA_DRIVER if port.device is not None and port.device.driver == EFA_DRIVER else port.kind
    return {
        name: count
        for folder, names in COUNTERS[kind].items()
        for name in names
        if (count := read_int(port.sysfs_folder / folder / name)) is not None and count not in _UNREADABLE_COUNTS
    }


def default_route_ports(root: Path, proc: Path) -> frozenset[str]:
    """Return the interfaces that carry a default route, and those below them (bond members, a VLAN's port)."""
    pending = [*_default_interfaces(proc)]
    found: set[str] = set()
    while pending:
        if (name := pending.pop()) not in found:
            found.add(name)
            links = entries(root / "class/net" / name)
            pending += [link.name.removeprefix("lower_") for link in links if link.name.startswith("lower_")]
    return frozenset(found)


def _default_interfaces(proc: Path) -> Iterable[str]:
    """Yield the interfaces with a default route of the first process that this one sees.

    With the host's process ids that is the host's init, whatever network this process has: the ports are the host's.
    """
    net = proc / "1/net" if (proc / "1/net").is_dir() else proc / "net"
    for line in (read_text(net / "route") or "").splitlines():
        fields = line.split()  # Iface Destination Gateway Flags RefCnt Use Metric Mask ...
        if len(fields) > 7 and fields[1] == fields[7] == "00000000":
            yield fields[0]
    for line in (read_text(net / "ipv6_route") or "").splitlines():
        fields = line.split()  # destination, prefix length, ..., device
        if len(fields) > 9 and fields[1] == "00" and not fields[0].strip("0"):
            yield fields[-1]


# Roles


class PortRoles:
    """Tell what ports are used for. A port that ever had the default route stays a management port.

    (Network managers remove the route when the cable is pulled.)
    """

    def __init__(self, root: Path, proc: Path) -> None:
        self._root, self._proc = root, proc
        self._gpus: dict[str, PortDevice] = {}
        self._known: frozenset[Path] = frozenset()
        self._management: set[Path] = set()

    def assign(self, ports: Iterable[PortReading]) -> dict[str, PortRole]:
        """Return the role of each port by name."""
        ports = list(ports)
        devices = frozenset(port.device.folder for port in ports if port.device is not None)
        if not devices <= self._known:  # at the start, and when a device was plugged in
            gpus = (device.folder for device in pci_devices(self._root) or () if is_nvidia_gpu(device))
            found = ((gpu.name, _device(gpu)) for gpu in gpus)
            self._gpus = {name: device for name, device in found if device is not None}
        self._known = devices
        routes = default_route_ports(self._root, self._proc)
        self._management |= {port.device.folder for port in ports if port.device is not None and port.name in routes}
        has_near = any(port.has_rdma and not port.is_virtual and self.nearest_gpus(port) for port in ports)
        return {port.name: self._role(port, has_near) for port in ports}

    def nearest_gpus(self, port: PortReading) -> list[str]:
        """Return the GPUs that share most PCIe bridges with the port; none if all are behind other root ports."""
        if port.device is None or port.device.is_usb:
            return []
        bridges = port.device.bridges
        shared = {name: _common(bridges, gpu.bridges) for name, gpu in self._gpus.items()}
        most = max(shared.values(), default=0)
        return [name for name, count in shared.items() if count == most > 0]

    def _role(self, port: PortReading, has_near: bool) -> PortRole:
        device = port.device
        if port.is_virtual or device is None:
            return PortRole.VIRTUAL
        if device.is_usb:
            return PortRole.OUT_OF_BAND
        if device.driver not in FABRIC_DRIVERS and port.link_layer != "InfiniBand":
            return PortRole.MANAGEMENT
        if device.driver == EFA_DRIVER:
            return PortRole.COMPUTE
        is_near = bool(self.nearest_gpus(port))
        if port.has_rdma and is_near:
            return PortRole.COMPUTE
        if device.folder in self._management:
            return PortRole.MANAGEMENT
        if is_near:
            return PortRole.COMPUTE
        if not port.has_rdma or has_near:
            return PortRole.STORAGE
        nodes = {gpu.numa_node for gpu in self._gpus.values()}
        return PortRole.COMPUTE if not nodes or device.numa_node in nodes else PortRole.STORAGE


def _common(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    pairs = zip(first, second, strict=False)
    return next((depth for depth, (left, right) in enumerate(pairs) if left != right), min(len(first), len(second)))


# Parts of a port


def _device(link: Path) -> PortDevice | None:
    if not link.exists():
        return None
    folder = link.resolve()
    subsystem = (folder / "subsystem").resolve().name if (folder / "subsystem").is_symlink() else ""
    return PortDevice(
        folder=folder,
        driver=(folder / "driver").resolve().name if (folder / "driver").is_symlink() else "",
        numa_node=read_int(folder / "numa_node"),
        is_usb=subsystem == "usb" or _USB_INTERFACE.fullmatch(folder.name) is not None,
        is_virtual_function=(folder / "physfn").exists() or _SUBFUNCTION.search(folder.name) is not None,
    )


def _identity(device: PortDevice | None, **files: Path) -> dict[str, str]:
    """Return the contents of ``files`` and the device's bus address, as far as they exist."""
    found = {name: text for name, path in files.items() if (text := read_text(path))}
    is_pci = device is not None and _PCI_ADDRESS.fullmatch(device.folder.name)
    return found | ({"pci_bus_id": device.folder.name} if device is not None and is_pci else {})


def _efa_address(port: Path, device: PortDevice | None) -> dict[str, str]:
    """Return the hardware address of an EFA device, which its network interface has too, from the port's first GID.

    The lower half of the GID is the address with ff:fe in its middle and a bit inverted (RFC 4291, appendix A). Amazon
    lists interfaces by it.
    """
    if device is None or device.driver != EFA_DRIVER:
        return {}
    digits = (read_text(port / "gids/0") or "").replace(":", "")
    if not re.fullmatch("fe80[0-9a-f]{18}fffe[0-9a-f]{6}", digits):
        return {}
    octets = bytes.fromhex(digits[16:22] + digits[26:])
    return {"address": bytes((octets[0] ^ 2, *octets[1:])).hex(":")}


def _without_number(text: str | None) -> str:
    """Return ``ACTIVE`` for the kernel's ``4: ACTIVE``."""
    return (text or "").rpartition(":")[2].strip()


def _flags(port: Path) -> int | None:
    try:
        return int(read_text(port / "flags") or "", 16)
    except ValueError:
        return None


def _is_suspended(port: Path, state: str) -> bool:
    return state not in _ETHERNET_UP and read_text(port / "device/power/runtime_status") == "suspended"


def _is_upper(port: Path) -> bool:
    """Return whether the interface is stacked on another, as a VLAN is."""
    index, below = read_int(port / "ifindex"), read_int(port / "iflink")
    return index is not None and below is not None and index != below


def _is_representor(port: Path) -> bool:
    """Return whether the interface stands for a virtual function in its adapter's switch."""
    return _REPRESENTOR.search(read_text(port / "phys_port_name") or "") is not None


def _bond_that_works(port: Path, state: str) -> str:
    """Return the bond of a port that is down, if another port of it is up, else ""."""
    if state in _ETHERNET_UP or not (port / "master/bonding").exists():
        return ""
    bond = (port / "master").resolve()
    others = [below for below in bond.glob("lower_*") if below.name != f"lower_{port.name}"]
    return bond.name if any(read_text(other / "operstate") == "up" for other in others) else ""

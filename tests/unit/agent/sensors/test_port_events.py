"""Events on network ports, harmless ones and faults, through the real sensor and the built-in rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.vocabulary import Action, Mode, Severity
from everstep_agent.drivers.samples import PortRole
from tests.unit.agent.sensors.port_tree import PortTree, Watched, training_node

SETTLED_POLLS = 12
EVENT_POLLS = 125


@pytest.fixture
def node(tmp_path: Path) -> Watched:
    watched = Watched(training_node(tmp_path))
    watched.poll(SETTLED_POLLS)
    assert not watched.seen
    return watched


def test_ports_have_roles(node: Watched) -> None:
    roles = {sample.name: sample.role for sample in node.sensor.poll()}
    assert roles == {
        "mlx5_0/1": PortRole.COMPUTE,
        "mlx5_1/1": PortRole.COMPUTE,
        "mlx5_2/1": PortRole.STORAGE,
        "ens3f0np0": PortRole.STORAGE,
        "mlx5_3/1": PortRole.VIRTUAL,
        "ens3f0v0": PortRole.VIRTUAL,
        "ens3f0r0": PortRole.VIRTUAL,
        "eno1": PortRole.MANAGEMENT,
        "eno2": PortRole.MANAGEMENT,
        "usb0": PortRole.OUT_OF_BAND,
    }


def test_compute_port_names_its_gpu(node: Watched) -> None:
    gpus = {sample.name: sample.identity.get("gpus") for sample in node.sensor.poll()}
    assert (gpus["mlx5_0/1"], gpus["mlx5_1/1"], gpus["ens3f0np0"]) == ("0000:15:1b.0", "0000:97:1b.0", None)


# Harmless events. Each function changes the tree and returns the change that undoes it.

Undo = Callable[[], object]


def container_takes_virtual_function(tree: PortTree) -> Undo:
    ethernet, rdma = tree.take_away("net", "ens3f0v0"), tree.take_away("infiniband", "mlx5_3")

    def give_back() -> None:
        tree.bring_back("net", "ens3f0v0", ethernet)
        tree.bring_back("infiniband", "mlx5_3", rdma)

    return give_back


def container_takes_rdma_device(tree: PortTree) -> Undo:
    moved = tree.take_away("infiniband", "mlx5_0")
    return lambda: tree.bring_back("infiniband", "mlx5_0", moved)


def container_takes_physical_port(tree: PortTree) -> Undo:
    moved = tree.take_away("net", "ens3f0np0")
    return lambda: tree.bring_back("net", "ens3f0np0", moved)


def virtual_functions_are_removed(tree: PortTree) -> Undo:
    tree.remove_device(tree.sys / "devices/pci0000:e0/0000:e0:01.0/0000:e1:00.2")
    return lambda: None


def management_controller_leaves_usb(tree: PortTree) -> Undo:
    tree.remove_device(tree.sys / "devices/pci0000:00/0000:00:14.0/usb1/1-8/1-8:2.0")
    return lambda: tree.ethernet("usb0", tree.usb("pci0000:00/0000:00:14.0/usb1/1-8/1-8:2.0", "cdc_ether"))


def admin_disables_management_port(tree: PortTree) -> Undo:
    tree.set_ethernet("eno1", "down", flags=0x1002)
    return lambda: tree.set_ethernet("eno1", "up")


def management_cable_is_pulled(tree: PortTree) -> Undo:
    """The network manager removes the route, too."""
    tree.set_ethernet("eno2", "down")
    (tree.proc / "net/route").write_text("")
    return lambda: tree.set_ethernet("eno2", "up")


def admin_disables_infiniband_port(tree: PortTree) -> Undo:
    tree.set_infiniband("mlx5_1", "1: DOWN", "3: Disabled", "10 Gb/sec (4X SDR)")
    return lambda: tree.set_infiniband("mlx5_1", "1: DOWN", "2: Polling", "10 Gb/sec (4X SDR)")


def admin_disables_roce_port(tree: PortTree) -> Undo:
    tree.set_ethernet("ens3f0np0", "down", flags=0x1002)
    tree.set_infiniband("mlx5_2", "1: DOWN", "3: Disabled", "40 Gb/sec (4X QDR)")
    return lambda: tree.set_ethernet("ens3f0np0", "down")  # enabled again, its link is being trained


def software_interfaces_come_and_go(tree: PortTree) -> Undo:
    """WireGuard and TUN have no hardware address (65534); IPoIB (32) belongs to the device of an InfiniBand port."""
    names = {"veth12ab": 1, "br-7f": 1, "lxc0": 1, "dummy0": 1, "vxlan.calico": 1, "wg0": 65534, "tun0": 65534}
    for name, kind in names.items():
        folder = tree.ethernet(name, None, type=kind)
        tree.write(folder / "statistics/rx_crc_errors", 5000)
    tree.ethernet("ibp12s0", tree.sys / "devices/pci0000:15/0000:15:01.0/0000:15:02.0/0000:15:1c.0", type=32)
    for name in ("docker0", "cilium_host"):
        tree.take_away("net", name)

    def end() -> None:
        tree.set_ethernet("ibp12s0", "down")
        for name in names:
            tree.take_away("net", name)

    return end


def stacked_interfaces_come_and_go(tree: PortTree) -> Undo:
    """The kernel gives a VLAN no device. A driver's VLAN that has one is recognised by iflink."""
    storage = tree.sys / "devices/pci0000:e0/0000:e0:01.0/0000:e1:00.0"
    tree.ethernet("ens3f0np0.7", None, iflink=2)
    tree.ethernet("macvlan0", storage, iflink=2)
    return lambda: [tree.take_away("net", name) for name in ("ens3f0np0.7", "macvlan0")]


def bond_member_leaves(tree: PortTree) -> Undo:
    (tree.sys / "class/net/bond0/lower_eno2").unlink()
    tree.set_ethernet("eno2", "down", flags=0x1002)
    return lambda: tree.set_ethernet("eno2", "up")


def empty_socket_is_enabled(tree: PortTree) -> Undo:
    device = tree.pci("pci0000:e0/0000:e0:01.0/0000:e1:00.1", "mlx5_core")
    tree.ethernet("ens3f1np1", device, "down")
    return lambda: tree.set_ethernet("ens3f1np1", "down", flags=0x1002)


def idle_port_saves_power(tree: PortTree) -> Undo:
    tree.set_infiniband("mlx5_0", "1: DOWN", "1: Sleep")
    tree.write(tree.sys / "class/net/ens3f0np0/device/power/runtime_status", "suspended")
    tree.set_ethernet("ens3f0np0", "down")

    def wake() -> None:
        tree.set_infiniband("mlx5_0", "4: ACTIVE", "5: LinkUp")
        tree.set_ethernet("ens3f0np0", "up")

    return wake


def driver_is_reloaded(tree: PortTree) -> Undo:
    """The ports come back before their links are trained."""
    moved = [tree.take_away(kind, name) for kind, name in (("net", "ens3f0np0"), ("infiniband", "mlx5_0"))]

    def load() -> None:
        tree.bring_back("net", "ens3f0np0", moved[0])
        tree.bring_back("infiniband", "mlx5_0", moved[1])
        tree.set_ethernet("ens3f0np0", "down")
        tree.set_infiniband("mlx5_0", "1: DOWN", "2: Polling")

    return load


def usb_adapter_is_plugged_in(tree: PortTree) -> Undo:
    device = tree.usb("pci0000:00/0000:00:14.0/usb1/1-2/1-2:1.0", "ax88179_178a")
    tree.ethernet("enx00", device, gbps=1)
    return lambda: tree.remove_device(device)


def udev_renames_port(tree: PortTree) -> Undo:
    moved = tree.take_away("net", "ens3f0np0")
    tree.bring_back("net", "roce0", (moved[0], moved[1].with_name("roce0")))
    return lambda: None


def subnet_manager_restarts(tree: PortTree) -> Undo:
    tree.set_infiniband("mlx5_0", "2: INIT", "5: LinkUp")
    return lambda: tree.set_infiniband("mlx5_0", "4: ACTIVE", "5: LinkUp")


HARMLESS = [
    container_takes_virtual_function,
    container_takes_rdma_device,
    container_takes_physical_port,
    virtual_functions_are_removed,
    management_controller_leaves_usb,
    admin_disables_management_port,
    management_cable_is_pulled,
    admin_disables_infiniband_port,
    admin_disables_roce_port,
    software_interfaces_come_and_go,
    stacked_interfaces_come_and_go,
    bond_member_leaves,
    empty_socket_is_enabled,
    idle_port_saves_power,
    driver_is_reloaded,
    usb_adapter_is_plugged_in,
    udev_renames_port,
    subnet_manager_restarts,
]


@pytest.mark.parametrize("event", HARMLESS, ids=lambda event: event.__name__)
def test_harmless_event_accuses_no_port(node: Watched, event: Callable[[PortTree], Undo]) -> None:
    undo = event(node.tree)
    node.watch(EVENT_POLLS)
    undo()
    node.watch(EVENT_POLLS)
    assert {finding.severity for finding in node.seen.values()} <= {Severity.INFO}


def test_short_firmware_reset_is_no_loss(node: Watched) -> None:
    place = "pci0000:15/0000:15:01.0/0000:15:02.0/0000:15:1c.0"
    node.tree.remove_device(node.tree.sys / "devices" / place)
    node.poll(45)
    node.tree.infiniband("mlx5_0", node.tree.pci(place, "mlx5_core"))
    node.poll(EVENT_POLLS)
    assert not node.seen


# Faults


def count_link_loss(node: Watched, losses: int) -> None:
    node.tree.write(node.tree.sys / "class/infiniband/mlx5_0/ports/1/counters/link_downed", losses)


def test_pulled_cable_of_compute_port_drains(node: Watched) -> None:
    node.tree.set_infiniband("mlx5_0", "1: DOWN", "2: Polling", "10 Gb/sec (4X SDR)")
    node.poll(4)
    assert node.active() == {("port-down", "mlx5_0/1")}
    finding = node.seen["port-down"]
    assert (finding.severity, finding.action, finding.mode) == (Severity.CRITICAL, Action.DRAIN, Mode.ENFORCE)
    assert (finding.evidence["gpus"], finding.evidence["pci_bus_id"]) == ("0000:15:1b.0", "0000:15:1c.0")
    node.tree.set_infiniband("mlx5_0", "4: ACTIVE", "5: LinkUp")
    node.poll(35)
    assert node.active() == set()


def test_pulled_cable_of_roce_port_is_one_finding(node: Watched) -> None:
    node.tree.set_ethernet("ens3f0np0", "down")
    node.tree.set_infiniband("mlx5_2", "1: DOWN", "3: Disabled", "40 Gb/sec (4X QDR)")
    node.poll(4)
    assert node.active() == {("port-down", "ens3f0np0")}
    assert node.seen["port-down"].evidence["rdma"] == "mlx5_2"


def test_counted_loss_of_a_link_that_stays_down_is_one_finding(node: Watched) -> None:
    node.tree.set_infiniband("mlx5_0", "1: DOWN", "2: Polling", "10 Gb/sec (4X SDR)")
    count_link_loss(node, 1)
    node.poll(30)
    assert node.active() == {("port-down", "mlx5_0/1")}


def test_port_disabled_after_its_loss_clears(node: Watched) -> None:
    node.tree.set_ethernet("ens3f0np0", "down")
    node.poll(4)
    node.tree.set_ethernet("ens3f0np0", "down", flags=0x1002)
    node.poll(35)
    assert node.active() == set()


def test_device_that_left_the_bus_is_gone(node: Watched) -> None:
    """The driver removes the port seconds before the bus removes the device."""
    node.tree.take_away("infiniband", "mlx5_0")
    node.poll(5)
    device = node.tree.sys / "devices/pci0000:15/0000:15:01.0/0000:15:02.0/0000:15:1c.0"
    node.tree.remove_device(device)
    node.poll(61)
    assert node.active() == {("port-gone", "mlx5_0/1")}
    assert node.seen["port-gone"].evidence["pci_bus_id"] == "0000:15:1c.0"
    node.poll(EVENT_POLLS)
    assert node.active() == {("port-gone", "mlx5_0/1")}


def test_link_loss_between_polls_only_informs(node: Watched) -> None:
    count_link_loss(node, 1)
    node.poll(12)
    assert node.active() == {("port-link-lost", "mlx5_0/1")}
    finding = node.seen["port-link-lost"]
    assert (finding.severity, finding.action, finding.mode) == (Severity.INFO, Action.NONE, Mode.OBSERVE)
    node.poll(130, every_s=10.0)
    assert node.active() == set()


def test_repeated_link_losses_are_flapping(node: Watched) -> None:
    for losses in (1, 2, 3):
        count_link_loss(node, losses)
        node.poll(30)
    assert node.active() == {("port-flapping", "mlx5_0/1")}  # graver than a single loss of the same port


@pytest.mark.parametrize("name", ["eno1", "usb0", "ens3f0v0"])
def test_flapping_and_errors_of_other_ports_are_not_judged(node: Watched, name: str) -> None:
    port = node.tree.sys / "class/net" / name
    for count in (2, 4, 8):
        node.tree.write(port / "carrier_down_count", count)
        for counter in ("rx_errors", "rx_crc_errors", "tx_carrier_errors"):
            node.tree.write(port / "statistics" / counter, count * 1000)
        node.poll(15)
    assert not node.seen


@pytest.mark.parametrize(
    ("rate", "rule"), [("200 Gb/sec (2X NDR)", "port-narrow"), ("200 Gb/sec (4X HDR)", "port-slow")]
)
def test_link_that_trains_below_its_rate_is_slow(node: Watched, rate: str, rule: str) -> None:
    node.tree.set_infiniband("mlx5_0", "4: ACTIVE", "5: LinkUp", rate)
    node.poll(30)
    assert node.active() == {(rule, "mlx5_0/1")}
    finding = node.seen[rule]
    assert (finding.severity, finding.action, finding.mode) == (Severity.WARNING, Action.DRAIN, Mode.RECOMMEND)
    node.tree.set_infiniband("mlx5_0", "4: ACTIVE", "5: LinkUp")
    node.poll(75)
    assert node.active() == set()


def test_rate_of_a_link_in_training_is_not_judged(node: Watched) -> None:
    for _ in range(3):
        node.tree.set_infiniband("mlx5_0", "1: DOWN", "2: Polling", "10 Gb/sec (4X SDR)")
        node.poll(2)
        node.tree.set_infiniband("mlx5_0", "4: ACTIVE", "5: LinkUp")
        node.poll(25)
    assert not node.seen


def test_port_slower_than_its_peers_is_told_from_the_start(tmp_path: Path) -> None:
    """A node may be built so: cards of one kind, one of them at a slower switch."""
    tree = PortTree(tmp_path)
    for index in range(4):
        nic = tree.pci(f"pci0000:15/0000:15:0{index}.0/0000:5{index}:00.0", "mlx5_core")
        tree.infiniband(f"mlx5_{index}", nic, gbps=100 if index == 3 else 400)
    node = Watched(tree)
    node.poll(30)
    assert node.active() == {("port-slower-than-peers", "mlx5_3/1")}
    assert node.seen["port-slower-than-peers"].severity is Severity.INFO


def test_ports_of_different_rates_are_no_peers(tmp_path: Path) -> None:
    """Half of the cards are slower, because the node was built so."""
    tree = PortTree(tmp_path)
    for index in range(4):
        nic = tree.pci(f"pci0000:15/0000:15:0{index}.0/0000:5{index}:00.0", "mlx5_core")
        tree.infiniband(f"mlx5_{index}", nic, gbps=200 if index > 1 else 400)
    node = Watched(tree)
    node.poll(30)
    assert not node.seen


def test_new_rate_after_the_port_was_disabled_is_its_rate(node: Watched) -> None:
    """An administrator sets another speed."""
    node.tree.set_ethernet("ens3f0np0", "down", flags=0x1002)
    node.poll(12)
    node.tree.set_ethernet("ens3f0np0", "up", gbps=100)
    node.poll(40)
    assert not node.seen


def test_port_that_waits_for_its_subnet_manager_is_told(node: Watched) -> None:
    node.tree.set_infiniband("mlx5_0", "2: INIT", "5: LinkUp")
    node.poll(70)
    assert node.active() == {("port-unconfigured", "mlx5_0/1")}
    assert node.seen["port-unconfigured"].severity is Severity.INFO


def bonded_storage(node: Watched) -> PortTree:
    """Give the storage port a second one, and put both in a bond."""
    tree = node.tree
    second = tree.pci("pci0000:e0/0000:e0:01.0/0000:e1:00.1", "mlx5_core", numa=1)
    tree.ethernet("ens3f1np1", second, gbps=200)
    tree.bond("bond1", "ens3f0np0", "ens3f1np1")
    node.poll(SETTLED_POLLS)
    return tree


def test_bond_that_lost_one_port_warns_of_that_port(node: Watched) -> None:
    tree = bonded_storage(node)
    tree.set_ethernet("ens3f1np1", "down")
    node.poll(30)
    assert node.active() == {("port-bond-degraded", "ens3f1np1")}
    finding = node.seen["port-bond-degraded"]
    assert (finding.severity, finding.action, "bond1" in finding.message) == (Severity.WARNING, Action.NONE, True)
    tree.set_ethernet("ens3f0np0", "down")
    node.poll(4)
    assert node.active() == {("port-down", "ens3f0np0"), ("port-down", "ens3f1np1")}
    for name in ("ens3f0np0", "ens3f1np1"):
        tree.set_ethernet(name, "up")
    node.poll(35)
    assert node.active() == set()


def test_findings_of_a_forgotten_port_end(node: Watched) -> None:
    for losses in (1, 2, 3):
        node.tree.write(node.tree.sys / "class/net/ens3f0np0/carrier_down_count", losses)
        node.poll(10)
    assert node.active() == {("port-flapping", "ens3f0np0")}
    udev_renames_port(node.tree)
    node.poll(EVENT_POLLS)
    assert node.active() == set()


# Amazon's EFA


def efa_node(root: Path, gpus: int) -> Watched:
    """Return a node with four EFA devices beside each GPU; EFA has no link layer."""
    tree = PortTree(root)
    for index in range(gpus):
        tree.gpu(f"pci0000:{index}0/0000:{index}0:01.0/0000:{index}1:00.0")
        for number in range(4):
            device = tree.pci(f"pci0000:{index}0/0000:{index}0:0{number + 2}.0/0000:{index}{number + 2}:00.0", "efa")
            port = tree.infiniband(f"rdmap{index}{number}s0", device, link_layer="Unknown", gbps=100)
            (port / "counters/symbol_error").unlink()
            (port / "counters/link_downed").unlink()
            for counter in ("rx_drops", "retrans_pkts", "retrans_timeout_events", "impaired_remote_conn_events"):
                tree.write(port / "hw_counters" / counter, 0)
            tree.write(device / f"infiniband/rdmap{index}{number}s0/hw_counters/no_completion_cmds", 0)
    node = Watched(tree)
    node.poll(SETTLED_POLLS)
    return node


def test_efa_device_has_the_address_of_its_interface(tmp_path: Path) -> None:
    node = efa_node(tmp_path, gpus=1)
    gids = {
        "rdmap00s0": "fe80:0000:0000:0000:0c52:f0ff:fe5f:1707",
        "rdmap01s0": "0000:0000:0000:0000:0000:0000:0000:0000",
    }
    for name, gid in gids.items():
        node.tree.write(node.tree.sys / "class/infiniband" / name / "ports/1/gids/0", gid)
    node.poll(SETTLED_POLLS)
    addresses = {sample.name: sample.identity.get("address") for sample in node.sensor.poll()}
    assert (addresses["rdmap00s0/1"], addresses["rdmap01s0/1"]) == ("0e:52:f0:5f:17:07", None)


def test_healthy_efa_devices_make_no_finding(tmp_path: Path) -> None:
    node = efa_node(tmp_path, gpus=8)  # a p5.48xlarge
    assert {sample.role for sample in node.sensor.poll()} == {PortRole.COMPUTE}
    for counter, count in {"retrans_pkts": 10**7, "rx_drops": 10**6, "retrans_timeout_events": 900}.items():
        for port in node.tree.sys.glob("class/infiniband/*/ports/1"):
            node.tree.write(port / "hw_counters" / counter, count)
    node.poll(SETTLED_POLLS)
    assert not node.seen


def test_stuck_and_gone_efa_devices_are_found(tmp_path: Path) -> None:
    node = efa_node(tmp_path, gpus=1)
    node.tree.write(node.tree.sys / "class/infiniband/rdmap00s0/hw_counters/no_completion_cmds", 3)
    node.tree.remove_device((node.tree.sys / "class/infiniband/rdmap03s0/device").resolve())
    node.poll(75)
    assert node.active() == {("efa-commands-unanswered", "rdmap00s0/1"), ("port-gone", "rdmap03s0/1")}
    assert node.seen["efa-commands-unanswered"].severity is Severity.WARNING

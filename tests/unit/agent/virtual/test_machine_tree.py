from __future__ import annotations

from pathlib import Path

import pytest

from everstep.host.pci_devices import pci_devices
from everstep.wire.v1.agent import Host
from everstep_agent.drivers import sysfs
from everstep_agent.drivers.pci_gpus import is_nvidia_gpu
from everstep_agent.drivers.samples import PortPresence, PortRole, PortSample
from everstep_agent.sensors.host import PROCESSES_EVERY, HostSensor
from everstep_agent.sensors.network import COUNTERS_EVERY, NetworkSensor
from everstep_agent.virtual.machine_tree import MachineTree
from everstep_agent.virtual.scenario import Scenario, VirtualHost, VirtualMachine, VirtualPort, load_scenario
from tests.support.agents.sensors import Control, TimedAssessor


class Bench:
    """A virtual machine, its tree, and the real sensors of ports and host."""

    def __init__(self, tmp_path: Path, scenario: Scenario) -> None:
        self.control = Control(tmp_path / "control.json")
        self.machine = VirtualMachine(scenario, str(self.control.path))
        self.tree = MachineTree(tmp_path / "machine")
        self.tree.update(self.machine)
        self.network = NetworkSensor(self.tree.sys, self.tree.proc)
        self.host = HostSensor(self.tree.proc)

    def change(self, **content: object) -> None:
        self.control.write(**content)
        assert self.machine.reload_control()
        assert not self.machine.error
        self.tree.update(self.machine)

    def port(self, name: str = "mlx5_0/1") -> PortSample:
        """Poll until all files were read again, and return the port's sample."""
        samples = [self.network.poll() for _ in range(COUNTERS_EVERY)][-1]
        return next(sample for sample in samples if sample.name == name)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, load_scenario("default", "n1"))


def test_real_sensors_read_the_default_machine(bench: Bench) -> None:
    port = bench.port()
    assert (port.role, port.up, port.rate_gbps, port.width) == (PortRole.COMPUTE, True, 400.0, 4)
    assert port.identity["address"] == bench.machine.ports["mlx5_0"].address
    assert port.identity["gpus"] == "0000:1b:00.0"
    sample = bench.host.poll()
    assert (sample.uptime_s, sample.load, sample.stuck_processes, sample.zombies) == (86_400.0, 1.0, 0, 0)
    assert sample.memory_available_fraction == pytest.approx(0.9)
    assert sum(map(is_nvidia_gpu, pci_devices(bench.tree.sys) or ())) == 8
    assert sysfs.boot_id(bench.tree.proc) == "virtual-boot-1"


def test_host_identity_is_that_of_the_scenario(bench: Bench) -> None:
    host = bench.machine.host
    expected = Host(
        vendor=host.vendor,
        product=host.product,
        serial=host.serial,
        chassis_serial=host.chassis_serial,
        kernel=host.kernel,
    )
    assert sysfs.host_identity(bench.tree.sys, bench.tree.proc) == expected


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"up": False}, "lost_link", 1),
        ({"up": False}, "phys_state", "Polling"),
        ({"up": False, "enabled": False}, "lost_link", 0),
        ({"up": False, "phys_state": "Sleep"}, "lost_link", 0),
        ({"up": False, "phys_state": "LinkUp"}, "unconfigured", 1),
        ({"moved": True}, "presence", PortPresence.ELSEWHERE),
        ({"missing": True}, "device_gone", 1),
        ({"rate_gbps": 100.0, "width": 1}, "rate_fraction", 0.25),
        ({"link_downs": 1}, "link_losses", 1),
        ({"width": 2}, "lanes_missing", 2),
        ({"errors": 7, "counters": {"port_rcv_errors": 2}}, "errors", 9),
    ],
)
def test_control_file_reaches_the_sample(bench: Bench, change: dict[str, object], field: str, value: object) -> None:
    bench.port()
    bench.change(ports={"mlx5_0": change})
    assert getattr(bench.port(), field) == value
    bench.change()
    assert bench.port().lost_link == 0


def test_ports_of_all_roles_can_be_described(tmp_path: Path) -> None:
    ports = {
        "eth0": VirtualPort(kind="ethernet", driver="igb", default_route=True),
        "eth1": VirtualPort(kind="ethernet", virtual_function=True),
        "usb0": VirtualPort(kind="ethernet", usb=True, driver="cdc_ether"),
        "mlx5_0": VirtualPort(),
    }
    bench = Bench(tmp_path, Scenario(port=ports))
    assert {port.name: port.role for port in bench.network.poll()} == {
        "eth0": PortRole.MANAGEMENT,
        "eth1": PortRole.VIRTUAL,
        "usb0": PortRole.OUT_OF_BAND,
        "mlx5_0/1": PortRole.COMPUTE,
    }


def test_ports_of_a_bond_and_of_efa_can_be_described(tmp_path: Path) -> None:
    ports = {name: VirtualPort(kind="ethernet", bond="bond0") for name in ("eth0", "eth1")}
    bench = Bench(tmp_path, Scenario(port=ports | {"efa_0": VirtualPort(driver="efa")}))
    bench.port("eth1")
    bench.change(ports={"eth1": {"up": False}, "efa_0": {"counters": {"rdma_read_wr_err": 3}}})
    assert (bench.port("eth1").bond, bench.port("eth1").lost_bond_link, bench.port("eth0").bond) == ("bond0", 1, "")
    efa = bench.port("efa_0/1")
    assert (efa.link_layer, efa.role, efa.counts.efa.rdma_read_wr_err) == ("Unknown", PortRole.COMPUTE, 3)


def test_unknown_counter_of_a_port_is_refused(bench: Bench) -> None:
    bench.control.write(ports={"mlx5_0": {"counters": {"rx_crc_errors": 1}}})
    assert bench.machine.reload_control()
    assert "no counter rx_crc_errors of infiniband ports is read" in bench.machine.error


def test_virtual_port_that_falls_is_a_finding(bench: Bench) -> None:
    judge = TimedAssessor()
    judge.polls(1, ports=bench.network.poll())
    bench.change(ports={"mlx5_1": {"up": False}})
    for _ in range(3):
        judge.polls(1, ports=bench.network.poll())
    assert judge.keys() == {"network.port_down/mlx5_1/1"}


def test_processes_come_and_go(bench: Bench) -> None:
    bench.change(host={"stuck_processes": 3, "zombies": 2})
    sample = bench.host.poll()
    assert (sample.stuck_processes, sample.zombies) == (3, 2)
    bench.change()
    sample = [bench.host.poll() for _ in range(PROCESSES_EVERY)][-1]
    assert (sample.stuck_processes, sample.zombies) == (0, 0)


def test_tree_replaces_only_its_own_folders(tmp_path: Path) -> None:
    other = tmp_path / "machine/other"
    other.mkdir(parents=True)
    old = tmp_path / "machine/sys/class/net/old"
    old.mkdir(parents=True)
    MachineTree(tmp_path / "machine").update(VirtualMachine(Scenario(host=VirtualHost()), ""))
    assert other.exists()
    assert not old.exists()


def test_relative_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="not an absolute path"):
        MachineTree(Path())


def test_container_hides_processes_from_the_agent(bench: Bench) -> None:
    assert sysfs.is_host_pid_namespace(bench.tree.proc)
    bench.change(host={"in_container": True})
    assert not sysfs.is_host_pid_namespace(bench.tree.proc)
    assert not sysfs.is_host_pid_namespace(bench.tree.sys)

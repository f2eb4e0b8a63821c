"""The NVLink fabric through the real sensors, on a virtual NVML and virtual /sys, /proc, /etc and /dev."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from everstep.host.pci_devices import pci_devices
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import Action, Severity
from everstep_agent.drivers.fabric_services import count_switches
from everstep_agent.drivers.gpu_samples import FabricSample
from everstep_agent.drivers.samples import HostSample
from everstep_agent.sensors.fabric import IMEX_EVERY, NvlinkFabricSensor
from everstep_agent.sensors.gpu import GpuSensor
from everstep_agent.virtual.machine_tree import MachineTree
from everstep_agent.virtual.scenario import FABRIC_HEALTHY, VirtualMachine, load_scenario
from everstep_agent.virtual.virtual_nvml import install, uninstall
from tests.support.agents.sensors import Control, TimedAssessor, with_values

IMEX = {"imex_nodes": ["10.0.0.1"], "imex_enabled": True, "imex_channels": 1, "imex": True}
LINKS_OFF = {"nvlinks_down": 18}


class Node:
    """A virtual machine of some GPUs, the real sensors of its fabric, and an assessor."""

    def __init__(self, tmp_path: Path, gpus: int = 4) -> None:
        self.control = Control(tmp_path / "control.json")
        self.machine = VirtualMachine(load_scenario(f"default:{gpus}", "n1"), str(self.control.path))
        self.tree = MachineTree(tmp_path / "machine")
        self.tree.update(self.machine)
        install(self.machine, SYSTEM_CLOCK)
        self.gpus = GpuSensor(slow_every=1, set_activity=lambda activity: None)
        self.fabric = NvlinkFabricSensor(self.tree.proc, self.tree.etc, self.tree.dev)
        self.judge = TimedAssessor()

    def change(self, gpu: dict[str, Any] | None = None, every: bool = False, **content: Any) -> None:
        """Change GPU 0, or all GPUs if ``every``, and other parts of the machine."""
        if gpu is not None:
            content["gpus"] = {str(index): gpu for index in range(len(self.machine.gpus) if every else 1)}
        self.control.write(**content)
        assert self.machine.reload_control()
        assert not self.machine.error
        self.tree.update(self.machine)

    def poll(self, count: int = 1, uptime_s: float = 86_400.0) -> dict[str, str]:
        """Poll, and return the subjects of findings above info by rule."""
        gpus = tuple(with_values(sample, energy_j=None) for sample in self.gpus.poll())
        switches = count_switches(pci_devices(self.tree.sys) or ())
        for _ in range(count):
            self.judge.polls(1, *gpus, fabric=self.fabric.poll(gpus, switches), host=HostSample(uptime_s=uptime_s))
        found = self.judge.assessor.findings
        assert all(finding.action is Action.NONE for finding in found)
        return {finding.rule: finding.subject for finding in found if finding.severity is not Severity.INFO}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    yield Node(tmp_path)
    uninstall()


def fabric_of(node: Node) -> FabricSample:
    sample = node.gpus.poll()[0].nvlink.fabric
    assert sample is not None
    return sample


def test_health_mask_is_decoded(node: Node) -> None:
    healthy = fabric_of(node)
    assert (healthy.state, healthy.status, healthy.clique, healthy.cluster) == (3, 0, 0, "00" * 16)
    assert (healthy.degraded_bandwidth, healthy.route_unhealthy, healthy.misconfigured) == (0, 0, 0)
    assert (healthy.unpartitioned, healthy.manager_disconnected, healthy.not_joined) == (0, None, 0)
    node.change({"fabric_health": 1 | 1 << 2 | 1 << 4 | 1 << 6 | 5 << 8 | 2 << 12 | 2 << 14})
    sick = fabric_of(node)
    assert (sick.degraded_bandwidth, sick.route_recovery, sick.route_unhealthy) == (1, 1, 1)
    assert (sick.access_timeout_recovery, sick.misconfigured, sick.unpartitioned) == (1, 1, 1)
    assert sick.manager_disconnected == 1
    assert sick.detail == "state completed, too few NVLinks"
    node.change({"fabric_health": 0})
    unknown = fabric_of(node)
    assert (unknown.degraded_bandwidth, unknown.misconfigured, unknown.unpartitioned) == (None, None, None)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"fabric_health": FABRIC_HEALTHY ^ 3}, "fabric-bandwidth-degraded"),
        ({"fabric_health": FABRIC_HEALTHY ^ 3 << 2}, "fabric-route-recovery"),
        ({"fabric_health": FABRIC_HEALTHY ^ 3 << 4}, "fabric-route-unhealthy"),
        ({"fabric_health": FABRIC_HEALTHY ^ 3 << 6}, "fabric-access-timeout"),
        ({"fabric_health": FABRIC_HEALTHY ^ 3 << 8}, "fabric-misconfigured"),
        ({"fabric_status": 4}, "fabric-join-failed"),
        ({"fabric_state": 2}, "fabric-not-joined"),
        ({"fabric_clique": 7}, "fabric-domains-differ"),
    ],
)
def test_fault_of_the_fabric_is_found_and_clears(node: Node, change: dict[str, Any], rule: str) -> None:
    node.change(change)
    found = node.poll(60)
    assert found == {rule: "fabric-domains" if rule == "fabric-domains-differ" else "0000:1b:00"}
    node.change()
    assert node.poll(40) == {}


def test_gpu_without_a_partition_is_only_told(node: Node) -> None:
    node.change({"fabric_health": FABRIC_HEALTHY ^ 5 << 8})
    assert node.poll(30) == {}
    (finding,) = node.judge.assessor.findings
    assert (finding.rule, finding.severity) == ("fabric-no-partition", Severity.INFO)


def test_dead_fabric_manager_is_a_warning_with_its_cure(node: Node) -> None:
    assert node.poll(IMEX_EVERY) == {}
    node.change(fabric={"manager": False})
    assert node.poll(160) == {"fabric-manager-missing": "fabric-manager"}
    (finding,) = node.judge.assessor.findings
    assert "systemctl restart nvidia-fabricmanager" in finding.message
    node.change()
    assert node.poll(70) == {}


@pytest.mark.parametrize(
    "fabric",
    [
        {"manager": False, "switches": 0},
        {"manager": False, "switch_driver": "vfio-pci"},
        {"manager": False, "host_processes": False},
        {"imex_nodes": ["10.0.0.1"], "imex_channels": 1},
        {"imex_enabled": True, "imex_channels": 1},
        {"imex_nodes": ["10.0.0.1"], "imex_enabled": True},
        IMEX,
    ],
    ids=["elsewhere", "passed through", "container", "by the scheduler", "no domain", "no channels", "runs"],
)
def test_missing_service_that_is_not_needed_is_no_fault(node: Node, fabric: dict[str, Any]) -> None:
    node.change({"processes": 1}, fabric=fabric)
    assert node.poll(150) == {}


def test_dead_imex_of_a_busy_node_is_a_warning(node: Node) -> None:
    node.change(fabric=IMEX | {"imex": False})
    assert node.poll(150) == {}  # idle
    node.change({"processes": 1}, fabric=IMEX | {"imex": False})
    assert node.poll(150) == {"imex-missing": "imex"}


@pytest.mark.parametrize("state", [1, 2])
@pytest.mark.parametrize(
    ("gpu", "switches"),
    [(LINKS_OFF, 0), ({"nvlinks": 0}, 0), ({"nvlink_far_device": 0}, 0)],
    ids=["one GPU in a virtual machine, or GH200", "PCIe card", "PCIe cards with a bridge"],
)
def test_gpu_without_a_fabric_need_not_join(tmp_path: Path, state: int, gpu: dict[str, Any], switches: int) -> None:
    node = Node(tmp_path, gpus=1)
    node.change({"fabric_state": state, **gpu}, fabric={"switches": switches, "manager": False})
    assert node.poll(150) == {}
    uninstall()


def test_fabric_may_train_for_minutes_after_a_boot(node: Node) -> None:
    node.change({"fabric_state": 2, "nvlinks_down": 9}, every=True, fabric={"manager": False})
    assert node.poll(200, uptime_s=300.0) == {}


def test_pair_that_cannot_reach_each_other_is_named(node: Node) -> None:
    node.change({"unreachable_gpus": [2]})
    assert node.poll(15) == {"fabric-peers-unreachable": "peer-to-peer"}
    assert "0000:1b:00 with 0000:52:00" in node.judge.assessor.findings[0].message


@pytest.mark.parametrize(
    "change",
    [
        {"unreachable_gpus": [0, 1, 2, 3]},
        {"unreachable_gpus": [3], "nvlink_far_device": 0},
        {"calls": {"nvmlDeviceGetP2PStatus": {"error": 3}}},
    ],
    ids=["an IOMMU forbids all", "wired in a cube", "not supported"],
)
def test_peers_that_need_not_reach_each_other_are_no_fault(node: Node, change: dict[str, Any]) -> None:
    node.change(change, every=True)
    assert node.poll(15) == {}


def test_gpu_divided_by_mig_has_no_peers(node: Node) -> None:
    node.change({"unreachable_gpus": [1, 2, 3], "mig_mode": [1, 1]})
    assert node.poll(15) == {}


def test_links_to_the_cpu_that_fell_are_counted(node: Node) -> None:
    assert node.gpus.poll()[0].nvlink.c2c_links is None
    node.change({"c2c_links": 10, "c2c_links_down": 1})
    assert (node.gpus.poll()[0].nvlink.c2c_links, node.poll(40)) == (9, {})  # a link that was never active is no fault
    node.change({"c2c_links": 10, "c2c_links_down": 3})
    assert node.poll(30) == {"c2c-links-down": "0000:1b:00"}
    assert node.judge.assessor.findings[0].value == 2


def test_older_library_has_no_fabric(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("c_nvmlGpuFabricInfo_v2_t", "nvmlDeviceGetC2cModeInfoV", "nvmlDeviceGetP2PStatus"):
        monkeypatch.delattr(pynvml, name)
    sample = node.gpus.poll()[0]
    assert (sample.nvlink.fabric, sample.nvlink.peers, sample.nvlink.c2c_links) == (None, (), None)
    assert sample.failed_values == 0

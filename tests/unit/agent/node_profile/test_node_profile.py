"""The profile of a healthy node: what the agent learns, compares and ignores."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from everstep.clock import ManualClock
from everstep.vocabulary import Action, Mode, Severity
from everstep.wire.v1.agent import Gpu, Host
from everstep_agent.drivers.gpu_samples import GpuSample, LinkSample
from everstep_agent.drivers.samples import HostSample, InventorySample, PortPresence, PortRole, PortSample
from everstep_agent.findings.assessment import AssessorState, FindingAssessor, Instant
from everstep_agent.node_profile import cli, profile
from everstep_agent.node_profile.profile import PROFILED, NodeProfile, ProfileSample, SavedProfile
from everstep_agent.node_profile.store import ACCEPT_FILE, PROFILE_FILE, ProfileStore, order_acceptance
from everstep_agent.policy.rules import load_policy
from everstep_agent.sensors.sensor_messages import PollResult
from tests.support.agents import sensors
from tests.support.agents.sensors import BUS

NIC = "0000:40:10.0"
MODEL = "NVIDIA H100 80GB HBM3"


def gpu(bus: str = BUS, uuid: str = "GPU-a", links: int = 18, down: int = 0, **values: Any) -> GpuSample:
    usual = {
        "memory_total_bytes": 80 << 30,
        "pcie_generation_max": 5,
        "pcie_width_max": 16,
        "power_limit_w": 700.0,
        "ecc_uncorrected_lifetime": 3,
        "remapped_uncorrected": 1,
    }
    sampled = tuple(LinkSample(link=link, up=link >= down) for link in range(links))
    return sensors.gpu(pci_bus_id=bus, uuid=uuid, links=sampled, **usual | values)


def port(name: str = "mlx5_0/1", address: str = "guid-0", place: str = NIC, **values: Any) -> PortSample:
    usual: dict[str, Any] = {"up": True, "was_up": True, "rate_gbps": 400.0, "width": 4, "link_downs": 2}
    usual |= {"role": PortRole.COMPUTE, "phys_state": "LinkUp" if values.get("up", True) else "Polling"}
    return PortSample(
        name=name, kind="infiniband", identity={"address": address, "pci_bus_id": place}, **usual | values
    )


POLICY = load_policy()
DOWN: dict[str, Any] = {"up": False, "was_up": False, "rate_gbps": 10.0}


class Node:
    """A node whose agent can be started again, and whose polls come once a minute."""

    def __init__(self) -> None:
        self.gpus: tuple[GpuSample, ...] = (gpu(),)
        self.ports: tuple[PortSample, ...] = (port(),)
        self.model = MODEL
        self.values: dict[str, Any] = {
            "boot_id": "boot-1",
            "host": HostSample(uptime_s=86_400.0, memory_total_bytes=2 << 40),
            "host_identity": Host(vendor="NVIDIA", product="DGX", serial="17"),
            "inventory": InventorySample(cpus=224, gpus=8, network_devices=(NIC,)),
        }
        self.clock = ManualClock()
        self.saved = SavedProfile()
        self.restart()

    def restart(self) -> None:
        now = Instant(self.clock.wall(), self.clock.monotonic())
        self.profile = NodeProfile(msgspec.json.decode(msgspec.json.encode(self.saved), type=SavedProfile))
        self.assessor = FindingAssessor(POLICY, "n1", None, AssessorState(), now, self.profile)

    def polls(self, count: int, step_s: float = 60.0) -> set[str]:
        """Poll, and return the rules of all findings."""
        for _ in range(count):
            self.clock.advance(step_s)
            known = tuple(
                Gpu(index=0, uuid=each.uuid, name=self.model, pci_bus_id=each.pci_bus_id, memory_bytes=0)
                for each in self.gpus
            )
            poll = PollResult(is_full=True, known_gpus=known, gpus=self.gpus, ports=self.ports, **self.values)
            self.assessor.process_poll(poll, None, Instant(self.clock.wall(), self.clock.monotonic()))
        self.saved = self.profile.export()
        return {finding.rule for finding in self.assessor.findings}

    def expected(self, subject: str) -> dict[str, float]:
        return self.saved.subjects[subject].values


@pytest.fixture
def learned() -> Node:
    """A node whose profile was learned, and whose agent has just been started again."""
    node = Node()
    assert node.polls(12) == set()
    node.restart()
    return node


@pytest.fixture
def short_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a day have two hours."""
    monkeypatch.setattr(profile, "STEADY_S", 7200.0)


def test_nothing_is_said_or_expected_without_a_profile() -> None:
    node = Node()
    node.gpus, node.ports = (gpu(down=18, memory_total_bytes=1),), (port(**DOWN),)
    assert node.polls(5) == set()
    assert node.expected(BUS) == {}


def test_value_is_learned_when_steady_for_ten_minutes() -> None:
    node = Node()
    for links in (17, 18) * 8:
        node.gpus = (gpu(links=links),)
        node.polls(1)
    assert "nvlinks_up" not in node.expected(BUS)
    node.polls(11)
    assert node.expected(BUS)["nvlinks_up"] == 18
    assert node.expected("host") == {"gpus": 8, "cpus": 224, "memory_total_bytes": 2 << 40}


def test_part_with_a_fault_teaches_nothing() -> None:
    node = Node()
    node.gpus = (gpu(remap_pending=1),)
    assert node.polls(30) == {"gpu-row-remap-pending"}
    assert node.expected(BUS) == {}


def test_time_without_polls_is_not_steady() -> None:
    node = Node()
    node.polls(3, step_s=3600.0)
    assert node.expected(BUS) == {}


@pytest.mark.parametrize(
    ("sample", "rule", "subject", "action"),
    [
        (gpu(down=2), "profile-nvlinks-missing", BUS, Action.RESET_GPU),
        (gpu(down=18), "profile-nvlinks-missing", BUS, Action.RESET_GPU),
        (gpu(pcie_generation_max=4), "profile-gpu-pcie-slower", BUS, Action.DRAIN),
        (gpu(pcie_width_max=8), "profile-gpu-pcie-narrower", BUS, Action.DRAIN),
        (gpu(memory_total_bytes=60 << 30), "profile-gpu-memory-less", BUS, Action.NONE),
        (gpu(power_limit_w=400.0), "profile-gpu-power-limit", BUS, Action.NONE),
        (gpu(ecc_uncorrected_lifetime=5), "profile-uncorrected-meanwhile", BUS, Action.NONE),
        (gpu(remapped_uncorrected=2), "profile-rows-remapped-meanwhile", BUS, Action.NONE),
        (port(**DOWN), "profile-port-down", "mlx5_0/1", Action.DRAIN),
        (port(rate_gbps=200.0), "profile-port-slower", "mlx5_0/1", Action.DRAIN),
        (port(width=2), "profile-port-narrower", "mlx5_0/1", Action.DRAIN),
        (port(link_downs=5), "profile-link-lost-meanwhile", "mlx5_0/1", Action.NONE),
    ],
)
def test_part_with_less_than_before_is_found(
    learned: Node, sample: GpuSample | PortSample, rule: str, subject: str, action: Action
) -> None:
    if isinstance(sample, GpuSample):
        learned.gpus = (sample,)
    else:
        learned.ports = (sample,)
    assert learned.polls(3) == {rule}
    (finding,) = learned.assessor.findings
    assert (finding.subject, finding.action) == (subject, action)
    assert finding.severity is not Severity.CRITICAL
    assert finding.mode is not Mode.ENFORCE


@pytest.mark.parametrize(
    ("field", "value", "rule", "subject"),
    [
        ("inventory", InventorySample(cpus=224, gpus=7, network_devices=(NIC,)), "profile-gpus-missing", "gpus"),
        ("inventory", InventorySample(cpus=112, gpus=8, network_devices=(NIC,)), "profile-cpus-fewer", "cpus"),
        ("host", HostSample(uptime_s=9e4, memory_total_bytes=(2 << 40) * 31 // 32), "profile-memory-less", "memory"),
    ],
)
def test_machine_with_less_than_before_is_found(learned: Node, field: str, value: Any, rule: str, subject: str) -> None:
    learned.values[field] = value
    assert learned.polls(7) == {rule}
    assert learned.assessor.findings[0].subject == subject


def test_port_whose_device_left_the_bus_is_found(learned: Node) -> None:
    learned.ports = ()
    learned.values["inventory"] = InventorySample(cpus=224, gpus=8, network_devices=("0000:50:00.0",))
    assert learned.polls(6) == set()
    assert learned.polls(1) == {"profile-port-missing"}
    learned.profile.accept(["mlx5_0/1"])
    assert learned.polls(1) == set()


def test_links_that_train_after_a_boot_are_no_finding(learned: Node) -> None:
    learned.values |= {"boot_id": "boot-2", "host": HostSample(uptime_s=60.0, memory_total_bytes=2 << 40)}
    learned.gpus, learned.ports = (gpu(down=18),), (port(**DOWN, link_downs=0),)
    assert learned.polls(20) == set()
    learned.values["host"] = HostSample(uptime_s=400.0, memory_total_bytes=2 << 40)
    learned.gpus, learned.ports = (gpu(),), (port(link_downs=90),)
    assert learned.polls(20) == set()


@pytest.mark.parametrize(
    "changed",
    [
        {"presence": PortPresence.ELSEWHERE, "up": False},
        {**DOWN, "phys_state": "Disabled"},
        {**DOWN, "phys_state": "LinkUp"},
        {**DOWN, "is_asleep": True},
        {**DOWN, "role": PortRole.MANAGEMENT},
    ],
)
def test_port_that_is_down_by_intent_is_no_finding(learned: Node, changed: dict[str, Any]) -> None:
    learned.ports = (port(**changed),)
    assert learned.polls(20) == set()


def test_port_in_a_container_is_no_finding(learned: Node) -> None:
    learned.ports = ()
    assert learned.polls(20) == set()
    assert learned.expected("mlx5_0/1")["up"] == 1


def test_unknown_values_are_no_finding(learned: Node) -> None:
    learned.gpus = (GpuSample(index=0, pci_bus_id=BUS, uuid="", error="NVML is closed", is_closed=True),)
    learned.values |= {"inventory": InventorySample(), "host": HostSample(error="unreadable")}
    assert learned.polls(20) <= {"host-unreadable"}


def test_small_differences_between_kernels_are_no_finding(learned: Node) -> None:
    learned.values["host"] = HostSample(uptime_s=9e4, memory_total_bytes=int((2 << 40) * 0.993))
    assert learned.polls(20) == set()
    assert learned.saved.subjects["host"].pending == {}


def test_replaced_gpu_is_compared_with_counters_of_its_own(learned: Node) -> None:
    learned.gpus = (gpu(uuid="GPU-b", ecc_uncorrected_lifetime=9, remapped_uncorrected=4),)
    assert learned.polls(3) == set()
    learned.gpus = (gpu(uuid="GPU-b", down=1, ecc_uncorrected_lifetime=9, remapped_uncorrected=4),)
    assert learned.polls(3) == {"profile-nvlinks-missing"}


def test_gpu_of_another_model_is_learned_anew(learned: Node) -> None:
    learned.model, learned.gpus = "NVIDIA A10", (gpu(links=0, memory_total_bytes=24 << 30, pcie_generation_max=4),)
    assert learned.polls(12) == set()
    assert learned.expected(BUS)["memory_total_bytes"] == 24 << 30


def test_new_bus_numbers_carry_the_profile_along(learned: Node) -> None:
    learned.gpus, learned.ports = (gpu("0000:1c:00", down=1),), (port("mlx5_2/1", place="0000:41:10.0"),)
    learned.values["inventory"] = InventorySample(cpus=224, gpus=8, network_devices=("0000:41:10.0",))
    assert learned.polls(4) == {"profile-nvlinks-missing"}
    assert set(learned.saved.subjects) == {"0000:1c:00", "mlx5_2/1", "host"}


def test_card_in_another_slot_stands_in_for_the_old_one(learned: Node) -> None:
    learned.ports = (port("mlx5_9/1", "guid-9", "0000:90:00.0"),)
    learned.values["inventory"] = InventorySample(cpus=224, gpus=8, network_devices=("0000:90:00.0",))
    assert learned.polls(30) == set()
    assert set(learned.saved.subjects) == {BUS, "mlx5_9/1", "host"}


@pytest.mark.parametrize("serial", ["18", ""])
def test_cloned_disk_image_starts_anew(learned: Node, serial: str, caplog: pytest.LogCaptureFixture) -> None:
    learned.values["host_identity"] = Host(vendor="NVIDIA", product="DGX", serial=serial)
    learned.gpus, learned.ports = (gpu(uuid="GPU-z", down=9),), (port(address="guid-z", **DOWN),)
    with caplog.at_level(logging.WARNING):
        assert learned.polls(3) == set()
    assert "of another machine" in caplog.text


def test_agent_without_root_still_knows_its_machine(learned: Node) -> None:
    learned.values["host_identity"] = Host(vendor="NVIDIA", product="DGX")
    learned.gpus = (gpu(down=1),)
    assert learned.polls(3) == {"profile-nvlinks-missing"}


@pytest.mark.usefixtures("short_day")
def test_loss_stays_until_it_is_accepted(learned: Node) -> None:
    learned.gpus = (gpu(down=2),)
    assert learned.polls(60 * 3) == {"profile-nvlinks-missing"}
    assert f"everstep-agent profile accept {BUS}" in learned.assessor.findings[0].message
    assert learned.profile.accept([BUS]) == [BUS]
    assert learned.polls(3) == set()
    assert learned.expected(BUS)["nvlinks_up"] == 16


@pytest.mark.usefixtures("short_day")
def test_changed_limit_is_learned_after_a_day(learned: Node) -> None:
    learned.gpus = (gpu(power_limit_w=500.0),)
    assert learned.polls(60) == {"profile-gpu-power-limit"}
    learned.restart()
    assert learned.polls(65) == set()
    assert learned.expected(BUS)["power_limit_w"] == 500


def test_better_value_ends_a_finding_and_is_learned(learned: Node) -> None:
    learned.ports = (port(rate_gbps=200.0),)
    assert learned.polls(4) == {"profile-port-slower"}
    learned.ports = (port(rate_gbps=800.0),)
    assert learned.polls(14) == set()
    assert learned.expected("mlx5_0/1")["rate_gbps"] == 800


def test_mode_of_a_gpu_is_compared_by_its_name() -> None:
    changes = {each.name: each for each in PROFILED["gpu"]}
    assert changes["ecc_mode"].change(1, 0) == changes["mig_mode"].change(0, 1) == 1
    assert changes["ecc_mode"].change(0, 1) == changes["mig_mode"].change(1, 0) == 0
    assert all(hasattr(ProfileSample, each.field) for values in PROFILED.values() for each in values)


def test_counts_are_shown_for_a_day_and_told_once(learned: Node) -> None:
    learned.gpus = (gpu(ecc_uncorrected_lifetime=4),)
    assert learned.polls(23, step_s=3600.0) == {"profile-uncorrected-meanwhile"}
    assert learned.polls(3, step_s=3600.0) == set()
    learned.restart()
    assert learned.polls(3) == set()


def test_gpu_with_less_than_its_peers_is_told() -> None:
    node = Node()
    others = tuple(gpu(f"0000:{bus}:00", f"GPU-{bus}") for bus in ("43", "52", "61"))
    node.gpus = (gpu(down=3, pcie_width_max=8, memory_total_bytes=70 << 30), *others)
    assert node.polls(4) == {
        "gpu-fewer-nvlinks-than-peers",
        "gpu-pcie-narrower-than-peers",
        "gpu-less-memory-than-peers",
    }
    assert {finding.severity for finding in node.assessor.findings} == {Severity.INFO}


# On disk


def stored(folder: Path, node: Node) -> ProfileStore:
    (folder / PROFILE_FILE).write_bytes(msgspec.json.encode(node.saved))
    return ProfileStore(folder, 0.0)


def test_profile_survives_values_of_another_release(learned: Node, tmp_path: Path) -> None:
    learned.saved.subjects[BUS].values["c2c_links"] = 2.0
    store = stored(tmp_path, learned)
    store.save(0.0, is_final=True)
    content = json.loads((tmp_path / PROFILE_FILE).read_bytes())
    assert content["subjects"][BUS]["values"]["c2c_links"] == 2.0
    assert (tmp_path / PROFILE_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"{", b'{"version": 99}', b'{"version": 1, "subjects": 3}', b"\0" * 64])
def test_unusable_file_is_logged_and_learned_anew(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / PROFILE_FILE).write_bytes(content)
    assert ProfileStore(tmp_path, 0.0).profile.export() == SavedProfile()
    assert "learned anew" in caplog.text


def test_order_to_accept_is_carried_out_once_compared(learned: Node, tmp_path: Path) -> None:
    store = ProfileStore(tmp_path, 0.0)
    store.profile = learned.profile
    order_acceptance(tmp_path, [BUS])
    store.take_orders()
    assert (tmp_path / ACCEPT_FILE).exists()
    learned.gpus = (gpu(down=2),)
    learned.polls(1)
    store.take_orders()
    assert not (tmp_path / ACCEPT_FILE).exists()
    assert learned.expected(BUS)["nvlinks_up"] == 16


def test_commands_show_the_profile_and_order_to_accept(learned: Node, tmp_path: Path) -> None:
    learned.gpus = (gpu(down=2),)
    learned.polls(1)
    stored(tmp_path, learned)
    place = ["--state-dir", str(tmp_path)]
    shown = CliRunner().invoke(cli.app, ["show", *place]).stdout
    assert f"{BUS}  {MODEL}  nvlinks_up 18" in shown
    assert "nvlinks_up now 16" in shown
    assert CliRunner().invoke(cli.app, ["accept", *place, BUS, "host"]).exit_code == 0
    assert json.loads((tmp_path / ACCEPT_FILE).read_bytes()) == [BUS, "host"]
    (tmp_path / PROFILE_FILE).write_text("{")
    assert CliRunner().invoke(cli.app, ["show", *place]).exit_code == 2

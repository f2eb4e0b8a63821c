"""Counters of network ports through the real sensor and the built-in rules: faults, and harmless changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.vocabulary import Action, Mode, Severity
from everstep_agent.drivers.ports import COUNTERS
from everstep_agent.policy.rules import FindingRule, load_policy
from everstep_agent.sensors.network import COUNTERS_EVERY, SETTLED_POLLS
from everstep_agent.virtual.scenario import COUNTER_FOLDERS
from tests.unit.agent.sensors.port_tree import PortTree, Watched

RULES = [rule for rule in load_policy().rules if rule.scope == "counter"]
CONGESTION = {"port_xmit_discards", "rnr_nak_retry_err", "out_of_sequence", "packet_seq_err", "roce_slow_restart"}
CONGESTION |= {"implied_nak_seq_err", "roce_adp_retrans", "rx_missed_errors", "retrans_timeout_events"}
PLACES = {"infiniband": "class/infiniband/mlx5_0/ports/1", "efa": "class/infiniband/efa_0/ports/1"}
PLACES |= {"ethernet": "class/net/eth0"}


class Counted(Watched):
    """A node with a port of each kind, all of whose counters are at 100."""

    def __init__(self, root: Path) -> None:
        tree = PortTree(root)
        self.card = tree.pci("pci0000:15/0000:15:01.0/0000:5e:00.0", "mlx5_core")
        tree.infiniband("mlx5_0", self.card)
        tree.infiniband("efa_0", tree.pci("pci0000:16/0000:16:01.0/0000:5f:00.0", "efa"), link_layer="Unknown")
        tree.ethernet("eth0", tree.pci("pci0000:17/0000:17:01.0/0000:60:00.0", "mlx5_core"))
        super().__init__(tree)
        for kind in PLACES:
            self.grow(dict.fromkeys(COUNTER_FOLDERS[kind], 100), kind)
        self.poll(COUNTERS_EVERY)

    def path(self, counter: str, kind: str = "infiniband") -> Path:
        return self.tree.sys / PLACES[kind] / COUNTER_FOLDERS[kind][counter] / counter

    def grow(self, growth: dict[str, int], kind: str = "infiniband") -> None:
        for name, count in growth.items():
            path = self.path(name, kind)
            self.tree.write(path, int(path.read_text()) + count if path.exists() else count)

    def alarming(self) -> set[str]:
        """Return the rules that made a finding above the severity info on a counter."""
        ids = {rule.id for rule in RULES}
        return {name for name, finding in self.seen.items() if name in ids and finding.severity is not Severity.INFO}


@pytest.fixture
def node(tmp_path: Path) -> Counted:
    return Counted(tmp_path)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_counter_is_a_finding_from_its_threshold_on(node: Counted, rule: FindingRule) -> None:
    kind = next(kind for kind, names in COUNTER_FOLDERS.items() if rule.field in names)
    node.grow({rule.field: round(rule.threshold) - 1}, kind)
    node.poll(COUNTERS_EVERY)
    assert rule.id not in node.seen
    node.grow({rule.field: 1}, kind)
    node.poll(COUNTERS_EVERY)
    finding = node.seen[rule.id]
    assert (finding.action, finding.evidence["pci_bus_id"][:5]) == (Action.NONE, "0000:")
    node.poll(20, every_s=300.0)
    assert node.active() == set()


def test_congestion_is_only_observed_and_named() -> None:
    for rule in RULES:
        if rule.field in CONGESTION:
            assert (rule.severity, rule.mode, "congestion" in rule.message) == (Severity.INFO, Mode.OBSERVE, True)
    assert {rule.field for rule in RULES} >= CONGESTION


# Harmless events. Each function changes the node.


def counters_without_a_rule_grow(node: Counted) -> None:
    for kind, folders in COUNTERS.items():
        judged = {rule.field for rule in RULES}
        node.grow({name: 10**6 for names in folders.values() for name in names if name not in judged}, kind)


def errors_come_slowly(node: Counted) -> None:
    for _ in range(30):
        node.grow({"symbol_error": 3, "port_rcv_errors": 3, "rnr_nak_retry_err": 100, "out_of_sequence": 6000})
        node.grow({"rx_crc_errors": 3, "rx_errors": 3, "rx_missed_errors": 1000}, "ethernet")
        node.poll(COUNTERS_EVERY, every_s=12.0)
    assert not node.seen


def counters_stay_at_their_maximum(node: Counted) -> None:
    for name, limit in {"symbol_error": 65535, "link_error_recovery": 255, "local_link_integrity_errors": 15}.items():
        node.tree.write(node.path(name), limit)
    again = Watched(node.tree)  # they were at it when the agent started
    again.poll(3 * COUNTERS_EVERY)
    assert not again.seen
    for name in ("symbol_error", "link_error_recovery", "local_link_integrity_errors"):
        node.tree.write(node.path(name), 100)


def counters_have_all_bits_set(node: Counted) -> None:
    for name in ("symbol_error", "rx_icrc_encapsulated"):
        node.tree.write(node.path(name), 2**32 - 1)
    node.tree.write(node.path("rx_crc_errors", "ethernet"), 2**64 - 1)
    node.poll(COUNTERS_EVERY)
    for name in ("symbol_error", "rx_icrc_encapsulated"):
        node.tree.write(node.path(name), 100)


def operator_resets_counters(node: Counted) -> None:
    for counts in ((0, 0), (90, 90)):
        node.tree.write(node.path("symbol_error"), counts[0])
        node.tree.write(node.path("rx_crc_errors", "ethernet"), counts[1])
        node.poll(COUNTERS_EVERY)


def counter_wraps(node: Counted) -> None:
    node.tree.write(node.path("local_ack_timeout_err"), 2**32 - 5)
    again = Watched(node.tree)
    again.poll(COUNTERS_EVERY)
    node.tree.write(node.path("local_ack_timeout_err"), 20)
    again.poll(COUNTERS_EVERY)
    assert not again.seen


def reading_fails_once(node: Counted) -> None:
    node.grow({"symbol_error": 10**4})
    again = Watched(node.tree)
    for count in (10**4, 0, 10**4):
        node.tree.write(node.path("symbol_error"), count)
        again.poll(COUNTERS_EVERY)
    assert not again.seen
    node.tree.write(node.path("symbol_error"), 100)


def counters_vanish_for_a_while(node: Counted) -> None:
    node.path("symbol_error").unlink()
    node.poll(COUNTERS_EVERY)
    node.tree.write(node.path("symbol_error"), 60000)


def person_swaps_the_cable(node: Counted) -> None:
    """The link is trained several times while the plug is moved."""
    for _ in range(2):
        node.tree.set_infiniband("mlx5_0", "1: DOWN", "2: Polling", "10 Gb/sec (4X SDR)")
        node.poll(5)
        node.grow({"symbol_error": 30000, "port_rcv_errors": 500, "link_error_recovery": 20})
        node.tree.set_infiniband("mlx5_0", "4: ACTIVE", "5: LinkUp")
        node.poll(15)
        node.grow({"symbol_error": 3000})
        node.poll(5)


def link_is_lost_between_two_polls(node: Counted) -> None:
    node.tree.write(node.tree.sys / PLACES["infiniband"] / "counters/link_downed", 1)
    node.grow({"symbol_error": 30000})


def driver_is_reloaded(node: Counted) -> None:
    """The card counts on, the driver starts at 0."""
    moved = node.tree.take_away("infiniband", "mlx5_0")
    node.poll(12)
    node.tree.bring_back("infiniband", "mlx5_0", moved)
    node.tree.set_infiniband("mlx5_0", "1: DOWN", "2: Polling", "10 Gb/sec (4X SDR)")
    node.grow({"symbol_error": 20000})
    node.tree.write(node.path("rx_icrc_encapsulated"), 0)
    node.poll(12)
    node.tree.set_infiniband("mlx5_0", "4: ACTIVE", "5: LinkUp")
    node.grow({"symbol_error": 20000})


def firmware_is_updated(node: Counted) -> None:
    node.tree.remove_device(node.card)
    node.poll(45)
    node.tree.infiniband("mlx5_0", node.tree.pci("pci0000:15/0000:15:01.0/0000:5e:00.0", "mlx5_core"))
    node.poll(COUNTERS_EVERY)
    node.grow({"symbol_error": 20000})


def udev_renames_a_port(node: Counted) -> None:
    moved = node.tree.take_away("net", "eth0")
    node.tree.bring_back("net", "roce0", (moved[0], moved[1].with_name("roce0")))
    node.tree.write(node.tree.sys / "class/net/roce0/statistics/rx_crc_errors", 10**6)


def peer_dies(node: Counted) -> None:
    node.grow({"local_ack_timeout_err": 3000, "req_transport_retries_exceeded": 64, "rnr_nak_retry_err": 5000})
    node.grow({"unresponsive_remote_events": 60, "rdma_read_wr_err": 500, "impaired_remote_conn_events": 64}, "efa")


def network_is_congested(node: Counted) -> None:
    for kind in ("infiniband", "ethernet"):
        node.grow(dict.fromkeys(CONGESTION & COUNTER_FOLDERS[kind].keys(), 10**7), kind)


HARMLESS = [
    counters_without_a_rule_grow,
    errors_come_slowly,
    counters_stay_at_their_maximum,
    counters_have_all_bits_set,
    operator_resets_counters,
    counter_wraps,
    reading_fails_once,
    counters_vanish_for_a_while,
    person_swaps_the_cable,
    link_is_lost_between_two_polls,
    driver_is_reloaded,
    firmware_is_updated,
    udev_renames_a_port,
    peer_dies,
    network_is_congested,
]


@pytest.mark.parametrize("event", HARMLESS, ids=lambda event: event.__name__)
def test_harmless_counts_raise_no_alarm(node: Counted, event: Callable[[Counted], None]) -> None:
    event(node)
    node.poll(3 * COUNTERS_EVERY)
    assert node.alarming() == set()


def test_errors_of_a_new_link_count_once_it_is_settled(node: Counted) -> None:
    driver_is_reloaded(node)
    node.poll(SETTLED_POLLS + COUNTERS_EVERY)
    node.grow({"symbol_error": 200})
    node.poll(COUNTERS_EVERY)
    assert node.active() == {("port-symbol-errors", "mlx5_0/1")}


def test_reset_of_the_counter_lets_its_finding_clear(node: Counted) -> None:
    node.grow({"symbol_error": 200})
    node.poll(COUNTERS_EVERY)
    node.tree.write(node.path("symbol_error"), 0)
    node.poll(COUNTERS_EVERY)
    node.poll(61, every_s=10.0)
    assert node.active() == set()

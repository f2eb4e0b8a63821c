"""The mildest remediation: a rank's process is replaced, and its node stays."""

from __future__ import annotations

import msgspec
import pytest

from everstep.vocabulary import Action, Finding
from everstep.wire.v1.agent import Gpu
from everstep.wire.v1.directives import KillRank
from everstep_controller.core.effects import Send
from everstep_controller.core.events import DatabaseAvailabilityChanged
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions, generations, logged_sentences, sent
from tests.support.fleet.findings import xid

NODES = ("n1", "n2", "n3")
OTHERS = ("n4", "n5", "n6")
LAB = CorePolicy.lab_preset()


def _fleet(policy: CorePolicy = LAB, ranks: int = 2, gpus: int = 2, others: tuple[str, ...] = ()) -> CoreFleet:
    """Three nodes with so many GPUs, on each of which so many ranks compute, and ``others`` that do nothing."""
    fleet = CoreFleet(policy)
    for node in (*NODES, *others):
        cards = tuple(
            Gpu(index=i, uuid=f"GPU-{node}-{i}", name="virtual", pci_bus_id=f"{i}b:00", memory_bytes=1 << 30)
            for i in range(gpus)
        )
        fleet.register(node, gpus=cards)
        fleet.beat(node)
    fleet.join(*NODES, min_nodes=1, max_nodes=3, nproc_per_node=ranks)
    fleet.resume()
    return fleet


def _stopped(subject: str = "1b:00", number: int = 43) -> Finding:
    return msgspec.structs.replace(xid(number, Action.RESTART_RANK), subject=subject)


def _killed(fleet: CoreFleet, since: int) -> list[tuple[str, int, int]]:
    """(node, rank, generation) of each kill sent since then."""
    sends = [effect for effect in fleet.effects[since:] if isinstance(effect, Send)]
    return [(s.node, s.body.rank, s.body.generation) for s in sends if isinstance(s.body, KillRank)]


@pytest.mark.parametrize(("ranks", "subject"), [(2, "somewhere"), (1, "1b:00")])
def test_rank_restart_replaces_all_ranks_of_unknown_gpu(ranks: int, subject: str) -> None:
    fleet = _fleet(ranks=ranks)
    before = len(fleet.effects)
    fleet.raise_finding("n2", _stopped(subject))
    assert [rank for _, rank, _ in _killed(fleet, before)] == list(range(ranks, 2 * ranks))
    assert len(generations(fleet.effects[before:])) == 1


def test_rank_restart_counts_one_crash_of_two_gpus_once() -> None:
    fleet = _fleet()
    before = len(fleet.effects)
    fleet.raise_finding("n2", _stopped("0b:00"))
    fleet.raise_finding("n2", _stopped("1b:00"))
    assert _killed(fleet, before) == [("n2", 2, 1), ("n2", 3, 2)]
    assert decisions(fleet.effects[before:]) == [("n2", "restart")]
    assert len(fleet.state.nodes["n2"].history.rank_restart_times) == len(fleet.state.fleet.rank_restart_times) == 1


@pytest.mark.promise("rank-restart-caps")
def test_rank_restart_skips_rank_already_lost() -> None:
    fleet = _fleet()
    fleet.lose_rank(3)
    before = len(fleet.effects)
    assert decisions(fleet.raise_finding("n2", _stopped())) == [("n2", "no_action")]
    assert (_killed(fleet, before), generations(fleet.effects[before:])) == ([], [])


def test_rank_restart_needs_a_running_rank() -> None:
    fleet = CoreFleet()
    fleet.register(*NODES)
    assert decisions(fleet.raise_finding("n2", _stopped())) == [("n2", "no_action")]
    assert sent(fleet.effects, KillRank) == {}


def test_rank_restart_limit_per_node_leads_to_next_step() -> None:
    fleet = _fleet(LAB.with_values(remediation={"rank_restarts_per_node": 1}))
    fleet.state.nodes["n2"].history.rank_restart_times = [fleet.now - 3600.0]
    assert decisions(fleet.raise_finding("n2", _stopped())) == [("n2", "evict")]
    assert "its ranks were restarted 1 times within 7 days" in logged_sentences(fleet.effects, "verdict.evict")[0]


@pytest.mark.promise("rank-restart-caps")
def test_rank_restart_waits_for_fleet_limit() -> None:
    fleet = _fleet(LAB.with_values(remediation={"rank_restarts_per_fleet": 1, "fleet_window_s": 30.0}), others=OTHERS)
    fleet.raise_finding("n1", _stopped())
    fleet.resume(step=5)
    before = len(fleet.effects)
    assert decisions(fleet.raise_finding("n2", _stopped())) == [("n2", "recommend")]
    assert _killed(fleet, before) == []
    fleet.advance(32.0, *NODES, *OTHERS)
    assert _killed(fleet, before) == [("n2", 3, 2)]


def test_rank_restart_waits_for_database() -> None:
    fleet = _fleet()
    before = len(fleet.effects)
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="disk full"))
    fleet.raise_finding("n2", _stopped())
    assert _killed(fleet, before) == []
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=False))
    fleet.advance(7.0, *NODES)
    assert _killed(fleet, before) == [("n2", 3, 1)]


def test_rank_restart_stops_when_finding_is_correlated() -> None:
    fleet = _fleet(others=OTHERS)
    decided = [decision for node in NODES for _, decision in decisions(fleet.raise_finding(node, _stopped()))]
    assert decided == ["restart", "restart", "correlated"]

"""A tie of digests blames its nodes for a limited time; later proof lasts longer."""

from __future__ import annotations

import pytest

from everstep.vocabulary import FindingKind, NodeState
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions

DAY_S = 86400.0
KEY = f"{FindingKind.DIGEST_MISMATCH}/parameters"


def _fleet() -> CoreFleet:
    fleet = CoreFleet()
    fleet.start(4, min_nodes=2)
    fleet.seal(2)
    _tie(fleet, "n1", "n2", 5)
    fleet.resume(step=6)
    return fleet


def _tie(fleet: CoreFleet, first: str, other: str, step: int) -> list[tuple[str, str]]:
    """These two keep one shard, and the others the other; only these differ."""
    spec, before = fleet.running(), len(fleet.effects)
    for member in spec.roster:
        tied = member.node in (first, other)
        fleet.seal_one(step, member.rank, digests={"shard 0": member.node} if tied else {"shard 1": "alike"})
    return decisions(fleet.effects[before:])


def _wait(fleet: CoreFleet, days: float) -> None:
    fleet.stop_controller(days * DAY_S)
    for node in fleet.state.nodes:
        fleet.touch(node)
    fleet.advance(2.0, *fleet.state.nodes)


def _accused(fleet: CoreFleet) -> list[str]:
    return [node for node, record in fleet.state.nodes.items() if KEY in record.health.controller_findings]


@pytest.mark.promise("digest-majority")
def test_old_tie_evicts_no_node_and_its_finding_expires() -> None:
    fleet = _fleet()
    _wait(fleet, 7.1)
    assert _accused(fleet) == []
    assert ("n1", "evict") not in _tie(fleet, "n1", "n3", 30)
    assert _accused(fleet) == ["n1", "n3"]
    fleet.resume(step=31)
    assert ("n3", "evict") in _tie(fleet, "n3", "n4", 40), "the newer tie counts"


def test_repeated_tie_of_same_nodes_evicts_neither() -> None:
    fleet = _fleet()
    for step in (7, 9):
        fleet.order(OperatorAction.HOLD, node="n2")
        fleet.order(OperatorAction.READMIT, node="n2")
        assert "evict" not in {decision for _, decision in _tie(fleet, "n1", "n2", step)}
        fleet.resume(step=step + 1)
    assert fleet.node_state("n1") is NodeState.HEALTHY


def test_deferred_divergent_node_keeps_tie_open() -> None:
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(budget={"count": 1}))
    fleet.start(5, min_nodes=2)
    fleet.seal(4)
    decided = decisions(fleet.seal(5, digests={1: "x", 2: "y"}))
    assert [decision for node, decision in decided if node in ("n2", "n3")] == ["evict", "defer_eviction"]
    assert len(fleet.job().failures.kept_culprit_times) == 1, "of these a few end the job"
    assert not fleet.job().failures.digest_tie_times

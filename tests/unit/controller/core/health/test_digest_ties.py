"""A tie of digests accuses its nodes for a stated time, and what is proved outlasts it."""

from __future__ import annotations

import msgspec
import pytest
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import NodeRecord
from everstep_controller.core.startup import restore_state

from everstep.vocabulary import FindingKind, NodeState, Severity
from everstep.wire.v1.training import ProbeFinished
from tests.support.core_fleet import CoreFleet, decisions

DAY_S = 86400.0
KEY = f"{FindingKind.DIGEST_MISMATCH}/parameters"


def _fleet() -> CoreFleet:
    fleet = CoreFleet()
    fleet.start(4, min_nodes=2)
    fleet.seal(2)
    _tie(fleet, "n1", "n2", 5)
    fleet.resume(step=6)
    return fleet


def _tie(fleet: CoreFleet, one: str, other: str, step: int) -> list[tuple[str, str]]:
    """These two keep one shard, and the others the other; only these differ."""
    spec, before = fleet.running(), len(fleet.effects)
    for member in spec.roster:
        tied = member.node in (one, other)
        fleet.seal_one(step, member.rank, digests={"shard 0": member.node} if tied else {"shard 1": "alike"})
    return decisions(fleet.effects[before:])


def _wait(fleet: CoreFleet, days: float) -> None:
    fleet.stop_controller(days * DAY_S)
    for node in fleet.state.nodes:
        fleet.touch(node)
    fleet.advance(2.0, *fleet.state.nodes)


def _accused(fleet: CoreFleet) -> list[str]:
    return [node for node, record in fleet.state.nodes.items() if KEY in record.health.controller_findings]


def test_second_tie_with_other_node_within_a_week_evicts() -> None:
    fleet = _fleet()
    assert _accused(fleet) == ["n1", "n2"]
    _wait(fleet, 6.0)
    assert _accused(fleet) == ["n1", "n2"]
    assert ("n1", "evict") in _tie(fleet, "n1", "n3", 30)


@pytest.mark.promise("digest-majority")
def test_old_tie_evicts_no_node_and_its_finding_expires() -> None:
    fleet = _fleet()
    _wait(fleet, 7.1)
    assert _accused(fleet) == []
    assert ("n1", "evict") not in _tie(fleet, "n1", "n3", 30)
    assert _accused(fleet) == ["n1", "n3"]
    fleet.resume(step=31)
    assert ("n3", "evict") in _tie(fleet, "n3", "n4", 40), "the newer tie counts"


def test_stored_tie_without_date_uses_finding_age() -> None:
    fleet = _fleet()
    stored = []
    for record in fleet.state.nodes.values():
        words = msgspec.to_builtins(record)
        words.pop("against_at", None)
        words["own_until"] = {}
        stored.append(msgspec.convert(words, NodeRecord))
    fleet.state = restore_state(fleet.policy, fleet.state.fleet, stored, list(fleet.state.jobs.values()))
    state = fleet.state
    assert state.nodes["n1"].health.digest_tie_nodes == ["n2"]
    fleet.restart()
    for node in state.nodes:
        fleet.beat(node)
    _wait(fleet, 7.1)
    assert _accused(fleet) == []
    assert ("n1", "evict") not in _tie(fleet, "n1", "n3", 30)


def test_further_tie_keeps_proven_finding() -> None:
    fleet = CoreFleet()
    fleet.solos = False
    fleet.start(2, min_nodes=2)
    fleet.seal(4)
    fleet.seal(5, digests={0: "x", 1: "y"})
    for name, probe in list(fleet.state.probes.items()):
        wrong = probe.nodes == ("n2",)
        fleet.report(
            probe.nodes[0], ProbeFinished(probe=name, ok=not wrong, wrong_result=wrong, detail="first at [3, 7]")
        )
    assert fleet.state.nodes["n2"].health.eviction_deferred_by == "needed:job"
    fleet.resume(step=6)
    fleet.seal(6, digests={0: "x", 1: "y"})
    assert fleet.state.nodes["n2"].health.controller_findings[KEY].severity is Severity.CRITICAL
    fleet.register("n3")
    fleet.beat("n3")
    fleet.join("n3", min_nodes=2, max_nodes=2)
    fleet.advance(10.0, *fleet.state.nodes)
    assert fleet.node_state("n2") is NodeState.QUARANTINED


def test_repeated_tie_of_same_nodes_evicts_neither() -> None:
    fleet = _fleet()
    for step in (7, 9):
        fleet.order(OperatorAction.HOLD, node="n2")
        fleet.order(OperatorAction.READMIT, node="n2")
        assert "evict" not in {decision for _, decision in _tie(fleet, "n1", "n2", step)}
        fleet.resume(step=step + 1)
    assert fleet.node_state("n1") is NodeState.HEALTHY


def test_deferred_divergent_node_keeps_tie_open() -> None:
    fleet = CoreFleet(msgspec.structs.replace(CorePolicy.lab_preset(), eviction_count=1))
    fleet.start(5, min_nodes=2)
    fleet.seal(4)
    said = decisions(fleet.seal(5, digests={1: "x", 2: "y"}))
    assert [decision for node, decision in said if node in ("n2", "n3")] == ["evict", "defer_eviction"]
    assert len(fleet.job().failures.kept_culprit_times) == 1, "of these a few end the job"
    assert not fleet.job().failures.digest_tie_times

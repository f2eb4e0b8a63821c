"""A probe that a node could not run is no evidence: it convicts neither that node nor its partner."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.vocabulary import NodeState
from everstep.wire.v1.training import ProbeFinished
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions, logged_sentences
from tests.support.fleet.findings import slow_link, xid

NO_TORCH = "the probe process ended (exit status 1) at: loading torch"


def _fleet(nodes: int = 6, spares: int = 0) -> CoreFleet:
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(budget={"count": 10}))
    fleet.start(nodes, spares)
    fleet.advance(301.0, *fleet.state.nodes)
    return fleet


def _probe_of(fleet: CoreFleet, suspect: str) -> tuple[str, str]:
    """The name of the running probe of the suspect, and its partner."""
    name, probe = next((n, p) for n, p in fleet.state.diagnostics.probes.items() if p.tested_node == suspect)
    return name, next(node for node in probe.nodes if node != suspect)


def _finish(fleet: CoreFleet, node: str, name: str, **fields: Any) -> list[tuple[str, str]]:
    before = len(fleet.effects)
    if name in fleet.state.diagnostics.probes:
        fleet.report(node, ProbeFinished(probe=name, **fields))
    return decisions(fleet.effects[before:])


def _pass(fleet: CoreFleet, suspect: str) -> list[tuple[str, str]]:
    name, partner = _probe_of(fleet, suspect)
    return [*_finish(fleet, partner, name, ok=True), *_finish(fleet, suspect, name, ok=True)]


def _return(fleet: CoreFleet, node: str) -> None:
    """The node was evicted, and is on probation now."""
    fleet.raise_finding(node, xid())
    fleet.resume(step=90)
    fleet.clear_finding(node, xid().key)
    fleet.advance(2.5, *fleet.state.nodes)
    assert fleet.node_state(node) is NodeState.PROBATION


def test_partner_unable_to_probe_is_replaced_without_verdict() -> None:
    fleet = _fleet()
    fleet.raise_finding("n1", slow_link())
    unable = []
    for _ in range(2):
        name, partner = _probe_of(fleet, "n1")
        unable.append(partner)
        assert _finish(fleet, partner, name, ok=False, detail=NO_TORCH) == []
    assert len({"n1", "n2", *unable, _probe_of(fleet, "n1")[1]}) == 5, (
        "each probe has a new partner, which is no suspect"
    )
    assert _pass(fleet, "n1") == []
    assert _pass(fleet, "n2") == []
    assert (
        "the link between n1 and n2 is suspected" in logged_sentences(fleet.effects, "blame_isolation.inconclusive")[-1]
    )


def test_three_unable_partners_lead_to_recommendation() -> None:
    fleet = _fleet(8)
    fleet.raise_finding("n1", slow_link())
    for _ in range(3):
        name, partner = _probe_of(fleet, "n1")
        _finish(fleet, partner, name, ok=False, detail=NO_TORCH)
    assert _pass(fleet, "n2") == [("n1", "recommend")]
    assert fleet.node_state("n1") is NodeState.HEALTHY


def test_suspect_unable_to_probe_is_not_evicted() -> None:
    fleet = _fleet()
    fleet.raise_finding("n1", slow_link())
    name, _ = _probe_of(fleet, "n1")
    _finish(fleet, "n1", name, ok=False, detail=NO_TORCH)
    assert _pass(fleet, "n2") == [("n1", "recommend")]
    assert fleet.node_state("n1") is NodeState.HEALTHY


@pytest.mark.promise("blame-isolation")
def test_suspect_paired_with_unable_partner_is_not_evicted() -> None:
    fleet = _fleet()
    fleet.raise_finding("n1", slow_link())
    name, partner = _probe_of(fleet, "n1")
    assert (
        _finish(fleet, "n1", name, ok=False, started=True, detail="no result within 30 s at: meeting the others") == []
    )
    assert _finish(fleet, partner, name, ok=False, detail="no result within 30 s at: loading torch") == []
    assert _probe_of(fleet, "n1")[1] != partner


def test_unable_partner_of_returning_node_is_no_suspect() -> None:
    fleet = _fleet(5, 1)
    _return(fleet, "n2")
    name, partner = _probe_of(fleet, "n2")
    assert _finish(fleet, partner, name, ok=False, detail=NO_TORCH) == []
    assert [probe.tested_node for probe in fleet.state.diagnostics.probes.values()] == ["n2"]
    assert _probe_of(fleet, "n2")[1] != partner
    assert _pass(fleet, "n2") == []
    verdicts = decisions(fleet.advance(30.0, *fleet.state.nodes))
    assert verdicts == [("n2", "readmit")]


@pytest.mark.parametrize("alone", [False, True])
def test_returning_node_unable_to_probe_gets_no_offence(alone: bool) -> None:
    fleet = _fleet(5, 1)
    fleet.pass_solo_diagnostics = not alone
    _return(fleet, "n2")
    offences, before = fleet.state.nodes["n2"].history.offence_score, len(fleet.effects)
    name = next(name for name, probe in fleet.state.diagnostics.probes.items() if probe.tested_node == "n2")
    assert _finish(fleet, "n2", name, ok=False, detail=NO_TORCH) == [("n2", "quarantine")]
    assert fleet.state.diagnostics.probes == {}
    assert fleet.state.nodes["n2"].history.offence_score == offences
    assert NO_TORCH in logged_sentences(fleet.effects[before:], "verdict.quarantine")[0]


@pytest.mark.promise("blame-isolation")
def test_fleet_unable_to_probe_evicts_no_node() -> None:
    fleet = _fleet(8, 1)
    _return(fleet, "n2")
    before = len(fleet.effects)
    for _ in range(60):
        for name, probe in list(fleet.state.diagnostics.probes.items()):
            for node in probe.nodes:
                _finish(fleet, node, name, ok=False, detail=NO_TORCH)
        fleet.advance(10.0, *fleet.state.nodes)
    assert {node for node, _ in decisions(fleet.effects[before:])} == {"n2"}
    assert not [node for node, decision in decisions(fleet.effects[before:]) if decision == "evict"]

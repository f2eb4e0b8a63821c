"""Probes with partners known to be good decide a pair's blame before a node is evicted."""

from __future__ import annotations

import msgspec
import pytest

from everstep.vocabulary import FindingKind, JobState, NodeState, ProbeKind
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.training import ProbeFinished
from everstep_controller.core.events import OperatorAction, ProbeRequested
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions, logged_sentences
from tests.support.fleet.findings import slow_link, xid


def _fleet(nodes: int = 4, **more: int) -> CoreFleet:
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(budget={"count": 10}))
    fleet.start(nodes, **more)
    fleet.advance(301.0, *[f"n{i + 1}" for i in range(nodes)])
    return fleet


def _pairs(fleet: CoreFleet) -> dict[str, str]:
    """Return the probe partner of each suspect."""
    return {
        str(p.tested_node): next(n for n in p.nodes if n != p.tested_node)
        for p in fleet.state.diagnostics.probes.values()
    }


@pytest.mark.promise("blame-isolation")
def test_slow_link_suspects_are_probed_with_good_partners() -> None:
    fleet = _fleet()
    assert decisions(fleet.raise_finding("n1", slow_link())) == []
    pairs = _pairs(fleet)
    assert set(pairs) == {"n1", "n2"}
    assert set(pairs.values()) == {"n3", "n4"}


@pytest.mark.promise("blame-isolation")
@pytest.mark.parametrize(
    ("bad", "evicted"),
    [({"n1"}, {"n1"}), ({"n2"}, {"n2"}), ({"n1", "n2"}, {"n1", "n2"}), (set(), set())],
)
def test_suspect_failing_with_good_partner_is_evicted(bad: set[str], evicted: set[str]) -> None:
    fleet = _fleet()
    fleet.raise_finding("n1", slow_link())
    decided = [
        verdict for suspect in ("n1", "n2") for verdict in decisions(fleet.finish_probe(suspect, ok=suspect not in bad))
    ]
    assert {node for node, decision in decided if decision == "evict"} == evicted
    assert fleet.state.diagnostics.blame_cases == {}
    if not bad:
        assert (
            "the link between n1 and n2 is suspected"
            in logged_sentences(fleet.effects, "blame_isolation.inconclusive")[-1]
        )
        assert fleet.state.nodes["n1"].health.undecided_findings == {}


@pytest.mark.promise("blame-isolation")
def test_suspects_without_good_partner_get_a_recommendation() -> None:
    fleet = _fleet(2)
    fleet.raise_finding("n1", slow_link())
    decided = decisions(fleet.advance(0.1, "n1", "n2"))
    assert decided == [("n1", "recommend"), ("n2", "recommend")]
    assert fleet.node_state("n1") is NodeState.HEALTHY


@pytest.mark.promise("blame-isolation")
def test_unanswered_probe_evicts_no_node() -> None:
    fleet = _fleet()
    fleet.raise_finding("n1", slow_link())
    decided = decisions(fleet.advance(100.0, "n1", "n2", "n3", "n4"))
    assert ("n1", "recommend") in decided
    assert not [node for node, decision in decided if decision == "evict"]
    assert fleet.state.diagnostics.blame_cases == {}


def test_sick_partner_is_replaced_without_conclusion() -> None:
    fleet = _fleet(6)
    fleet.raise_finding("n1", slow_link())
    partner = _pairs(fleet)["n1"]
    fleet.raise_finding(partner, xid())
    assert decisions(fleet.finish_probe("n1", ok=False)) == []
    assert _pairs(fleet)["n1"] not in (partner, "n2")


def test_probe_partner_comes_from_another_rack() -> None:
    fleet = CoreFleet()
    for node, rack in (("a1", "A"), ("a2", "A"), ("a3", "A"), ("b1", "B"), ("b2", "B")):
        fleet.register(node, domain=Domain(rack=rack))
        fleet.beat(node)
    fleet.advance(301.0, "a1", "a2", "a3", "b1", "b2")
    fleet.raise_finding("a1", slow_link("a2"))
    assert set(_pairs(fleet).values()) == {"b1", "b2"}


def test_node_with_findings_is_no_probe_partner() -> None:
    fleet = _fleet(4)
    fleet.raise_finding("n3", msgspec.structs.replace(xid(), kind=FindingKind.SENSOR_HUNG))
    fleet.raise_finding("n1", slow_link())
    assert "n3" not in _pairs(fleet).values()


def test_lost_suspect_closes_the_case() -> None:
    fleet = _fleet(3)
    fleet.raise_finding("n1", slow_link())
    (first,) = _pairs(fleet)
    other = "n2" if first == "n1" else "n1"
    fleet.disconnect(other)
    fleet.advance(2.0, first, "n3")
    assert fleet.node_state(other) is NodeState.LOST
    fleet.finish_probe(first, ok=True)
    assert fleet.state.diagnostics.blame_cases == {}


@pytest.mark.parametrize("bad", [{"n1"}, set()])
def test_slow_operator_probe_opens_a_case(bad: set[str]) -> None:
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(probes={"slow_link_bytes_per_s": 1e9}, budget={"count": 10}))
    fleet.start(4)
    fleet.advance(301.0, "n1", "n2", "n3", "n4")
    fleet.feed(ProbeRequested(nodes=("n1", "n2"), actor="ada"))
    name = next(iter(fleet.state.diagnostics.probes))
    fleet.report("n1", ProbeFinished(probe=name, ok=True, rows=((1 << 20, 0.01, 4e8),)))
    assert set(_pairs(fleet)) == {"n1", "n2"}
    assert set(_pairs(fleet).values()) == {"n3", "n4"}
    decided = [
        verdict for suspect in ("n1", "n2") for verdict in decisions(fleet.finish_probe(suspect, ok=suspect not in bad))
    ]
    assert {node for node, decision in decided if decision == "evict"} == bad
    kinds = {
        node: [found.kind for found in fleet.state.nodes[node].health.controller_findings.values()]
        for node in ("n1", "n2")
    }
    assert kinds["n2"] == []
    assert kinds["n1"] == ([FindingKind.NETWORK_SLOW_LINK] if bad else [])
    assert fleet.state.nodes["n2"].health.undecided_findings == {}


def _tied(**more: int) -> CoreFleet:
    fleet = CoreFleet()
    fleet.pass_solo_diagnostics = False
    fleet.start(2, 1, **more)
    fleet.seal(4)
    return fleet


def _computed(fleet: CoreFleet, node: str, *, ok: bool = True, wrong: bool = False) -> list[tuple[str, str]]:
    name = next(n for n, p in fleet.state.diagnostics.probes.items() if p.nodes == (node,))
    return decisions(fleet.report(node, ProbeFinished(probe=name, ok=ok, wrong_result=wrong, detail="first at [3, 7]")))


def test_failed_compute_probe_without_result_evicts_no_node() -> None:
    fleet = _tied()
    fleet.seal(5, digests={0: "x", 1: "y"})
    _computed(fleet, "n1")
    assert _computed(fleet, "n2", ok=False, wrong=False) == []
    assert fleet.node_state("n2") is NodeState.HEALTHY


def test_ties_during_compute_probes_count_once() -> None:
    fleet = _tied()
    for step in range(5, 10):
        fleet.seal(step, digests={0: "x", 1: "y"})
        fleet.resume(step=step)
    assert fleet.job_state() is JobState.RUNNING
    assert len(fleet.state.diagnostics.blame_cases) == 1


@pytest.mark.parametrize("over", [True, False])
def test_wrong_compute_probe_evicts_after_job_ends_or_pauses(over: bool) -> None:
    fleet = _tied(min_nodes=2)
    fleet.seal(5, digests={0: "x", 1: "y"})
    if over:
        fleet.order(OperatorAction.STOP_JOB, job="job")
    else:
        fleet.leave("n3")
        fleet.leave("n1")
    assert fleet.job_state() is (JobState.FAILED if over else JobState.PAUSED)
    _computed(fleet, "n1")
    assert ("n2", "evict") in _computed(fleet, "n2", ok=False, wrong=True)
    assert fleet.state.nodes["n2"].quarantine.needs_operator


@pytest.mark.parametrize(
    ("wrong", "found"),
    [(ProbeKind.MEMORY, FindingKind.MEMORY_WRONG), (ProbeKind.COMPUTE, FindingKind.COMPUTE_WRONG)],
)
def test_wrong_diagnostic_result_raises_matching_finding(wrong: ProbeKind, found: FindingKind) -> None:
    fleet = _fleet()
    fleet.pass_solo_diagnostics = False
    fleet.raise_finding("n2", xid())
    fleet.clear_finding("n2", xid().key)
    fleet.advance(30.0, "n1", "n2", "n3", "n4")
    while fleet.node_state("n2") is NodeState.PROBATION:
        name, probe = next(
            (name, probe) for name, probe in fleet.state.diagnostics.probes.items() if probe.nodes == ("n2",)
        )
        bad = probe.kind is wrong
        fleet.report(
            "n2", ProbeFinished(probe=name, ok=not bad, wrong_result=bad, started=True, detail="first at [3, 7]")
        )
    assert [finding.kind for finding in fleet.state.nodes["n2"].health.controller_findings.values()] == [found]
    assert fleet.state.nodes["n2"].quarantine.needs_operator

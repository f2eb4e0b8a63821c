"""A seated node on probation loses its seat only by an eviction, with its proof, its budget and the needs of its job.

The findings of a heartbeat count before the heartbeat does.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.vocabulary import FindingKind, JobState, NodeState, ProbeKind
from everstep.wire.v1.training import ProbeFinished
from everstep_controller.core.effects import Effect
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import ReadmissionPlan
from tests.support.fleet.core_fleet import CoreFleet, decisions, generations
from tests.support.fleet.findings import xid

FIVE = [f"n{i}" for i in range(1, 6)]


def _released(fleet: CoreFleet, *, min_nodes: int = 4, spares: int = 1) -> CoreFleet:
    """`n2` was held, and is on probation in its seat."""
    fleet.start(4, spares, min_nodes=min_nodes)
    fleet.seal(10)
    fleet.order(OperatorAction.HOLD, node="n2")
    fleet.order(OperatorAction.RELEASE, node="n2")
    assert fleet.node_state("n2") is NodeState.PROBATION
    assert "n2" in fleet.seats()
    return fleet


def _fail_with_two(fleet: CoreFleet) -> list[Effect]:
    """The all-reduce of n2 fails with one partner, and again with a partner that is known to be good."""
    partner = next(p.nodes[0] for p in fleet.state.diagnostics.probes.values() if p.tested_node == "n2")
    fleet.finish_probe("n2", ok=False)
    fleet.finish_probe(partner, ok=True)
    return fleet.finish_probe("n2", ok=False)


def _stays(fleet: CoreFleet) -> None:
    assert (fleet.node_state("n2"), fleet.job_state()) == (NodeState.PROBATION, JobState.RUNNING)
    assert "n2" in fleet.seats()


@pytest.mark.promise("outbreaks-outside")
def test_failed_diagnostic_without_proof_keeps_node_seated() -> None:
    fleet = _released(CoreFleet())
    before = len(fleet.effects)
    verdicts = decisions(fleet.advance(31.0, *FIVE))  # no node answers the probe
    verdicts += decisions(fleet.advance(91.0, *FIVE))  # no node answers the second probe
    assert {decision for _, decision in verdicts} == {"recommend"}
    assert generations(fleet.effects[before:]) == []
    assert fleet.state.nodes["n2"].history.offence_score == 0.0
    _stays(fleet)


def _awaiting_compute_probe(**knobs: Any) -> CoreFleet:
    """`n2` is on probation in its seat, and starts with a solo probe whose result is known."""
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(**knobs))
    fleet.pass_solo_diagnostics = False
    _released(fleet)
    fleet.order(OperatorAction.HOLD, node="n2")
    fleet.state.nodes["n2"].quarantine.plan = ReadmissionPlan(
        required_diagnostics=(ProbeKind.COMPUTE, ProbeKind.ALL_REDUCE)
    )
    fleet.order(OperatorAction.RELEASE, node="n2")
    return fleet


def _finish_solo_probe(fleet: CoreFleet, *, ok: bool = False, wrong: bool = False) -> list[tuple[str, str]]:
    name = next(name for name, probe in fleet.state.diagnostics.probes.items() if probe.nodes == ("n2",))
    return decisions(
        fleet.report("n2", ProbeFinished(probe=name, ok=ok, started=True, wrong_result=wrong, detail="no CUDA device"))
    )


def _is_probed(fleet: CoreFleet) -> bool:
    return any(probe.nodes == ("n2",) for probe in fleet.state.diagnostics.probes.values())


def test_failed_diagnostic_is_retried_with_doubling_wait() -> None:
    fleet = _awaiting_compute_probe()
    for wait_s in (2.0, 4.0, 8.0):
        assert _finish_solo_probe(fleet) == [("n2", "recommend")]
        fleet.advance(wait_s - 0.5, *FIVE)
        assert not _is_probed(fleet)
        _stays(fleet)
        fleet.advance(1.0, *FIVE)
        assert _is_probed(fleet)
    _finish_solo_probe(fleet, ok=True)
    fleet.finish_probe("n2", ok=True)
    fleet.advance(2.0, *FIVE)
    assert fleet.node_state("n2") is NodeState.HEALTHY
    assert fleet.state.nodes["n2"].health.controller_findings == {}


def test_wrong_diagnostic_result_evicts_within_budget() -> None:
    fleet = _awaiting_compute_probe(budget={"job_count": 1})
    assert _finish_solo_probe(fleet, wrong=True) == [("n2", "evict")]
    assert [eviction.node for eviction in fleet.state.fleet.recent_evictions] == ["n2"]


def test_proven_probe_failure_evicts_within_budget() -> None:
    fleet = _released(CoreFleet())
    verdicts = _fail_with_two(fleet)
    assert decisions(verdicts) == [("n2", "evict")]
    assert [eviction.node for eviction in fleet.state.fleet.recent_evictions] == ["n2"]
    assert (fleet.node_state("n2"), fleet.job_state()) == (NodeState.QUARANTINED, JobState.RUNNING)
    assert "n2" not in fleet.seats()


@pytest.mark.promise("outbreaks-outside")
@pytest.mark.parametrize(
    ("knobs", "spares", "held_by"),
    [({}, 0, "needed:job"), ({"budget": {"job_count": 1}}, 2, "job:job"), ({"budget": {"count": 1}}, 2, "fleet")],
)
def test_proven_probe_failure_respects_eviction_deferral(knobs: dict[str, Any], spares: int, held_by: str) -> None:
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(**knobs))
    everyone = [f"n{i}" for i in range(1, 5 + spares)]
    fleet.start(4, spares, min_nodes=4)
    fleet.seal(10)
    if spares:  # the budget's only eviction
        fleet.raise_finding("n4", xid())
        fleet.resume(step=20)
    fleet.order(OperatorAction.HOLD, node="n2")
    fleet.order(OperatorAction.RELEASE, node="n2")
    assert decisions(_fail_with_two(fleet)) == [("n2", "defer_eviction")]
    assert fleet.state.nodes["n2"].health.eviction_deferred_by == held_by
    _stays(fleet)
    fleet.advance(1.0, *everyone)
    assert not [p for p in fleet.state.diagnostics.probes.values() if p.tested_node == "n2"], (
        "the next probe comes after a wait"
    )
    fleet.advance(3.0, *everyone)
    fleet.finish_probe("n2", ok=True)
    fleet.advance(2.0, *everyone)
    assert (fleet.node_state("n2"), fleet.state.nodes["n2"].health.deferred_eviction_key) == (NodeState.HEALTHY, "")


def test_lemon_node_on_probation_keeps_its_seat() -> None:
    fleet = CoreFleet()
    fleet.start(4, 1, min_nodes=4)
    fleet.state.nodes["n2"].history.offence_score, fleet.state.nodes["n2"].history.offence_score_at = 20.0, fleet.now
    fleet.order(OperatorAction.HOLD, node="n2")
    fleet.order(OperatorAction.RELEASE, node="n2")
    _stays(fleet)


@pytest.mark.promise("probation")
def test_heartbeat_with_critical_finding_ends_probation() -> None:
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(probes={"required": False}))
    fleet.start(4, 1)
    fleet.order(OperatorAction.HOLD, node="n5")
    fleet.order(OperatorAction.RELEASE, node="n5")
    for _ in range(fleet.policy.readmission.probation_heartbeats - 1):
        fleet.now += 1.0
        fleet.beat("n5")
    assert fleet.node_state("n5") is NodeState.PROBATION
    fleet.now += 1.0
    verdicts = decisions(fleet.beat("n5", xid()))
    assert verdicts == [("n5", "quarantine")]
    assert fleet.state.fleet.recent_evictions == []


def test_heartbeat_with_mild_finding_counts_as_clean() -> None:
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(probes={"required": False}))
    fleet.start(4, 1)
    fleet.order(OperatorAction.HOLD, node="n5")
    fleet.order(OperatorAction.RELEASE, node="n5")
    mild = msgspec.structs.replace(xid(), kind=FindingKind.AGENT_SPOOL_OVERFLOW, xid=None)
    for _ in range(fleet.policy.readmission.probation_heartbeats):
        fleet.now += 1.0
        fleet.beat("n5", mild)
    assert fleet.node_state("n5") is NodeState.HEALTHY

"""Absent nodes and ended jobs leave memory and store, by an operator's order or by their age."""

from __future__ import annotations

import pytest

from everstep.errors import Conflict, NotFound
from everstep.ids import Version
from everstep.vocabulary import JobState, NodeState, ProbeKind
from everstep.wire.v1.agent import Gpu
from everstep.wire.v1.directives import StopJob
from everstep_controller.core import retirement
from everstep_controller.core.effects import (
    DeleteJob,
    PutVerdict,
)
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorAction
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.state import DeadlineKind
from tests.support.fleet.core_fleet import CoreFleet, generations, logged_sentences, sent
from tests.support.fleet.findings import xid

DAY = 86400.0
LAB = CorePolicy.lab_preset()
POLICY = LAB.with_values(retention={"forget_nodes_after_s": 2 * DAY, "forget_jobs_after_s": DAY})


def _fleet(policy: CorePolicy = POLICY, nodes: int = 3, spares: int = 1, **spec: int) -> CoreFleet:
    fleet = CoreFleet(policy)
    fleet.start(nodes, spares, **spec)
    fleet.seal(5)
    return fleet


def _lose(fleet: CoreFleet, *nodes: str) -> None:
    """Close the connections of the nodes and let them stay away, while the others send heartbeats."""
    for node in nodes:
        fleet.disconnect(node)
    fleet.advance(
        3.0, *(node for node in fleet.state.nodes if node in fleet.state.liveness.reachable_nodes and node not in nodes)
    )
    assert {fleet.node_state(node) for node in nodes} == {NodeState.LOST}


def _finish(fleet: CoreFleet) -> None:
    """Finish the job with its newest commit."""
    fleet.finish()
    assert fleet.job_state() is JobState.FINISHED


def _pass(fleet: CoreFleet, days: float) -> None:
    """Let `days` pass, during which the connected nodes send heartbeats now and then."""
    for _ in range(round(days * 4)):
        fleet.now += DAY / 4 - 30.0
        fleet.stop_controller(1.0)
        fleet.advance(29.0, *(node for node in fleet.state.nodes if node in fleet.state.liveness.reachable_nodes))


def _refused(fleet: CoreFleet, node: str) -> str:
    with pytest.raises(Conflict) as refusal:
        fleet.order(OperatorAction.FORGET, node=node)
    return str(refusal.value)


@pytest.mark.promise("forgotten-nodes")
def test_forget_refuses_connected_or_seated_node() -> None:
    fleet = _fleet(nodes=2, spares=1, min_nodes=2)
    assert "n3 still sends messages: stop its agent first" in _refused(fleet, "n3")
    _lose(fleet, "n3")
    _lose(fleet, "n2")
    assert fleet.job_state() is JobState.PAUSED
    assert "n2 is in the roster of job job, which is paused" in _refused(fleet, "n2")
    with pytest.raises(NotFound, match="no node n9"):
        fleet.order(OperatorAction.FORGET, node="n9")


def test_forget_refuses_holder_until_next_commit() -> None:
    fleet = _fleet()
    _lose(fleet, "n2")
    fleet.resume(step=9)
    assert "n2 may hold a share of what job has committed" in _refused(fleet, "n2")
    fleet.advance(1.0, "n1", "n3", "n4")
    fleet.seal(40)
    fleet.order(OperatorAction.FORGET, node="n2")
    assert "n2" not in fleet.state.nodes


def test_forget_refuses_node_under_probe() -> None:
    fleet = _fleet(nodes=2, spares=2)
    fleet.raise_finding("n4", xid())
    fleet.clear_finding("n4", xid().key)
    fleet.advance(2.5, *fleet.state.nodes)
    partner = next(node for probe in fleet.state.diagnostics.probes.values() for node in probe.nodes if node != "n4")
    _lose(fleet, "n4")
    assert "a probe of n4 is running" in _refused(fleet, "n4"), partner


@pytest.mark.promise("forgotten-nodes")
@pytest.mark.parametrize("restarted", [False, True])
def test_node_forgotten_in_quarantine_returns_through_probe(restarted: bool) -> None:
    fleet = _fleet()
    fleet.raise_finding("n4", xid())
    _lose_quarantined(fleet, "n4")
    fleet.order(OperatorAction.FORGET, node="n4")
    if restarted:
        fleet.restart()
    _returns_through_probe(fleet, "n4")
    assert "n4" not in fleet.state.fleet.unfit_nodes


@pytest.mark.promise("forgotten-nodes")
def test_node_forgotten_in_repair_returns_through_probe() -> None:
    fleet = _fleet()
    fleet.order(OperatorAction.REPAIR, node="n4")
    _lose_quarantined(fleet, "n4")
    fleet.order(OperatorAction.FORGET, node="n4")
    _returns_through_probe(fleet, "n4")


@pytest.mark.promise("forgotten-nodes")
def test_node_forgotten_on_probation_keeps_required_diagnostics() -> None:
    fleet = _fleet()
    _clear_quarantine(fleet, "n4")
    assert fleet.node_state("n4") is NodeState.PROBATION
    fleet.disconnect("n4")
    fleet.advance(40.0, "n1", "n2", "n3")
    assert fleet.node_state("n4") is NodeState.LOST
    fleet.order(OperatorAction.FORGET, node="n4")
    assert fleet.state.fleet.unfit_nodes["n4"].diagnostics == (
        ProbeKind.MEMORY,
        ProbeKind.COMPUTE,
        ProbeKind.ALL_REDUCE,
    )
    _returns_through_probe(fleet, "n4")


def _clear_quarantine(fleet: CoreFleet, node: str) -> None:
    """The node was evicted for an XID, which has cleared: no finding keeps it in quarantine any more."""
    fleet.raise_finding(node, xid())
    fleet.clear_finding(node, xid().key)
    fleet.advance(2.5, *fleet.state.nodes)


@pytest.mark.promise("forgotten-nodes")
def test_quarantined_node_forgotten_by_age_needs_probe() -> None:
    fleet = _fleet()
    fleet.raise_finding("n4", xid())
    _lose_quarantined(fleet, "n4")
    _pass(fleet, 2.5)
    assert "n4" not in fleet.state.nodes
    _returns_through_probe(fleet, "n4")


def test_condemned_gpus_stay_condemned_after_forget() -> None:
    fleet = _fleet()
    fleet.raise_finding("n4", xid())
    fleet.state.nodes["n4"].health.defective_gpus = ["GPU-n4"]
    _lose_quarantined(fleet, "n4")
    fleet.order(OperatorAction.FORGET, node="n4")
    fleet.register("n4", gpus=(_gpu("GPU-n4"),))
    fleet.advance(60.0, *fleet.state.nodes)
    assert (fleet.node_state("n4"), fleet.state.nodes["n4"].quarantine.needs_operator) == (NodeState.QUARANTINED, True)
    fleet.register("n4", gpus=(_gpu("GPU-new"),))
    fleet.advance(3.0, *fleet.state.nodes)
    assert fleet.node_state("n4") is NodeState.PROBATION


def test_unfit_node_list_drops_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retirement, "MAX_UNFIT_NODES", 1)
    fleet = _fleet(nodes=2, spares=2)
    for node in ("n3", "n4"):
        fleet.raise_finding(node, xid())
        _lose_quarantined(fleet, node)
        fleet.order(OperatorAction.FORGET, node=node)
    assert list(fleet.state.fleet.unfit_nodes) == ["n4"]


def _gpu(uuid: str) -> Gpu:
    return Gpu(index=0, uuid=uuid, name="H100", pci_bus_id="0", memory_bytes=80 << 30)


def _returns_through_probe(fleet: CoreFleet, node: str) -> None:
    fleet.advance(60.0, *fleet.state.nodes)
    before = len(fleet.effects)
    fleet.register(node)
    assert fleet.node_state(node) is NodeState.QUARANTINED
    assert "was forgotten while it was out of service" in fleet.state.nodes[node].sentence
    assert [e.verdict.node for e in fleet.effects[before:] if isinstance(e, PutVerdict)] == [node]
    fleet.advance(3.0, *fleet.state.nodes)
    assert fleet.node_state(node) is NodeState.PROBATION
    assert any(node in probe.nodes for probe in fleet.state.diagnostics.probes.values())


def _lose_quarantined(fleet: CoreFleet, node: str) -> None:
    fleet.disconnect(node)
    fleet.advance(3.0, *(other for other in fleet.state.nodes if other != node))
    assert node not in fleet.state.liveness.reachable_nodes


def test_forget_waits_for_the_database() -> None:
    fleet = _fleet()
    _lose(fleet, "n4")
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="disk full"))
    with pytest.raises(Exception, match="the database is unavailable"):
        fleet.order(OperatorAction.FORGET, node="n4")


def test_absent_node_is_forgotten_after_its_age() -> None:
    fleet = _fleet()
    _lose(fleet, "n4")
    _pass(fleet, 1.9)
    assert "n4" in fleet.state.nodes
    _pass(fleet, 0.3)
    assert list(fleet.state.nodes) == ["n1", "n2", "n3"]
    (sentence,) = logged_sentences(fleet.effects, "node.forgotten")
    assert sentence == "n4 sent no message for 2.2 days and is forgotten"


@pytest.mark.promise("forgotten-nodes")
def test_nodes_held_in_repair_or_condemned_are_kept() -> None:
    fleet = _fleet(nodes=2, spares=4)
    fleet.order(OperatorAction.HOLD, node="n3")
    fleet.order(OperatorAction.REPAIR, node="n4")
    fleet.state.nodes["n5"].health.defective_gpus = ["GPU-n5"]
    for node in ("n3", "n4", "n5", "n6"):
        _lose_quarantined(fleet, node)
    _pass(fleet, 2.5)
    assert list(fleet.state.nodes) == ["n1", "n2", "n3", "n4", "n5"]
    fleet.order(OperatorAction.FORGET, node="n4")
    assert "n4" not in fleet.state.nodes


def test_retention_of_zero_is_disabled() -> None:
    never = dict.fromkeys(("forget_nodes_after_s", "forget_jobs_after_s", "end_abandoned_jobs_after_s"), 0.0)
    fleet = _fleet(LAB.with_values(retention=never))
    _lose(fleet, "n4")
    _finish(fleet)
    _pass(fleet, 3.0)
    assert ("n4" in fleet.state.nodes, list(fleet.state.jobs)) == (True, ["job"])
    assert not [kind for _, kind, _ in fleet.state.deadline_queue.entries if kind is DeadlineKind.RETENTION]


def test_ended_job_is_forgotten_after_its_age() -> None:
    fleet = _fleet()
    _finish(fleet)
    _pass(fleet, 0.9)
    assert list(fleet.state.jobs) == ["job"]
    before = len(fleet.effects)
    _pass(fleet, 0.3)
    assert (fleet.state.jobs, fleet.state.job_runtime) == ({}, {})
    assert [e.job for e in fleet.effects[before:] if isinstance(e, DeleteJob)] == ["job"]
    fleet.join("n1", "n2", min_nodes=1, max_nodes=2)
    assert generations(fleet.effects)[-1].number == 1


@pytest.mark.parametrize("left", [False, True])
def test_node_of_ended_job_is_forgotten_with_replica_record(left: bool) -> None:
    fleet = _fleet()
    _finish(fleet)
    if left:
        fleet.leave("n2", orderly=True)
    _lose(fleet, "n2")
    fleet.order(OperatorAction.FORGET, node="n2")
    assert fleet.job().commits.locations is None
    assert "n2" not in fleet.job().membership.launchers


def test_unfinished_job_is_never_forgotten() -> None:
    fleet = _fleet()
    _pass(fleet, 3.0)
    assert list(fleet.state.jobs) == ["job"]


def _deserted() -> CoreFleet:
    """A job of three nodes, without a launcher on any of them."""
    fleet = _fleet(nodes=3, spares=0, min_nodes=2)
    for node in ("n1", "n2", "n3"):
        fleet.leave(node, orderly=True)
    assert fleet.job_state() is JobState.PAUSED
    return fleet


@pytest.mark.promise("deserted-job")
def test_abandoned_job_ends_after_a_day() -> None:
    fleet = _deserted()
    _pass(fleet, 0.8)
    fleet.restart()
    before = len(fleet.effects)
    _pass(fleet, 0.5)
    assert fleet.job_state() is JobState.FAILED
    assert (
        fleet.job().status.sentence == "all its launchers have left, and none joined for 24 h: its memory is released"
    )
    assert set(sent(fleet.effects[before:], StopJob)) == {"n1", "n2", "n3"}


@pytest.mark.promise("deserted-job")
def test_abandoned_job_resumes_and_its_timer_restarts() -> None:
    fleet = _deserted()
    _pass(fleet, 0.8)
    fleet.join("n1", "n2", min_nodes=2, max_nodes=3)
    fleet.advance(5.0, "n1", "n2", "n3")
    assert (fleet.job_state(), fleet.spec().restore.floor) == (JobState.RUNNING, Version(1, 5))
    _pass(fleet, 1.5)
    fleet.leave("n1")
    fleet.leave("n2")
    _pass(fleet, 0.8)
    assert fleet.job_state() is JobState.PAUSED


def test_abandoned_forming_job_ends_but_unreachable_job_stays() -> None:
    fleet = _fleet(nodes=2, spares=0, min_nodes=2)
    fleet.register("m1")
    fleet.join("m1", job="alone", min_nodes=2, max_nodes=2, join_wait_s=5.0)
    fleet.leave("m1", job="alone")
    _lose(fleet, "n1", "n2")
    _pass(fleet, 1.5)
    assert (fleet.job_state("alone"), fleet.job_state()) == (JobState.FAILED, JobState.PAUSED)

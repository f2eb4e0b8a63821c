"""A spare whose eviction is deferred takes a seat only if its job would otherwise fall below its minimum."""

from __future__ import annotations

from everstep.vocabulary import JobState
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.seats.membership import no_seat_reason
from tests.support.fleet.core_fleet import CoreFleet
from tests.support.fleet.findings import xid


def _fleet(nodes: int, spares: int, held: str = "n5", **shape: int) -> CoreFleet:
    """A fleet whose breaker holds the eviction of ``held``."""
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(budget={"count": 1}, jobs={"growth_interval_s": 1.0}))
    fleet.start(nodes, spares, **shape)
    fleet.register("x1")
    fleet.beat("x1")
    fleet.raise_finding("x1", xid(200))
    fleet.raise_finding(held, xid(105))
    assert fleet.state.nodes[held].health.eviction_deferred_by == "fleet"
    return fleet


def test_job_shrinks_rather_than_seat_spare_due_for_eviction() -> None:
    fleet = _fleet(4, 1, min_nodes=2)
    fleet.lose_rank(1, replacement=False)
    assert fleet.seats() == ["n1", "n3", "n4"]
    fleet.resume(step=20)
    fleet.advance(60.0, *fleet.state.nodes)
    assert fleet.seats() == ["n1", "n3", "n4"], "nor does the job grow with it"
    assert "eviction is deferred" in no_seat_reason(fleet.state, fleet.job(), "n5")


def test_job_below_minimum_seats_one_spare_due_for_eviction() -> None:
    fleet = _fleet(4, 2, min_nodes=4)
    fleet.raise_finding("n6", xid(106))
    fleet.lose_rank(1, replacement=False)
    assert fleet.job_state() is JobState.RUNNING
    assert fleet.seats() == ["n1", "n5", "n3", "n4"]


def test_job_seats_only_one_of_two_spares_due_for_eviction() -> None:
    fleet = _fleet(4, 2, min_nodes=3)
    fleet.raise_finding("n6", xid(106))
    for node in ("n1", "n2"):
        fleet.disconnect(node)
    fleet.advance(30.0, "n3", "n4", "n5", "n6", "x1")
    assert len([node for node in fleet.seats() if node in ("n5", "n6")]) == 1
    assert len(fleet.seats()) == 3


def test_seated_node_with_deferred_eviction_keeps_its_seat() -> None:
    fleet = _fleet(4, 1, held="n2", min_nodes=2)
    fleet.lose_rank(0, replacement=False)
    assert fleet.seats() == ["n5", "n2", "n3", "n4"]

"""A generation that names its boundary follows when that is behind the ranks, at once where they do not get there."""

from __future__ import annotations

import pytest
from everstep_controller.core.effects import Effect
from everstep_controller.core.events import OperatorAction

from everstep.wire.v1.training import CollectiveFailed
from tests.support.core_fleet import CoreFleet, generations

STAYS = ("n1", "n2", "n4")


def _leaving() -> tuple[CoreFleet, int]:
    """A job that is to leave n3 behind a boundary, and after which step that is."""
    fleet = CoreFleet()
    fleet.start(4)
    fleet.progress(5)
    fleet.order(OperatorAction.DRAIN, node="n3")
    after = fleet.spec().after_step
    assert after is not None
    assert fleet.job().outgoing_generation is not None
    return fleet, after


def _wait_for_the_boundary(fleet: CoreFleet) -> list[Effect]:
    before = len(fleet.effects)
    fallback_at = fleet.state.job_runtime["job"].regroup.boundary_fallback_at
    fleet.advance(fallback_at - fleet.now - 0.01, *fleet.state.nodes)
    assert fleet.job().outgoing_generation is not None, "nobody has said that it entered, and there is time"
    fleet.advance(0.1, *fleet.state.nodes)
    return fleet.effects[before:]


def test_boundary_reached_by_all_ranks_is_crossed() -> None:
    fleet, after = _leaving()
    fleet.progress(after)
    assert generations(_wait_for_the_boundary(fleet)) == []
    assert (fleet.job().outgoing_generation, fleet.spec().seats) == (None, STAYS)


def test_resize_waits_for_boundary() -> None:
    fleet = CoreFleet()
    fleet.start(4)
    fleet.progress(5)
    (spec,) = generations(fleet.order(OperatorAction.RESIZE_JOB, job="job", node_limit=3))
    assert (spec.after_step or 0) > 5


def test_restarted_script_leaves_a_drained_node_at_once() -> None:
    """Its ranks make one step alone, so a boundary would never be reached."""
    fleet = CoreFleet()
    fleet.start(4, restarts_script=True)
    fleet.progress(1)
    fleet.order(OperatorAction.DRAIN, node="n3")
    assert (fleet.spec().after_step, fleet.spec().seats) == (None, STAYS)


def test_boundary_lies_ahead_when_step_time_is_unknown() -> None:
    fleet = CoreFleet()
    fleet.start(4)
    fleet.progress(5, step_s=0.0)
    fleet.order(OperatorAction.DRAIN, node="n3")
    assert (fleet.spec().after_step or 0) > 5


def test_new_member_progress_does_not_cross_boundary() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    fleet.progress(5)
    fleet.order(OperatorAction.DRAIN, node="n3")
    spec, running = fleet.spec(), fleet.running()
    (newcomer,) = (member for member in spec.roster if member.node == "n4")
    fleet.progress_of(newcomer.rank, 0, spec=spec)
    assert fleet.job().outgoing_generation == running
    (regrouped,) = generations(fleet.lose_rank(0))
    assert regrouped.number == spec.number + 1


@pytest.mark.promise("newcomers-meet")
def test_new_member_failure_before_boundary_forces_regroup() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    fleet.progress(5)
    fleet.order(OperatorAction.DRAIN, node="n3")
    spec = fleet.spec()
    (newcomer,) = (member for member in spec.roster if member.node == "n4")
    word = CollectiveFailed(
        job="job", at=fleet.now, generation=spec.number, rank=newcomer.rank, step=0, detail="broken pipe"
    )
    fleet.report("n4", word)
    (regrouped,) = generations(fleet.advance(1.0, *fleet.state.nodes))
    assert (regrouped.number, regrouped.after_step) == (spec.number + 1, None)
    assert regrouped.seats == spec.seats
    assert "no report names a lost member" in regrouped.sentence


def test_leaving_node_is_no_witness_of_announced_generation() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    fleet.progress(5)
    fleet.order(OperatorAction.DRAIN, node="n3")
    spec = fleet.spec()
    rank = fleet.running().ranks_on("n3")[0]
    fleet.report("n3", CollectiveFailed(job="job", at=fleet.now, generation=spec.number, rank=rank, step=0, detail=""))
    assert generations(fleet.advance(1.0, *fleet.state.nodes)) == []

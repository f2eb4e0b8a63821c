"""Ranks that are slow in several windows are named, and replaced by an able spare."""

from __future__ import annotations

import pytest

from everstep.ids import Version
from everstep.vocabulary import Decision
from everstep.wire.v1.training import RankProgress
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions

POLICY = CorePolicy.lab_preset().with_values(stragglers={"factor": 1.5, "window_s": 2.0, "windows": 5, "count": 4})


def _start(nodes: int = 4, spares: int = 1, policy: CorePolicy = POLICY, **spec: int) -> CoreFleet:
    fleet = CoreFleet(policy)
    fleet.start(nodes, spares, **spec)
    return fleet


def _run(fleet: CoreFleet, seconds: float, **slow: float) -> None:
    """The job steps for so long; each rank is busy for 0.03 s of a step, those on nodes in ``slow`` for as long."""
    end = fleet.now + seconds
    while fleet.now < end:
        spec = fleet.running()
        step = int(20 * (fleet.now - fleet.state.jobs["job"].progress.created_at)) + 2
        for member in spec.roster:
            progress = RankProgress(
                job="job",
                generation=spec.number,
                rank=member.rank,
                step=step,
                step_s=0.05,
                busy_s=slow.get(member.node, 0.03),
            )
            fleet.touch(member.node, progress)
        fleet.advance(0.5, *fleet.state.nodes)


@pytest.mark.promise("slow-node-fair")
def test_straggler_without_spare_is_only_reported() -> None:
    fleet = _start(spares=0)
    _run(fleet, 30.0, n2=0.049)
    assert decisions(fleet.effects) == [("n2", Decision.RECOMMEND)], "once for as long as it lasts"
    assert fleet.spec().number == 1


def test_straggler_needs_a_relevant_compute_time() -> None:
    fleet = _start()
    _run(fleet, 30.0, n1=0.0001, n2=0.0010, n3=0.0001, n4=0.0001, n5=0.0001)
    assert decisions(fleet.effects) == []


def test_replaced_straggler_returns_only_when_required() -> None:
    fleet = _start(nodes=3, min_nodes=2)
    _run(fleet, 12.0, n2=0.049)
    fleet.resume(restored=Version(1, 100), step=400)
    assert fleet.seats() == ["n1", "n4", "n3"]
    fleet.leave("n4")
    assert fleet.seats() == ["n1", "n3"], "one slow node costs all others more than one that is missing"
    fleet.leave("n3")
    assert fleet.seats() == ["n1", "n2"]


def test_readmitted_straggler_is_an_ordinary_spare() -> None:
    fleet = _start(nodes=3, min_nodes=2)
    _run(fleet, 12.0, n2=0.049)
    fleet.resume(restored=Version(1, 100), step=400)
    fleet.order(OperatorAction.READMIT, node="n2")
    assert fleet.job().membership.replaced_stragglers == {}
    fleet.leave("n4")
    assert fleet.seats() == ["n1", "n2", "n3"]

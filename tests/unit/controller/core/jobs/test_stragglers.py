"""Who is slow, window after window, is named, and replaced where a spare is able; never on one bad moment."""

from __future__ import annotations

import msgspec
import pytest
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.jobs.stragglers import STRAGGLER_KEY, slow_nodes
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.transition import Stragglers

from everstep.ids import Version
from everstep.vocabulary import Decision, GenerationReason, JobState
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.training import RankProgress
from tests.support.core_fleet import CoreFleet, decisions, generations

POLICY = msgspec.structs.replace(
    CorePolicy.lab_preset(), straggler_factor=1.5, straggler_window_s=2.0, straggler_windows=5, straggler_count=4
)


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
            word = RankProgress(
                job="job",
                generation=spec.number,
                rank=member.rank,
                step=step,
                step_s=0.05,
                busy_s=slow.get(member.node, 0.03),
            )
            fleet.touch(member.node, word)
        fleet.advance(0.5, *fleet.state.nodes)


@pytest.mark.promise("slow-node-fair")
def test_straggler_without_spare_is_only_reported() -> None:
    fleet = _start(spares=0)
    _run(fleet, 30.0, n2=0.049)
    assert decisions(fleet.effects) == [("n2", Decision.RECOMMEND)], "once for as long as it lasts"
    assert fleet.spec().number == 1


def test_straggler_policy_can_only_recommend() -> None:
    fleet = _start(policy=msgspec.structs.replace(POLICY, straggler_replace=False))
    _run(fleet, 30.0, n2=0.049)
    assert decisions(fleet.effects) == [("n2", Decision.RECOMMEND)]
    assert fleet.spec().number == 1


def test_straggler_windows_reset_after_interruption() -> None:
    fleet = _start(spares=0)
    _run(fleet, 12.0, n2=0.049)
    assert decisions(fleet.effects) == [("n2", Decision.RECOMMEND)]
    fleet.lose_rank(0)
    fleet.advance(30.0, *fleet.state.nodes)
    assert STRAGGLER_KEY not in fleet.state.nodes["n2"].health.controller_findings
    fleet.resume(restored=Version(1, 100), step=1001)
    _run(fleet, 4.0)
    assert STRAGGLER_KEY not in fleet.state.nodes["n2"].health.controller_findings, "it keeps up since then"
    assert fleet.state.job_runtime["job"].stragglers.slow_windows == {}


def test_straggler_detection_survives_controller_restart() -> None:
    fleet = _start(spares=0)
    _run(fleet, 5.0)
    fleet.restart()
    _run(fleet, 12.0, n2=0.049)
    assert decisions(fleet.effects) == [("n2", Decision.RECOMMEND)]


def test_straggler_windows_expire_during_a_pause() -> None:
    fleet = _start(nodes=3, spares=0, min_nodes=3)
    _run(fleet, 7.0, n2=0.049)
    assert decisions(fleet.effects) == []
    fleet.leave("n3")
    fleet.advance(30.0, *fleet.state.nodes)
    assert fleet.job().status.state is JobState.PAUSED
    fleet.join("n3", min_nodes=3, max_nodes=3)
    assert fleet.job().status.state is JobState.RUNNING
    fleet.resume(restored=Version(1, 100), step=1001)
    _run(fleet, 3.0, n2=0.049)
    assert STRAGGLER_KEY not in fleet.state.nodes["n2"].health.controller_findings, "two windows of five"


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


def test_growing_job_drops_its_straggler() -> None:
    fleet = _start(nodes=3, min_nodes=2)
    _run(fleet, 12.0, n2=0.049)
    fleet.resume(restored=Version(1, 100), step=400)
    fleet.leave("n4")
    fleet.leave("n3")
    assert fleet.seats() == ["n1", "n2"]
    fleet.resume(restored=Version(3, 500), step=501)
    fleet.join("n3", "n4")
    _run(fleet, 60.0)
    assert set(fleet.seats()) == {"n1", "n3", "n4"}


def test_readmitted_straggler_is_an_ordinary_spare() -> None:
    fleet = _start(nodes=3, min_nodes=2)
    _run(fleet, 12.0, n2=0.049)
    fleet.resume(restored=Version(1, 100), step=400)
    fleet.order(OperatorAction.READMIT, node="n2")
    assert fleet.job().membership.replaced_stragglers == {}
    fleet.leave("n4")
    assert fleet.seats() == ["n1", "n2", "n3"]


def test_straggler_replacement_waits_for_pending_boundary() -> None:
    fleet = _start()
    _run(fleet, 7.5, n2=0.049)
    fleet.order(OperatorAction.DRAIN, node="n1")
    assert fleet.job().outgoing_generation is not None
    _run(fleet, 1.0, n2=0.049)
    assert [spec.reason for spec in generations(fleet.effects)][1:] == [GenerationReason.OPERATOR]


# --- comparing ---------------------------------------------------------------------------------------------------


def test_straggler_detection_needs_three_ranks() -> None:
    fleet = _start(nodes=2)
    spec = fleet.spec()
    assert slow_nodes(spec, Stragglers("job", 2, 0.1, {0: 0.5}), 0.5) == {}
    assert slow_nodes(_start(nodes=3).spec(), Stragglers("job", 3, 0.1, {0: 0.5}), 0.5) == {"n1": 0.5}


def test_straggler_without_spare_does_not_block_another() -> None:
    """Blocks of two nodes within a rack; the only spare is in the second one's rack."""
    fleet = CoreFleet(msgspec.structs.replace(POLICY, straggler_share=0.5))
    for number in range(1, 6):
        fleet.register(f"n{number}", domain=Domain(rack="r0" if number < 3 else "r1"))
        fleet.beat(f"n{number}")
    shape = {"min_nodes": 2, "max_nodes": 4, "block_nodes": 2, "block_within": "rack", "nproc_per_node": 2}
    fleet.join("n1", "n2", "n3", "n4", **shape)
    fleet.resume()
    fleet.join("n5", **shape)
    _run(fleet, 20.0, n1=0.06, n4=0.06)
    assert fleet.seats() == ["n1", "n2", "n3", "n5"]
    assert list(fleet.job().membership.replaced_stragglers) == ["n4"]

"""Witness reports about a silent node shorten the wait for it, and decide nothing else."""

from __future__ import annotations

import pytest

from everstep.vocabulary import JobState, NodeState
from everstep_controller.core.events import DatabaseAvailabilityChanged
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, generations, logged_sentences


def _running(nodes: int = 4) -> CoreFleet:
    """A job whose nodes beat once a second, and did so for a while."""
    fleet = CoreFleet()
    fleet.start(nodes)
    fleet.advance(4.5, *[f"n{i + 1}" for i in range(nodes)])
    return fleet


@pytest.mark.promise("heard-is-alive")
def test_heartbeats_outweigh_any_number_of_lost_vaults() -> None:
    fleet = _running()
    for _ in range(10):
        for node in ("n1", "n2", "n3"):
            fleet.lose_peer(node, "n4")
        fleet.advance(1.0, "n1", "n2", "n3", "n4")
    assert fleet.node_state("n4") is NodeState.HEALTHY
    assert fleet.spec().number == 1


def test_two_peer_reports_shorten_the_wait_for_silent_node() -> None:
    fleet = _running()
    fleet.lose_peer("n1", "n4")
    fleet.lose_peer("n2", "n4")
    effects = fleet.advance(1.8, "n1", "n2", "n3")
    assert "n4 has sent no message for" in logged_sentences(effects, "node.suspect")[0]
    (spec,) = generations(effects)
    assert "n4 is silent, and the vaults on n1, n2 cannot reach its vault" in spec.sentence
    assert fleet.node_state("n4") is NodeState.SUSPECT


def test_peer_reports_before_a_heartbeat_are_void() -> None:
    fleet = _running()
    fleet.lose_peer("n1", "n4")
    fleet.lose_peer("n2", "n4")
    fleet.advance(0.5)
    fleet.touch("n4")
    assert generations(fleet.advance(2.0, "n1", "n2", "n3")) == []
    assert fleet.node_state("n4") is NodeState.HEALTHY


def test_peer_loss_outside_the_job_is_ignored() -> None:
    fleet = _running(3)
    fleet.register("n9")
    fleet.lose_peer("n1", "n9")
    fleet.lose_peer("n1", "n1")
    fleet.lose_peer("n1", "n77")
    assert fleet.state.counts.ignored["peer_connection_lost.not_a_member"] == 3


def test_earlier_reports_do_not_blame_a_restarted_node() -> None:
    fleet = _running()
    fleet.disconnect("n4")
    fleet.lose_peer("n1", "n4")
    fleet.register("n4")
    fleet.join("n4", again=True, generation=1)
    assert generations(fleet.advance(3.0, "n1", "n2", "n3", "n4")) == []


def test_rejoin_window_delays_regroup_for_unseen_members() -> None:
    fleet = _running()
    fleet.restart()
    fleet.mark_seen("n1")
    assert generations(fleet.lose_rank(0)) == []
    effects = [effect for node in ("n2", "n3", "n4") for effect in fleet.mark_seen(node)]
    effects += fleet.advance(0.01)
    (spec,) = generations(effects)
    assert spec.seats == ("n1", "n2", "n3", "n4")
    assert spec.reason == "rank_lost"


def test_member_unseen_after_rejoin_window_is_dropped() -> None:
    fleet = _running()
    fleet.restart()
    fleet.mark_seen("n1", "n2", "n3")
    fleet.lose_rank(0)
    (spec,) = generations(fleet.advance(1.1, "n1", "n2", "n3"))
    assert spec.seats == ("n1", "n2", "n3")
    assert "n4 has sent nothing since this controller started, and rank 0 on n1 lost" in spec.sentence
    assert fleet.node_state("n4") is NodeState.HEALTHY


@pytest.mark.promise("failover-rejoin")
def test_rejoin_window_extends_while_members_return() -> None:
    fleet = CoreFleet()
    fleet.start(10, 1)
    fleet.restart()
    fleet.mark_seen("n1")
    fleet.lose_rank(0)
    seen = ["n1"]
    for number in range(2, 11):
        assert generations(fleet.advance(0.4, *seen)) == []
        seen.append(f"n{number}")
        effects = fleet.mark_seen(seen[-1])
    (spec,) = generations([*effects, *fleet.advance(0.01)])
    assert spec.world_size == 10


def test_rejoin_window_ends_at_its_maximum() -> None:
    fleet = CoreFleet(CorePolicy.lab_preset().with_values(liveness={"rejoin_window_max_s": 2.0}))
    fleet.start(10, 1)
    fleet.restart()
    fleet.mark_seen("n1")
    fleet.lose_rank(0)
    came = fleet.now
    seen = ["n1"]
    while not (specs := generations(fleet.advance(0.4, *seen))):
        seen.append(f"n{len(seen) + 1}")
        fleet.mark_seen(seen[-1])
    assert specs[0].seats == tuple(seen)
    assert fleet.now - came == pytest.approx(2.0)


@pytest.mark.promise("controller-pause")
def test_restarted_controller_without_regroup_waits_normally() -> None:
    fleet = _running()
    fleet.restart()
    for node in ("n1", "n2", "n3"):
        fleet.mark_seen(node)
    assert generations(fleet.advance(4.0, "n1", "n2", "n3")) == []
    assert len(generations(fleet.advance(4.0, "n1", "n2", "n3"))) == 1
    assert fleet.node_state("n4") is NodeState.LOST


@pytest.mark.promise("database-outage")
def test_database_outage_does_not_stop_loss_and_regroup() -> None:
    fleet = _running()
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="it does not answer"))
    fleet.disconnect("n4")
    assert len(generations(fleet.advance(1.2, "n1", "n2", "n3"))) == 1
    assert fleet.node_state("n4") is NodeState.LOST
    assert fleet.job_state() is JobState.RUNNING


def test_seen_node_stays_in_roster_despite_lost_vault() -> None:
    fleet = _running()
    fleet.disconnect("n4")
    fleet.lose_peer("n1", "n3")
    fleet.fail_collective(0)
    assert fleet.seats() == ["n1", "n2", "n3"]

"""What others say of a silent node shortens the wait for it, and never more than that."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from everstep_controller.core.events import DatabaseAvailabilityChanged, Tick
from everstep_controller.core.jobs import generations as rosters
from everstep_controller.core.jobs.membership import next_seats
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import JobRecord
from everstep_controller.core.state import FleetState

from everstep.vocabulary import JobState, NodeState
from tests.support.core_fleet import CoreFleet, audits, generations

LAB = CorePolicy.lab_preset()


def _running(nodes: int = 4) -> CoreFleet:
    """A job whose nodes beat once a second, and did so for a while."""
    fleet = CoreFleet()
    fleet.start(nodes)
    fleet.advance(4.5, *[f"n{i + 1}" for i in range(nodes)])
    return fleet


def test_disconnect_and_lost_vault_confirm_loss() -> None:
    fleet = _running()
    fleet.disconnect("n4")
    fleet.lose_peer("n1", "n4")
    (spec,) = generations(fleet.advance(0.2, "n1", "n2", "n3"))
    assert spec.seats == ("n1", "n2", "n3")
    assert "n4 closed its connection, and the vault on n1 cannot reach its vault" in spec.sentence


def test_single_lost_vault_changes_nothing() -> None:
    fleet = _running()
    fleet.lose_peer("n1", "n4")
    assert generations(fleet.advance(1.9, "n1", "n2", "n3")) == []
    assert fleet.node_state("n4") is NodeState.HEALTHY


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
    assert "n4 has sent no message for" in audits(effects, "node.suspect")[0]
    (spec,) = generations(effects)
    assert "n4 is silent, and the vaults on n1, n2 cannot reach its vault" in spec.sentence
    assert fleet.node_state("n4") is NodeState.SUSPECT


def test_failed_collective_and_lost_vault_shorten_the_wait() -> None:
    fleet = _running()
    fleet.lose_peer("n1", "n4")
    fleet.fail_collective(0)
    effects = fleet.advance(1.8, "n1", "n2", "n3")
    assert [spec.seats for spec in generations(effects)][-1] == ("n1", "n2", "n3")


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
    assert fleet.state.ignored_counts["peer_connection_lost.not_a_member"] == 3


def test_restarted_node_is_not_accused_by_earlier_reports() -> None:
    fleet = _running()
    fleet.disconnect("n4")
    fleet.lose_peer("n1", "n4")
    fleet.register("n4")
    fleet.join("n4", again=True, generation=1)
    assert generations(fleet.advance(3.0, "n1", "n2", "n3", "n4")) == []


# --- after the controller's own start ----------------------------------------------------------------------------


def test_rejoin_window_delays_regroup_for_unseen_members() -> None:
    fleet = _running()
    fleet.restart()
    fleet.hear("n1")
    assert generations(fleet.lose_rank(0)) == []
    effects = [effect for node in ("n2", "n3", "n4") for effect in fleet.hear(node)]
    effects += fleet.advance(0.01)
    (spec,) = generations(effects)
    assert spec.seats == ("n1", "n2", "n3", "n4")
    assert spec.reason == "rank_lost"


def test_member_unseen_after_rejoin_window_is_dropped() -> None:
    fleet = _running()
    fleet.restart()
    fleet.hear("n1", "n2", "n3")
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
    fleet.hear("n1")
    fleet.lose_rank(0)
    heard = ["n1"]
    for number in range(2, 11):
        assert generations(fleet.advance(0.4, *heard)) == []
        heard.append(f"n{number}")
        effects = fleet.hear(heard[-1])
    (spec,) = generations([*effects, *fleet.advance(0.01)])
    assert spec.world_size == 10


def test_rejoin_window_ends_at_its_maximum() -> None:
    fleet = CoreFleet(msgspec.structs.replace(CorePolicy.lab_preset(), rejoin_window_max_s=2.0))
    fleet.start(10, 1)
    fleet.restart()
    fleet.hear("n1")
    fleet.lose_rank(0)
    came = fleet.now
    heard = ["n1"]
    while not (specs := generations(fleet.advance(0.4, *heard))):
        heard.append(f"n{len(heard) + 1}")
        fleet.hear(heard[-1])
    assert specs[0].seats == tuple(heard)
    assert fleet.now - came == pytest.approx(2.0)


def test_unseen_spare_is_offered_once_seen() -> None:
    fleet = CoreFleet()
    fleet.start(2, 1)
    fleet.restart()
    fleet.hear("n1")
    fleet.hear("n2")
    fleet.leave("n2")
    assert fleet.seats() == ["n1"]
    fleet.resume()
    fleet.advance(1.5, "n1")
    fleet.hear("n3")
    fleet.advance(0.1, "n1", "n3")
    assert fleet.seats() == ["n1", "n3"]


def test_growth_is_checked_once_for_all_returning_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look takes as long as the job has nodes: one for each of them would hold up the whole fleet."""
    looks: list[str] = []

    def looking(state: FleetState, job: JobRecord, *given: Any) -> list[str]:
        looks.append(job.job)
        return next_seats(state, job, *given)

    fleet = CoreFleet()
    nodes = [f"n{i + 1}" for i in range(8)]
    fleet.register(*nodes)
    for node in nodes:
        fleet.beat(node)
    fleet.join(*nodes, min_nodes=4, max_nodes=10, join_wait_s=1.0)
    fleet.advance(2.0, *nodes)
    fleet.resume()
    fleet.restart()
    monkeypatch.setattr(rosters, "next_seats", looking)
    for node in nodes:
        fleet.hear(node)
    assert looks == []
    fleet.advance(0.01, *nodes)
    assert looks == ["job"]


@pytest.mark.promise("controller-pause")
def test_restarted_controller_without_regroup_waits_normally() -> None:
    fleet = _running()
    fleet.restart()
    for node in ("n1", "n2", "n3"):
        fleet.hear(node)
    assert generations(fleet.advance(4.0, "n1", "n2", "n3")) == []
    assert len(generations(fleet.advance(4.0, "n1", "n2", "n3"))) == 1
    assert fleet.node_state("n4") is NodeState.LOST


# --- many at once ------------------------------------------------------------------------------------------------


def test_simultaneous_losses_cause_one_regroup() -> None:
    fleet = _running(9)
    for node in ("n8", "n9"):
        fleet.disconnect(node)
    (spec,) = generations(fleet.advance(1.2, *[f"n{i}" for i in range(1, 8)]))
    assert len(spec.seats) == 7
    assert spec.sentence.startswith("n8, n9 are lost (n8 did not reconnect within")


def test_successive_losses_are_gathered_in_one_regroup() -> None:
    fleet = _running(9)
    fleet.disconnect("n9")
    fleet.fail_collective(0)
    opened = 0
    for node in ("n5", "n6", "n7", "n8"):
        fleet.now += 0.01
        fleet.disconnect(node)
        opened += len(generations(fleet.advance(0.02, "n1", "n2", "n3", "n4")))
    opened += len(generations(fleet.advance(0.5, "n1", "n2", "n3", "n4")))
    assert fleet.seats() == ["n1", "n2", "n3", "n4"]
    assert opened <= 2


@pytest.mark.promise("database-outage")
def test_database_outage_does_not_stop_loss_and_regroup() -> None:
    fleet = _running()
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="it does not answer"))
    fleet.disconnect("n4")
    assert len(generations(fleet.advance(1.2, "n1", "n2", "n3"))) == 1
    assert fleet.node_state("n4") is NodeState.LOST
    assert fleet.job_state() is JobState.RUNNING


def test_tick_handles_missed_heartbeats_before_roster_choice() -> None:
    fleet = CoreFleet()
    fleet.start(3, spares=1)
    fleet.advance(4.5, "n1", "n2", "n3", "n4")
    silent_s = 1.5
    fleet.advance(silent_s, "n1", "n2", "n3")
    assert fleet.node_state("n4") is NodeState.HEALTHY
    fleet.disconnect("n3")
    fleet.lose_peer("n1", "n3")
    fleet.touch("n1")
    fleet.touch("n2")
    fleet.now += 0.9
    (spec,) = generations(fleet.feed(Tick(trace=fleet.trace())))
    assert fleet.node_state("n4") is NodeState.SUSPECT
    assert spec.seats == ("n1", "n2")


def test_seen_node_stays_in_roster_despite_lost_vault() -> None:
    fleet = _running()
    fleet.disconnect("n4")
    fleet.lose_peer("n1", "n3")
    fleet.fail_collective(0)
    assert fleet.seats() == ["n1", "n2", "n3"]

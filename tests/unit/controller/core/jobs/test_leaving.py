"""A launcher that received a signal: its ranks end in their own time, and the newest version goes to storage."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.ids import Version
from everstep.vocabulary import JobState
from everstep.wire.v1.directives import KillRank, NewGeneration, SpillVersion, StopJob
from everstep.wire.v1.training import RankProgress, SpillPlan
from everstep.wire.v1.vault_reports import VersionSpilled
from everstep_controller.core.effects import Effect
from everstep_controller.core.jobs.leaving import GRACE_MARGIN_S
from everstep_controller.read_models.fleet_views import job_summary
from tests.support.fleet.core_fleet import STEP_S, CoreFleet, logged_sentences, sent

PLAN = SpillPlan(every_steps=1000, url="/store")
GRACE_S = 30.0


def committed(step: int = 50, nodes: int = 2, **spec: Any) -> CoreFleet:
    """A job of which a version is committed that is not due for storage."""
    fleet = CoreFleet()
    fleet.start(nodes, spill=PLAN, nproc_per_node=1, **spec)
    fleet.progress(step)
    fleet.state.job_runtime["job"].commits.candidate_step = step
    fleet.seal(step)
    assert not sent(fleet.effects, SpillVersion)
    return fleet


def disturbed(effects: list[Effect]) -> bool:
    return bool(sent(effects, KillRank) or sent(effects, NewGeneration))


def stored(fleet: CoreFleet, order: SpillVersion) -> None:
    """The version that was ordered is complete on storage."""
    report = VersionSpilled(
        job="job",
        at=fleet.now,
        version=order.version,
        attempt=order.attempt,
        url=f"{order.url}/step",
        bytes=1,
        complete=True,
    )
    fleet.report("n1", report)


@pytest.mark.promise("orderly-stop")
def test_newest_version_is_spilled_when_all_launchers_leave() -> None:
    fleet = committed(min_nodes=2)
    orders = sent(fleet.announce_leaving("n1", "n2"), SpillVersion)
    assert sorted(orders) == ["n1", "n2"]
    assert orders["n1"].version == Version(1, 50)
    assert orders["n1"].writers == {"n1": (0,), "n2": (1,)}


def test_leaving_ranks_are_neither_killed_nor_replaced() -> None:
    fleet = committed(min_nodes=2)
    fleet.announce_leaving("n1", "n2")
    effects = [*fleet.fail_collective(0), *fleet.stall(1), *fleet.unresponsive(0)]
    fleet.lose_rank(1)
    effects += fleet.advance(GRACE_S - 1, "n1", "n2")
    assert fleet.job_state() is JobState.RUNNING
    assert not disturbed(effects)


def test_ranks_returning_on_a_signal_pause_the_job() -> None:
    fleet = committed(min_nodes=2)
    order = sent(fleet.announce_leaving("n1", "n2"), SpillVersion)["n1"]
    before = len(fleet.effects)
    fleet.finish()
    effects = fleet.effects[before:]
    stops = sent(effects, StopJob)
    assert sorted(stops) == ["n1", "n2"]
    assert (stops["n1"].ok, stops["n1"].keeps_checkpoints) == (True, True)
    assert fleet.job_state() is JobState.PAUSED
    assert "SIGTERM" in fleet.job().status.sentence
    stored(fleet, order)
    assert [checkpoint.version for checkpoint in fleet.job().spills.stored] == [Version(1, 50)]
    fleet.announce_leaving("n1", "n2", ranks_ended=True)
    effects = [*fleet.leave("n1", orderly=True), *fleet.leave("n2", orderly=True)]
    assert not disturbed(effects)
    assert fleet.job_state() is JobState.PAUSED


def test_interrupted_job_shows_the_step_of_its_ranks() -> None:
    fleet = committed(min_nodes=2)  # the last heartbeat told of step 50
    fleet.announce_leaving("n1", "n2")
    fleet.finish(step=57)
    assert job_summary(fleet.state, fleet.job()).step == 57


def test_training_that_is_through_finishes_despite_the_signal() -> None:
    fleet = committed(min_nodes=2)
    for rank, node in enumerate(("n1", "n2")):
        fleet.touch(node, RankProgress(job="job", generation=1, rank=rank, step=9, step_s=STEP_S, until_step=9))
    order = sent(fleet.announce_leaving("n1", "n2"), SpillVersion)["n1"]
    fleet.finish()
    assert fleet.job_state() is JobState.RUNNING  # the newest version is on its way to storage
    stored(fleet, order)
    fleet.advance(1.0, "n1", "n2")
    assert fleet.job_state() is JobState.FINISHED


def test_job_goes_on_without_a_leaving_node_once_it_is_empty() -> None:
    fleet = committed(nodes=3, min_nodes=1)
    effects = fleet.announce_leaving("n2")
    assert not disturbed(effects)
    assert not sent(effects, SpillVersion)  # the job goes on, so nothing has to be saved in a hurry
    assert not disturbed(fleet.fail_collective(0))
    effects = fleet.announce_leaving("n2", ranks_ended=True)
    assert sorted(fleet.seats()) == ["n1", "n3"]
    assert "n2 received SIGTERM" in fleet.spec().sentence
    assert not sent(effects, KillRank)


def test_leaving_launcher_that_never_ends_is_not_waited_for() -> None:
    fleet = committed(nodes=2, min_nodes=1)
    fleet.announce_leaving("n2")
    fleet.advance(GRACE_S + GRACE_MARGIN_S + 1, "n1", "n2")
    assert fleet.seats() == ["n1"]


def test_reconnected_leaving_launcher_gets_no_seat() -> None:
    fleet = committed(nodes=2, min_nodes=1)
    fleet.announce_leaving("n2")
    fleet.join("n2", again=True)
    fleet.announce_leaving("n2", ranks_ended=True)
    fleet.advance(60 * STEP_S, "n1", "n2")
    assert fleet.seats() == ["n1"]


def test_notice_only_saves_the_newest_version() -> None:
    fleet = committed(min_nodes=2)
    effects = fleet.announce_leaving("n1", is_notice=True)
    assert sent(effects, SpillVersion)["n1"].version == Version(1, 50)
    assert logged_sentences(effects, "launcher.notified")
    fleet.lose_rank(0)
    assert fleet.spec().number == 2


def test_new_launchers_continue_an_interrupted_job() -> None:
    fleet = committed(min_nodes=2)
    fleet.announce_leaving("n1", "n2")
    fleet.finish()
    for node in ("n1", "n2"):
        fleet.leave(node, orderly=True)
    fleet.join("n1", "n2")
    assert fleet.job_state() is JobState.RUNNING
    assert fleet.spec().restore.floor == Version(1, 50)

"""What simulated worlds have found: take-overs in the middle of things, and nodes that come back while they compute."""

from __future__ import annotations

from everstep_controller.core.effects import Effect, PutVersion
from everstep_controller.core.events import DatabaseAvailabilityChanged, SchedulerStateChanged

from everstep.ids import Version
from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.directives import NewGeneration, StopJob
from tests.support.core_fleet import CoreFleet, audits, sent
from tests.support.findings import xid


def test_a_generation_whose_acknowledgements_an_earlier_controller_took_is_seen_to_step() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    fleet.restart()
    for step in (7, 8, 9):
        fleet.progress(step)
        fleet.advance(1.5, "n1", "n2", "n3")
        assert fleet.job().generation_resumed_at is None
    fleet.progress(10)
    fleet.advance(1.5, "n1", "n2", "n3")
    assert fleet.job().generation_resumed_at is not None


def test_a_generation_that_committed_before_all_said_that_they_step_commits_nothing_unannounced_after_it() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    fleet.progress(7)
    assert _committed(fleet.seal(7)) == [Version(2, 7)]
    fleet.restart()
    assert _committed(fleet.seal(8)) == [], "ranks may have been told of another one"


def test_so_does_one_that_stepped_and_may_have_been_told_of_a_version_that_not_all_kept() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    fleet.resume(step=6)
    assert _committed(fleet.seal(7, commit_candidate=False)) == []
    fleet.restart()
    assert _committed(fleet.seal(8)) == []


def test_of_a_generation_that_has_neither_stepped_nor_committed_the_first_version_is_committed_by_who_takes_over() -> (
    None
):
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    fleet.restart()
    assert _committed(fleet.seal(7)) == [Version(2, 7)]


def _committed(effects: list[Effect]) -> list[Version]:
    return [effect.doc.version for effect in effects if isinstance(effect, PutVersion)]


def test_steps_with_which_ranks_enter_and_to_which_they_are_set_back_are_none_of_a_generation() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    fleet.restart()
    for steps in ((0, 62, 64), (62, 62, 62), (63, 63, 63)):
        for rank, step in enumerate(steps):
            fleet.progress_of(rank, step)
            fleet.advance(1.5, "n1", "n2", "n3")
            assert fleet.job().generation_resumed_at is None


def test_a_generation_of_its_own_counts_as_resumed_by_acknowledgements_alone() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    for step in (7, 8, 9):
        fleet.progress(step)
        fleet.advance(1.5, "n1", "n2", "n3")
    assert fleet.job().generation_resumed_at is None


def test_a_node_that_was_only_held_and_falls_ill_on_its_way_back_leaves_its_job() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.feed(SchedulerStateChanged(node="n2", cordoned_by="somebody", reason="a disk"))
    fleet.feed(SchedulerStateChanged(node="n2"))
    assert fleet.node_state("n2") is NodeState.PROBATION
    assert "n2" in fleet.seats()
    fleet.raise_finding("n2", xid())
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    assert fleet.seats() == ["n1", "n3"]


def test_a_quarantine_that_was_served_while_its_node_was_away_ends_when_it_is_back() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.raise_finding("n2", xid())
    fleet.clear_finding("n2", xid().key)
    fleet.disconnect("n2")
    fleet.advance(60.0, "n1", "n3")
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    fleet.hear("n2")
    fleet.advance(0.5, "n1", "n2", "n3")
    assert fleet.node_state("n2") is NodeState.PROBATION


def test_a_boundary_that_was_not_written_is_kept_from_everybody_until_the_database_is_back() -> None:
    fleet = CoreFleet()
    fleet.start(4, 1)
    fleet.seal(5)
    fleet.raise_finding("n2", xid())
    assert (fleet.spec().number, fleet.running().number) == (2, 1)
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="the disk is full", unsent_jobs=("job",)))
    before = len(fleet.effects)
    fleet.join("n1", again=True)
    assert sent(fleet.effects[before:], NewGeneration)["n1"].spec.number == 1
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=False))
    before = len(fleet.effects)
    fleet.join("n1", again=True)
    assert sent(fleet.effects[before:], NewGeneration)["n1"].spec.number == 2


def test_a_controller_that_has_just_begun_holds_no_silence_of_before_against_anybody() -> None:
    fleet = CoreFleet()
    fleet.start(4)
    fleet.stop_controller(3600.0)
    fleet.restart()
    effects = fleet.advance(0.9)
    assert {fleet.node_state(node) for node in fleet.state.nodes} == {NodeState.HEALTHY}
    assert audits(effects, "node.suspect") == audits(effects, "node.lost") == []


def test_what_an_earlier_run_of_the_job_committed_is_no_version_of_this_one_after_a_restart() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.seal(4)
    fleet.finish()
    fleet.now += 1.0
    fleet.launchers["job", "n1"] = fleet.launchers["job", "n2"] = int(fleet.now * 1000)
    fleet.join("n1", "n2", min_nodes=1, max_nodes=2)
    assert fleet.job_state() is JobState.RUNNING
    fleet.restart()
    assert fleet.state.job_runtime["job"].committed_version is None
    fleet.hear("n1", "n2")
    fleet.lose_rank(0)
    assert fleet.spec().restore.from_scratch


def test_a_seal_from_before_what_is_committed_counts_for_nothing_after_a_restart_either() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.seal(4)
    fleet.restart()
    fleet.seal(3)
    live = fleet.state.job_runtime["job"]
    assert (live.committed_version, live.settled_version, live.verified_version) == (
        Version(1, 4),
        Version(1, 4),
        Version(1, 4),
    )


def test_a_launcher_that_comes_while_the_end_of_its_job_waits_for_the_database_is_told_of_the_end() -> None:
    """Nobody could hear of it yet, so it is one of those that wait, and begins nothing anew."""
    fleet = CoreFleet()
    fleet.start(2)
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="full", trace=fleet.trace()))
    fleet.finish(0, 1)
    fleet.advance(5.0, "n1", "n2")
    before = len(fleet.effects)
    fleet.launchers["job", "n2"] = int(1000 * fleet.now)
    fleet.join("n2")
    assert fleet.job_state() is JobState.FINISHED
    assert sent(fleet.effects[before:], StopJob)["n2"].ok

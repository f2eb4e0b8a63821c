"""What simulated worlds have found: take-overs in the middle of things, and nodes that come back while they compute."""

from __future__ import annotations

from everstep_controller.core.effects import Effect, PutVersion
from everstep_controller.core.events import DatabaseAvailabilityChanged, SchedulerStateChanged

from everstep.ids import Version
from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.directives import NewGeneration, StopJob
from tests.support.core_fleet import CoreFleet, audits, sent
from tests.support.findings import xid


def test_takeover_sees_a_generation_step_without_acks() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    fleet.restart()
    for step in (7, 8, 9):
        fleet.progress(step)
        fleet.advance(1.5, "n1", "n2", "n3")
        assert fleet.job().progress.resumed_at is None
    fleet.progress(10)
    fleet.advance(1.5, "n1", "n2", "n3")
    assert fleet.job().progress.resumed_at is not None


def test_takeover_commits_no_unannounced_version_after_a_commit() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    fleet.progress(7)
    assert _committed(fleet.seal(7)) == [Version(2, 7)]
    fleet.restart()
    assert _committed(fleet.seal(8)) == [], "ranks may have been told of another one"


def test_takeover_commits_no_unannounced_version_after_stepping() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    fleet.resume(step=6)
    assert _committed(fleet.seal(7, commit_candidate=False)) == []
    fleet.restart()
    assert _committed(fleet.seal(8)) == []


def test_takeover_commits_first_version_of_new_generation() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    fleet.restart()
    assert _committed(fleet.seal(7)) == [Version(2, 7)]


def _committed(effects: list[Effect]) -> list[Version]:
    return [effect.doc.version for effect in effects if isinstance(effect, PutVersion)]


def test_takeover_ignores_steps_from_entry_and_rollback() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    fleet.restart()
    for steps in ((0, 62, 64), (62, 62, 62), (63, 63, 63)):
        for rank, step in enumerate(steps):
            fleet.progress_of(rank, step)
            fleet.advance(1.5, "n1", "n2", "n3")
            assert fleet.job().progress.resumed_at is None


def test_own_generation_resumes_only_by_acknowledgements() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    for step in (7, 8, 9):
        fleet.progress(step)
        fleet.advance(1.5, "n1", "n2", "n3")
    assert fleet.job().progress.resumed_at is None


def test_released_node_with_new_finding_leaves_its_job() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.feed(SchedulerStateChanged(node="n2", cordoned_by="somebody", reason="a disk"))
    fleet.feed(SchedulerStateChanged(node="n2"))
    assert fleet.node_state("n2") is NodeState.PROBATION
    assert "n2" in fleet.seats()
    fleet.raise_finding("n2", xid())
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    assert fleet.seats() == ["n1", "n3"]


def test_expired_quarantine_ends_when_node_returns() -> None:
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


def test_unwritten_boundary_is_withheld_during_outage() -> None:
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


def test_restarted_controller_ignores_earlier_silence() -> None:
    fleet = CoreFleet()
    fleet.start(4)
    fleet.stop_controller(3600.0)
    fleet.restart()
    effects = fleet.advance(0.9)
    assert {fleet.node_state(node) for node in fleet.state.nodes} == {NodeState.HEALTHY}
    assert audits(effects, "node.suspect") == audits(effects, "node.lost") == []


def test_rerun_job_ignores_commits_of_previous_run() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.seal(4)
    fleet.finish()
    fleet.now += 1.0
    fleet.launchers["job", "n1"] = fleet.launchers["job", "n2"] = int(fleet.now * 1000)
    fleet.join("n1", "n2", min_nodes=1, max_nodes=2)
    assert fleet.job_state() is JobState.RUNNING
    fleet.restart()
    assert fleet.state.job_runtime["job"].commits.committed_version is None
    fleet.hear("n1", "n2")
    fleet.lose_rank(0)
    assert fleet.spec().restore.from_scratch


def test_seal_older_than_committed_version_is_ignored() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.seal(4)
    fleet.restart()
    fleet.seal(3)
    live = fleet.state.job_runtime["job"]
    assert (live.commits.committed_version, live.commits.settled_version, live.commits.verified_version) == (
        Version(1, 4),
        Version(1, 4),
        Version(1, 4),
    )


def test_launcher_joining_finished_job_in_outage_is_stopped() -> None:
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

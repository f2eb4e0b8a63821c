"""A job forms, grows, ends, and survives its controller."""

from __future__ import annotations

import pytest

from everstep.ids import Version
from everstep.vocabulary import JobState
from everstep.wire.v1.directives import StopJob
from everstep.wire.v1.training import RankLost, RankProgress, RestoreRule
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorAction
from everstep_controller.read_models.fleet_views import job_summary
from tests.support.fleet.core_fleet import CoreFleet, generations, logged_sentences, sent


def test_launcher_with_different_options_is_refused() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.register("n3")
    before = len(fleet.effects)
    fleet.join("n3", max_nodes=7)
    assert "start all launchers with the same options" in sent(fleet.effects[before:], StopJob)["n3"].reason
    assert "n3" not in fleet.job().membership.launchers


def _away(fleet: CoreFleet, away: bool = True) -> None:
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=away, reason="disk full", trace=fleet.trace()))


def test_job_forms_only_after_database_outage() -> None:
    fleet = CoreFleet()
    fleet.register("n1", "n2")
    _away(fleet)
    fleet.join("n1", "n2", max_nodes=2)
    fleet.advance(40.0, "n1", "n2")
    assert fleet.job_state() is JobState.FORMING
    _away(fleet, False)
    fleet.advance(0.1, "n1", "n2")
    assert fleet.seats() == ["n1", "n2"]


def test_database_outage_allows_resume_but_no_growth() -> None:
    fleet = CoreFleet()
    fleet.start(3, min_nodes=2)
    fleet.leave("n3")
    fleet.resume()
    _away(fleet)
    fleet.join("n3")
    fleet.advance(5.0, "n1", "n2", "n3")
    assert fleet.seats() == ["n1", "n2"]
    fleet.leave("n2")
    assert fleet.seats() == ["n1", "n3"], "a loss is made good at once"
    _away(fleet, False)


def test_nodes_not_entering_a_generation_are_dropped() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    for rank in (0, 1):
        fleet.progress_of(rank, 0)
    effects = fleet.advance(31.0, "n1", "n2", "n3")
    assert fleet.seats() == ["n1", "n2"]
    assert "n3 did not enter generation 2 in time" in generations(effects)[0].sentence


def test_slow_first_step_gets_more_time() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.lose_rank(0)
    fleet.progress(0)
    effects = fleet.advance(31.0, "n1", "n2")
    assert generations(effects) == []
    assert "not all have finished a step" in logged_sentences(effects, "generation.overdue")[0]


def test_launcher_leaving_after_its_ranks_finished_is_fine() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    fleet.finish(0)
    assert generations(fleet.leave("n1", orderly=True)) == []
    assert fleet.job_state() is JobState.RUNNING
    fleet.finish(1)
    assert fleet.job_state() is JobState.FINISHED


@pytest.mark.promise("deserted-job")
def test_job_end_reaches_node_without_launcher() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.leave("n2")
    fleet.resume()
    assert fleet.seats() == ["n1", "n3"]
    before = len(fleet.effects)
    fleet.finish()
    stopped = sent(fleet.effects[before:], StopJob)
    meant = {node: launcher.incarnation for node, launcher in fleet.state.jobs["job"].membership.launchers.items()}
    ended = int(fleet.state.jobs["job"].status.since * 1000)
    assert {node: body.launcher for node, body in stopped.items()} == meant | {"n2": ended}, "no launcher of a new run"


def test_rerun_job_starts_without_previous_limits() -> None:
    fleet = CoreFleet()
    fleet.start(4)
    fleet.order(OperatorAction.RESIZE_JOB, job="job", node_limit=2)
    fleet.resume(step=50)
    assert fleet.seats() == ["n1", "n2"]
    fleet.job().failures.digest_tie_times, fleet.job().membership.preempted_at = [fleet.now, fleet.now], fleet.now
    fleet.finish()
    fleet.advance(2.0, *fleet.state.nodes)
    for node in fleet.state.nodes:
        fleet.launchers["job", node] = int(fleet.now * 1000)
    fleet.join("n1", "n2", "n3", "n4", min_nodes=1, max_nodes=4)
    assert fleet.seats() == ["n1", "n2", "n3", "n4"]
    assert (
        fleet.job().membership.node_limit,
        fleet.job().failures.digest_tie_times,
        fleet.job().membership.preempted_at,
    ) == (None, [], 0.0)


@pytest.mark.parametrize("has_left", [False, True])
def test_job_is_run_again_by_a_node_whose_clock_is_behind(has_left: bool) -> None:
    fleet = CoreFleet()
    fleet.start(1, max_nodes=1)
    first = fleet.launchers["job", "n1"]
    fleet.advance(20.0, "n1")
    fleet.finish()
    if has_left:
        fleet.leave("n1", orderly=True)
    assert fleet.job_state() is JobState.FINISHED
    fleet.launchers["job", "n1"] = first + 1
    assert first + 1 < fleet.job().status.since * 1000
    before = len(fleet.effects)
    fleet.join("n1", min_nodes=1, max_nodes=1)
    assert sent(fleet.effects[before:], StopJob) == {}
    assert fleet.job_state() is not JobState.FINISHED


def test_stale_launcher_offer_is_ignored() -> None:
    fleet = CoreFleet()
    fleet.start(1, max_nodes=1)
    fleet.join("n1", min_nodes=1, max_nodes=1, nproc_per_node=2)
    now_asked = fleet.job().spec
    fleet.launchers["job", "n1"] = 0
    fleet.join("n1", min_nodes=1, max_nodes=1, nproc_per_node=1)
    assert fleet.job().spec == now_asked
    assert fleet.state.counts.ignored["launcher_joined.stale"] == 1


def test_stale_launcher_offer_with_other_shape_stops_no_job() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.leave("n2")
    fleet.join("n2")
    fleet.launchers["job", "n2"] = 0
    before = len(fleet.effects)
    fleet.join("n2", max_nodes=7)
    assert sent(fleet.effects[before:], StopJob) == {}


@pytest.mark.promise("restore-clean")
def test_controller_restart_keeps_restore_ceiling() -> None:
    fleet = CoreFleet()
    fleet.start(4, 1)
    fleet.seal(4)
    fleet.seal(5, digests=dict.fromkeys(range(4), ""))
    fleet.seal(6, digests={2: "bad"})
    fleet.restart()
    fleet.lose_rank(0)
    assert fleet.spec().restore == RestoreRule(floor=Version(1, 4), ceiling=Version(1, 4))


def test_controller_without_records_continues_above_generation() -> None:
    fleet = CoreFleet()
    fleet.register("n1", "n2")
    fleet.join("n1", "n2", generation=7, min_nodes=1, max_nodes=2)
    assert fleet.spec().number == 8
    assert fleet.spec().restore == RestoreRule()


@pytest.mark.parametrize(("started", "text"), [(4, "in step 4"), (3, "after step 3"), (None, "at step 3")])
def test_user_error_names_the_step_that_the_script_was_in(started: int | None, text: str) -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    fleet.raise_user_error(1, started=started)
    assert fleet.job().status.sentence == f"the training function raised on rank 1 (n2) {text}: ValueError: bad batch"


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (
            "its control group may use 2.0 GiB",
            "killed by the kernel for want of memory (OOM): its control group may use",
        ),
        ("", "signal 9"),
    ],
)
def test_lost_rank_names_a_kill_for_want_of_memory(memory: str, text: str) -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=1)
    lost = RankLost(
        job="job", at=fleet.now, generation=1, rank=1, local_rank=0, detail="", signal=9, out_of_memory=memory
    )
    (sentence,) = logged_sentences(fleet.report("n2", lost), "rank.lost")
    assert sentence.startswith(f"rank 1 on n2 lost ({text}")
    assert ("OOM" in sentence) == bool(memory)
    assert sentence in fleet.spec().sentence


def test_last_loss_is_that_of_the_last_step_of_the_lowest_rank() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    spec = fleet.spec()
    old = RankProgress(job="job", generation=spec.number, rank=0, step=7, step_s=0.1, loss=0.9)
    fleet.touch(spec.node_of(0), old)
    fleet.finish(1, started_step=9, losses={1: 0.21})
    assert job_summary(fleet.state, fleet.job()).loss == 0.9
    fleet.finish(0, started_step=9, losses={0: 0.2})
    assert fleet.job_state() is JobState.FINISHED
    assert job_summary(fleet.state, fleet.job()).loss == 0.2


NODES = ["n1", "n2", "n3", "n4"]


def _paused() -> CoreFleet:
    """A job of four nodes that needs them all, and has lost one."""
    fleet = CoreFleet()
    fleet.start(4, min_nodes=4)
    fleet.leave("n4")
    assert fleet.job_state() is JobState.PAUSED
    return fleet


def test_paused_job_reports_a_returned_node() -> None:
    fleet = _paused()
    fleet.leave("n3")
    fleet.leave("n2")
    fleet.advance(1.1, *NODES)
    assert "able to go on: n1; " in fleet.job().status.sentence
    fleet.join("n2", again=True, min_nodes=4, max_nodes=4)
    fleet.advance(1.1, *NODES)
    assert fleet.job_state() is JobState.PAUSED
    assert "able to go on: n1, n2; the job needs 4 nodes and is paused until 2 come back" in fleet.job().status.sentence


def test_paused_job_reports_a_lost_node() -> None:
    fleet = _paused()
    since = fleet.job().status.since
    fleet.advance(120.0, "n1", "n2", "n4")
    assert "able to go on: n1, n2; " in fleet.job().status.sentence
    assert fleet.job().status.since == since

"""A job forms, grows, ends, and survives its controller."""

from __future__ import annotations

import ast
import inspect
import itertools

import pytest
from everstep_controller.core import policy as policy_module
from everstep_controller.core.effects import PutJob
from everstep_controller.core.engine import HeartbeatResult
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorAction
from everstep_controller.read_models.fleet_views import job_summary

from everstep.ids import Version
from everstep.vocabulary import JobState
from everstep.wire.v1.directives import NewGeneration, StopJob, VersionNotice
from everstep.wire.v1.training import RankLost, RankProgress, RestoreRule
from tests.support.core_fleet import CoreFleet, audits, generations, sent

# --- forming -----------------------------------------------------------------------------------------------------


def test_job_forms_with_enough_nodes_after_join_wait() -> None:
    fleet = CoreFleet()
    fleet.register("n1", "n2", "n3")
    fleet.join("n1", "n2", min_nodes=2, max_nodes=3, join_wait_s=5.0)
    assert generations(fleet.advance(4.9, "n1", "n2", "n3")) == []
    assert len(generations(fleet.advance(0.2, "n1", "n2", "n3"))) == 1


def test_restarted_agent_receives_current_generation_once() -> None:
    """It has forgotten it, and a vault that it starts has to be told."""
    fleet = CoreFleet()
    fleet.start(2)
    fleet.register("n1")
    before = len(fleet.effects)
    fleet.join("n1", generation=1, again=True)
    assert sent(fleet.effects[before:], NewGeneration)["n1"].spec.number == 1
    before = len(fleet.effects)
    fleet.join("n1", generation=1, again=True)
    assert sent(fleet.effects[before:], NewGeneration) == {}, "only once in its life"


def test_launcher_with_different_options_is_refused() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.register("n3")
    before = len(fleet.effects)
    fleet.join("n3", max_nodes=7)
    assert "start all launchers with the same options" in sent(fleet.effects[before:], StopJob)["n3"].reason
    assert "n3" not in fleet.job().membership.launchers


# --- growth and size ---------------------------------------------------------------------------------------------


def test_rank_loss_during_growth_skips_boundary() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=1)
    fleet.leave("n2")
    fleet.resume()
    fleet.join("n2")
    fleet.advance(1.1, "n1", "n2")
    spec = generations(fleet.lose_rank(0))[0]
    assert (spec.number, spec.after_step) == (4, None)
    assert fleet.seats() == ["n1", "n2"]


def test_resize_shrinks_and_grows_the_job() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.seal(5)
    fleet.order(OperatorAction.RESIZE_JOB, job="job", node_limit=2)
    assert fleet.seats() == ["n1", "n2"]
    fleet.resume(step=30)
    fleet.advance(1.1, "n1", "n2", "n3")
    fleet.order(OperatorAction.RESIZE_JOB, job="job", node_limit=3)
    assert fleet.seats() == ["n1", "n2", "n3"]


def test_boundary_is_the_step_of_next_candidate() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=1)
    fleet.leave("n2")
    fleet.resume()
    fleet.join("n2")
    fleet.advance(0.95, "n1", "n2")
    fleet.progress(30)
    before = len(fleet.effects)
    fleet.seal(30)
    candidate = sent(fleet.effects[before:], VersionNotice)["n1"].candidate
    effects = fleet.advance(0.1, "n1", "n2")
    assert generations(effects)[0].after_step == candidate
    assert sent(effects, VersionNotice) == {}, "it is known already"


def test_boundary_beyond_candidate_is_announced_as_candidate() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=1)
    fleet.leave("n2")
    fleet.resume()
    fleet.progress(30)
    fleet.seal(30)
    fleet.progress(40)
    fleet.join("n2")
    effects = fleet.advance(1.1, "n1", "n2")
    notice = sent(effects, VersionNotice)["n1"]
    assert notice.candidate == generations(effects)[0].after_step
    assert (notice.generation, notice.committed) == (2, Version(2, 30)), "of the generation that still runs"


# --- the database is away ----------------------------------------------------------------------------------------


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


# --- resuming ----------------------------------------------------------------------------------------------------


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
    assert "not all have finished a step" in audits(effects, "generation.overdue")[0]


def test_generation_entered_by_no_rank_is_resent() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.lose_rank(0)
    effects = fleet.advance(31.0, "n1", "n2")
    assert generations(effects) == []
    assert set(sent(effects, NewGeneration)) == {"n1", "n2"}


def test_resume_deadline_is_capped_by_policy() -> None:
    """A wait that has doubled a thousand times is beyond any number."""
    fleet = CoreFleet()
    fleet.start(2)
    fleet.lose_rank(0)
    fleet.state.job_runtime["job"].resume.attempts = 2000
    assert audits(fleet.advance(31.0, "n1", "n2"), "generation.overdue")
    longest_s = fleet.policy.resume_deadline_max_s
    assert fleet.state.job_runtime["job"].resume.due <= fleet.now + longest_s
    fleet.lose_rank(0)
    assert fleet.state.job_runtime["job"].resume.due == fleet.now + longest_s


# --- ending ------------------------------------------------------------------------------------------------------


def test_job_finishes_when_all_ranks_have_finished() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.finish(0)
    assert fleet.job_state() is JobState.RUNNING
    before = len(fleet.effects)
    fleet.finish(1)
    assert fleet.job_state() is JobState.FINISHED
    assert {node: body.ok for node, body in sent(fleet.effects[before:], StopJob).items()} == {"n1": True, "n2": True}


def test_launcher_leaving_after_its_ranks_finished_is_fine() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    fleet.finish(0)
    assert generations(fleet.leave("n1", orderly=True)) == []
    assert fleet.job_state() is JobState.RUNNING
    fleet.finish(1)
    assert fleet.job_state() is JobState.FINISHED


def test_launcher_leaving_before_its_ranks_finished_pauses_job() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    fleet.finish(1)
    fleet.leave("n1", orderly=True)
    assert fleet.job_state() is JobState.PAUSED


@pytest.mark.promise("deserted-job")
def test_job_end_reaches_node_without_launcher() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.leave("n2")
    fleet.resume()
    assert fleet.seats() == ["n1", "n3"]
    before = len(fleet.effects)
    fleet.finish()
    told = sent(fleet.effects[before:], StopJob)
    meant = {node: launcher.incarnation for node, launcher in fleet.state.jobs["job"].membership.launchers.items()}
    ended = int(fleet.state.jobs["job"].status.since * 1000)
    assert {node: body.launcher for node, body in told.items()} == meant | {"n2": ended}, "no launcher of a new run"


def test_newer_launcher_reruns_job_with_higher_numbers() -> None:
    fleet = CoreFleet()
    fleet.start(1)
    fleet.seal(5)
    fleet.finish()
    fleet.launchers["job", "n1"] = int(fleet.now * 1000) + 1
    fleet.join("n1", min_nodes=1, max_nodes=1)
    assert fleet.job_state() is JobState.RUNNING
    assert fleet.spec().number == 2
    assert fleet.spec().restore == RestoreRule(from_scratch=True)


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


def test_stale_launcher_offer_is_ignored() -> None:
    fleet = CoreFleet()
    fleet.start(1, max_nodes=1)
    fleet.join("n1", min_nodes=1, max_nodes=1, nproc_per_node=2)
    now_asked = fleet.job().spec
    fleet.launchers["job", "n1"] = 0
    fleet.join("n1", min_nodes=1, max_nodes=1, nproc_per_node=1)
    assert fleet.job().spec == now_asked
    assert fleet.state.ignored_counts["launcher_joined.stale"] == 1


def test_stale_launcher_offer_with_other_shape_stops_no_job() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.leave("n2")
    fleet.join("n2")
    fleet.launchers["job", "n2"] = 0
    before = len(fleet.effects)
    fleet.join("n2", max_nodes=7)
    assert sent(fleet.effects[before:], StopJob) == {}


# --- the controller's own death ----------------------------------------------------------------------------------


def test_controller_restart_requests_findings_from_nodes() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.restart()
    assert fleet.touch("n1") is HeartbeatResult.UNKNOWN
    fleet.beat("n1")
    assert fleet.touch("n1") is HeartbeatResult.UNEVENTFUL


def test_controller_restart_before_boundary_falls_back() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    fleet.seal(5)
    fleet.order(OperatorAction.DRAIN, node="n2")
    fleet.restart()
    assert fleet.job().outgoing_generation is not None
    effects = fleet.advance(3.0, "n1", "n2", "n3", "n4")
    assert generations(effects)[0].after_step is None


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


# --- knobs -------------------------------------------------------------------------------------------------------


def test_every_policy_setting_is_documented() -> None:
    tree = ast.parse(inspect.getsource(policy_module))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(after, ast.Expr), f"{ast.unparse(field.target)} has no words on what it does"


def test_returning_node_does_not_rewrite_finished_jobs() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.resume()
    fleet.finish(0, 1)
    assert fleet.job_state() is JobState.FINISHED
    before = len(fleet.effects)
    fleet.register("n1")
    assert not [effect for effect in fleet.effects[before:] if isinstance(effect, PutJob)]
    assert fleet.state.node_runtime["n1"].launcher_rejoin_due is None


# --- what is said of an end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("started", "words"), [(4, "in step 4"), (3, "after step 3"), (None, "at step 3")])
def test_user_error_names_the_step_that_the_script_was_in(started: int | None, words: str) -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    fleet.raise_user_error(1, started=started)
    assert fleet.job().status.sentence == f"the training function raised on rank 1 (n2) {words}: ValueError: bad batch"


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (
            "its control group may use 2.0 GiB",
            "killed by the kernel for want of memory (OOM): its control group may use",
        ),
        ("", "signal 9"),
    ],
)
def test_lost_rank_names_a_kill_for_want_of_memory(memory: str, words: str) -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=1)
    lost = RankLost(
        job="job", at=fleet.now, generation=1, rank=1, local_rank=0, detail="", signal=9, out_of_memory=memory
    )
    (sentence,) = audits(fleet.report("n2", lost), "rank.lost")
    assert sentence.startswith(f"rank 1 on n2 lost ({words}")
    assert ("OOM" in sentence) == bool(memory)
    assert sentence in fleet.spec().sentence


def test_job_that_an_operator_ends_is_stopped() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    effects = fleet.order(OperatorAction.STOP_JOB, job="job")
    assert audits(effects, "job.stopped") == ["stopped by ada: because"]
    assert audits(effects, "job.failed") == []
    assert job_summary(fleet.state, fleet.job()).is_stopped
    assert all(not stop.ok for stop in sent(effects, StopJob).values())


def test_last_loss_is_that_of_the_last_step_of_the_lowest_rank() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    spec = fleet.spec()
    old = RankProgress(job="job", generation=spec.number, rank=0, step=7, step_s=0.1, loss=0.9)
    fleet.touch(spec.node_of(0), old)
    fleet.finish(1, begun=9, losses={1: 0.21})
    assert job_summary(fleet.state, fleet.job()).loss == 0.9
    fleet.finish(0, begun=9, losses={0: 0.2})
    assert fleet.job_state() is JobState.FINISHED
    assert job_summary(fleet.state, fleet.job()).loss == 0.2

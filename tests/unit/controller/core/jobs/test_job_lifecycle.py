"""A job forms, grows, ends, and survives its controller."""

from __future__ import annotations

import ast
import inspect
import itertools

import msgspec
import pytest
from everstep_controller.core import policy as policy_module
from everstep_controller.core.effects import PutJob
from everstep_controller.core.engine import HeartbeatResult
from everstep_controller.core.events import ControllerStarted, DatabaseAvailabilityChanged, OperatorAction
from everstep_controller.core.jobs.generations import NUMBERS_PER_EPOCH
from everstep_controller.core.policy import CorePolicy

from everstep.errors import ConfigurationError
from everstep.ids import Version
from everstep.vocabulary import JobState
from everstep.wire.v1.directives import NewGeneration, StopJob, VersionNotice
from everstep.wire.v1.training import RestoreRule
from tests.support.core_fleet import ENTROPY, CoreFleet, audits, generations, sent

# --- forming -----------------------------------------------------------------------------------------------------


def test_a_job_forms_when_all_nodes_have_joined() -> None:
    fleet = CoreFleet()
    fleet.register("n1", "n2")
    fleet.join("n1", min_nodes=1, max_nodes=2)
    assert fleet.job_state() is JobState.FORMING
    fleet.join("n2")
    assert fleet.seats() == ["n1", "n2"]
    assert fleet.spec().secret == ENTROPY


def test_enough_nodes_form_a_job_after_its_waiting_time() -> None:
    fleet = CoreFleet()
    fleet.register("n1", "n2", "n3")
    fleet.join("n1", "n2", min_nodes=2, max_nodes=3, join_wait_s=5.0)
    assert generations(fleet.advance(4.9, "n1", "n2", "n3")) == []
    assert len(generations(fleet.advance(0.2, "n1", "n2", "n3"))) == 1


def test_a_late_spare_is_told_the_generation_so_that_it_can_park() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.register("n3")
    before = len(fleet.effects)
    fleet.join("n3")
    assert sent(fleet.effects[before:], NewGeneration)["n3"].spec.number == 1


def test_a_restarted_agent_is_told_the_generation_that_its_ranks_are_in() -> None:
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


def test_launchers_must_ask_for_the_same() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.register("n3")
    before = len(fleet.effects)
    fleet.join("n3", max_nodes=7)
    assert "start all launchers with the same options" in sent(fleet.effects[before:], StopJob)["n3"].reason
    assert "n3" not in fleet.job().launchers


# --- growth and size ---------------------------------------------------------------------------------------------


def test_growth_waits_for_its_interval_and_for_a_boundary() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=1)
    fleet.leave("n2")
    fleet.resume()
    fleet.join("n2")
    assert fleet.seats() == ["n1"]
    effects = fleet.advance(1.1, "n1", "n2")
    assert generations(effects)[0].after_step is not None
    assert fleet.job().outgoing_generation is not None
    fleet.resume(restored=Version(2, 9), step=10)
    assert fleet.job().outgoing_generation is None
    assert fleet.seats() == ["n1", "n2"]


def test_a_growing_job_that_loses_a_rank_does_not_wait_for_the_boundary() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=1)
    fleet.leave("n2")
    fleet.resume()
    fleet.join("n2")
    fleet.advance(1.1, "n1", "n2")
    spec = generations(fleet.lose_rank(0))[0]
    assert (spec.number, spec.after_step) == (4, None)
    assert fleet.seats() == ["n1", "n2"]


def test_an_operator_bounds_a_job_and_frees_it_again() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.seal(5)
    fleet.order(OperatorAction.RESIZE_JOB, job="job", node_limit=2)
    assert fleet.seats() == ["n1", "n2"]
    fleet.resume(step=30)
    fleet.advance(1.1, "n1", "n2", "n3")
    fleet.order(OperatorAction.RESIZE_JOB, job="job", node_limit=3)
    assert fleet.seats() == ["n1", "n2", "n3"]


def test_the_boundary_is_the_step_of_the_version_that_is_committed_next() -> None:
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


def test_where_that_is_too_near_the_boundarys_own_version_is_announced_with_it() -> None:
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


def test_nodes_that_return_together_come_back_in_one_generation() -> None:
    fleet = CoreFleet()
    fleet.start(4, min_nodes=1)
    fleet.leave("n3")
    fleet.resume()
    fleet.leave("n4")
    fleet.resume()
    fleet.join("n3")
    fleet.advance(0.5, "n1", "n2", "n3", "n4")
    fleet.join("n4")
    grown = generations(fleet.advance(1.1, "n1", "n2", "n3", "n4"))
    assert [len(spec.seats) for spec in grown] == [4]


# --- the database is away ----------------------------------------------------------------------------------------


def _away(fleet: CoreFleet, away: bool = True) -> None:
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=away, reason="disk full", trace=fleet.trace()))


@pytest.mark.promise("generations-increase")
def test_a_running_job_regroups_while_the_database_is_away_under_numbers_that_no_other_controller_gives() -> None:
    fleet = CoreFleet()
    fleet.feed(ControllerStarted(epoch=3))
    fleet.start(3)
    _away(fleet)
    fleet.lose_rank(0)
    assert fleet.spec().number == 3 * NUMBERS_PER_EPOCH + 1
    fleet.lose_rank(0)
    assert fleet.spec().number == 3 * NUMBERS_PER_EPOCH + 2
    _away(fleet, False)
    fleet.lose_rank(0)
    assert fleet.spec().number == 3 * NUMBERS_PER_EPOCH + 3, "numbers never go back"


def test_a_controller_that_finds_ranks_ahead_of_its_records_goes_on_above_its_own_block() -> None:
    fleet = CoreFleet()
    fleet.feed(ControllerStarted(epoch=4))
    fleet.start(2)
    fleet.join("n1", generation=3 * NUMBERS_PER_EPOCH + 7, again=True)
    assert fleet.spec().number == 4 * NUMBERS_PER_EPOCH + 1
    assert "ahead of the records" in fleet.spec().sentence


def test_no_job_forms_while_the_database_is_away_and_it_does_when_it_is_back() -> None:
    fleet = CoreFleet()
    fleet.register("n1", "n2")
    _away(fleet)
    fleet.join("n1", "n2", max_nodes=2)
    fleet.advance(40.0, "n1", "n2")
    assert fleet.job_state() is JobState.FORMING
    _away(fleet, False)
    fleet.advance(0.1, "n1", "n2")
    assert fleet.seats() == ["n1", "n2"]


def test_a_paused_job_goes_on_but_no_job_grows_while_the_database_is_away() -> None:
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


def test_nodes_that_never_enter_a_generation_are_left_out() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    for rank in (0, 1):
        fleet.progress_of(rank, 0)
    effects = fleet.advance(31.0, "n1", "n2", "n3")
    assert fleet.seats() == ["n1", "n2"]
    assert "n3 did not enter generation 2 in time" in generations(effects)[0].sentence


def test_a_slow_first_step_is_given_more_time() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.lose_rank(0)
    fleet.progress(0)
    effects = fleet.advance(31.0, "n1", "n2")
    assert generations(effects) == []
    assert "not all have stepped" in audits(effects, "generation.overdue")[0]


def test_a_generation_nobody_entered_is_sent_once_more() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.lose_rank(0)
    effects = fleet.advance(31.0, "n1", "n2")
    assert generations(effects) == []
    assert set(sent(effects, NewGeneration)) == {"n1", "n2"}


def test_a_generation_that_does_not_resume_for_weeks_is_looked_at_as_often_as_at_first() -> None:
    """A wait that has doubled a thousand times is beyond any number."""
    fleet = CoreFleet()
    fleet.start(2)
    fleet.lose_rank(0)
    fleet.state.job_runtime["job"].resume_attempts = 2000
    assert audits(fleet.advance(31.0, "n1", "n2"), "generation.overdue")
    longest_s = fleet.policy.resume_deadline_max_s
    assert fleet.state.job_runtime["job"].resume_due <= fleet.now + longest_s
    fleet.lose_rank(0)
    assert fleet.state.job_runtime["job"].resume_due == fleet.now + longest_s


# --- ending ------------------------------------------------------------------------------------------------------


def test_a_job_is_finished_when_all_ranks_are() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.finish(0)
    assert fleet.job_state() is JobState.RUNNING
    before = len(fleet.effects)
    fleet.finish(1)
    assert fleet.job_state() is JobState.FINISHED
    assert {node: body.ok for node, body in sent(fleet.effects[before:], StopJob).items()} == {"n1": True, "n2": True}


def test_a_launcher_that_leaves_with_its_ranks_at_their_end_is_not_missed() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    fleet.finish(0)
    assert generations(fleet.leave("n1", orderly=True)) == []
    assert fleet.job_state() is JobState.RUNNING
    fleet.finish(1)
    assert fleet.job_state() is JobState.FINISHED


def test_one_that_leaves_before_its_ranks_are_at_their_end_is() -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    fleet.finish(1)
    fleet.leave("n1", orderly=True)
    assert fleet.job_state() is JobState.PAUSED


@pytest.mark.promise("deserted-job")
def test_a_node_that_a_launcher_has_left_is_told_of_the_end_as_well_since_its_vault_keeps_slots() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.leave("n2")
    fleet.resume()
    assert fleet.seats() == ["n1", "n3"]
    before = len(fleet.effects)
    fleet.finish()
    told = sent(fleet.effects[before:], StopJob)
    meant = {node: launcher.incarnation for node, launcher in fleet.state.jobs["job"].launchers.items()}
    ended = int(fleet.state.jobs["job"].since * 1000)
    assert {node: body.launcher for node, body in told.items()} == meant | {"n2": ended}, "no launcher of a new run"


def test_a_launcher_that_missed_the_end_is_told() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.finish()
    before = len(fleet.effects)
    fleet.join("n1", again=True, generation=1)
    assert sent(fleet.effects[before:], StopJob)["n1"].ok


def test_a_younger_launcher_runs_the_job_once_more_with_higher_numbers() -> None:
    fleet = CoreFleet()
    fleet.start(1)
    fleet.seal(5)
    fleet.finish()
    fleet.launchers["job", "n1"] = int(fleet.now * 1000) + 1
    fleet.join("n1", min_nodes=1, max_nodes=1)
    assert fleet.job_state() is JobState.RUNNING
    assert fleet.spec().number == 2
    assert fleet.spec().restore == RestoreRule(from_scratch=True)


def test_a_job_that_is_run_once_more_has_nothing_of_the_run_before_against_it() -> None:
    fleet = CoreFleet()
    fleet.start(4)
    fleet.order(OperatorAction.RESIZE_JOB, job="job", node_limit=2)
    fleet.resume(step=50)
    assert fleet.seats() == ["n1", "n2"]
    fleet.job().digest_tie_times, fleet.job().preempted_at = [fleet.now, fleet.now], fleet.now
    fleet.finish()
    fleet.advance(2.0, *fleet.state.nodes)
    for node in fleet.state.nodes:
        fleet.launchers["job", node] = int(fleet.now * 1000)
    fleet.join("n1", "n2", "n3", "n4", min_nodes=1, max_nodes=4)
    assert fleet.seats() == ["n1", "n2", "n3", "n4"]
    assert (fleet.job().node_limit, fleet.job().digest_tie_times, fleet.job().preempted_at) == (None, [], 0.0)


def test_an_offer_that_is_late_changes_nothing_of_the_job() -> None:
    fleet = CoreFleet()
    fleet.start(1, max_nodes=1)
    fleet.join("n1", min_nodes=1, max_nodes=1, nproc_per_node=2)
    now_asked = fleet.job().spec
    fleet.launchers["job", "n1"] = 0
    fleet.join("n1", min_nodes=1, max_nodes=1, nproc_per_node=1)
    assert fleet.job().spec == now_asked
    assert fleet.state.ignored_counts["launcher_joined.stale"] == 1


def test_a_late_offer_of_another_shape_stops_nobody() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.leave("n2")
    fleet.join("n2")
    fleet.launchers["job", "n2"] = 0
    before = len(fleet.effects)
    fleet.join("n2", max_nodes=7)
    assert sent(fleet.effects[before:], StopJob) == {}


# --- the controller's own death ----------------------------------------------------------------------------------


def test_a_restart_issues_nothing_and_forgets_nothing() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    fleet.seal(5)
    effects = fleet.restart()
    assert generations(effects) == []
    fleet.advance(20.0, "n1", "n2", "n3", "n4")
    assert fleet.spec().number == 1
    fleet.lose_rank(1)
    assert fleet.spec().restore == RestoreRule(floor=Version(1, 5))


def test_after_a_restart_nodes_are_asked_for_their_findings() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.restart()
    assert fleet.touch("n1") is HeartbeatResult.UNKNOWN
    fleet.beat("n1")
    assert fleet.touch("n1") is HeartbeatResult.UNEVENTFUL


def test_a_restart_before_a_boundary_still_ends_at_it_or_falls_back() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    fleet.seal(5)
    fleet.order(OperatorAction.DRAIN, node="n2")
    fleet.restart()
    assert fleet.job().outgoing_generation is not None
    effects = fleet.advance(3.0, "n1", "n2", "n3", "n4")
    assert generations(effects)[0].after_step is None


@pytest.mark.promise("restore-clean")
def test_a_restart_keeps_the_ceiling_above_which_nothing_is_restored() -> None:
    fleet = CoreFleet()
    fleet.start(4, 1)
    fleet.seal(4)
    fleet.seal(5, digests=dict.fromkeys(range(4), ""))
    fleet.seal(6, digests={2: "bad"})
    fleet.restart()
    fleet.lose_rank(0)
    assert fleet.spec().restore == RestoreRule(floor=Version(1, 4), ceiling=Version(1, 4))


def test_a_controller_without_records_goes_on_above_the_ranks_generation() -> None:
    fleet = CoreFleet()
    fleet.register("n1", "n2")
    fleet.join("n1", "n2", generation=7, min_nodes=1, max_nodes=2)
    assert fleet.spec().number == 8
    assert fleet.spec().restore == RestoreRule()


def test_a_launcher_that_is_behind_is_sent_the_current_generation() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.lose_rank(0)
    before = len(fleet.effects)
    fleet.join("n2", again=True, generation=1)
    assert sent(fleet.effects[before:], NewGeneration)["n2"].spec.number == 2


# --- knobs -------------------------------------------------------------------------------------------------------


def test_every_knob_is_documented() -> None:
    tree = ast.parse(inspect.getsource(policy_module))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(after, ast.Expr), f"{ast.unparse(field.target)} has no words on what it does"


@pytest.mark.parametrize(
    "wrong",
    [
        {"suspect_after_s": 30.0},
        {"disconnect_grace_s": 30.0},
        {"suspect_after_s": 0.5},
        {"eviction_share": 0.0},
        {"rank_flap_count": 0},
        {"growth_interval_s": -1.0},
        {"collective_settle_s": 9.0},
    ],
)
def test_contradictions_are_refused_with_the_mend(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        msgspec.structs.replace(CorePolicy(), **wrong).validate()


def test_an_exception_that_another_node_raised_before_is_not_tried_again() -> None:
    fleet = CoreFleet()
    fleet.start(2, max_user_retries=5)
    fleet.raise_user_error(1)
    fleet.resume()
    fleet.raise_user_error(1)
    assert fleet.job_state() is JobState.RUNNING, "it may be that node's own trouble"
    fleet.resume()
    fleet.raise_user_error(0)
    assert fleet.job_state() is JobState.FAILED
    assert "n2 raised the same before" in fleet.job().sentence


def test_a_node_that_comes_back_does_not_write_the_jobs_that_are_over() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.resume()
    fleet.finish(0, 1)
    assert fleet.job_state() is JobState.FINISHED
    before = len(fleet.effects)
    fleet.register("n1")
    assert not [effect for effect in fleet.effects[before:] if isinstance(effect, PutJob)]
    assert fleet.state.node_runtime["n1"].launcher_rejoin_due is None

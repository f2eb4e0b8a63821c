"""Versions on their way to storage: ordered when due, repeated until answered, abandoned if a share is lost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.errors import NotFound, StaleGeneration, Unavailable
from everstep.ids import Version
from everstep.vocabulary import JobState
from everstep.wire.v1.directives import SpillVersion, StopJob, VersionNotice
from everstep.wire.v1.training import EarlierRun, JobSpec, LauncherJoined, RankProgress, SpillPlan, StoredVersion
from everstep.wire.v1.vault_reports import VersionSpilled
from everstep_controller.core.effects import Effect
from everstep_controller.core.records import StoredCheckpoint
from tests.support.fleet.core_fleet import CoreFleet, logged_sentences, sent

PLAN = SpillPlan(every_steps=100, url="/store", keep_last=2)


def _fleet(nodes: int = 2, **spec: Any) -> CoreFleet:
    fleet = CoreFleet()
    fleet.start(nodes, spill=PLAN, nproc_per_node=1, **spec)
    return fleet


def _commit(fleet: CoreFleet, step: int, **options: Any) -> list[Effect]:
    """Seal the version after `step` as the candidate, which commits it."""
    live = fleet.state.job_runtime["job"]
    fleet.progress(step)
    live.commits.candidate_step = step
    return fleet.seal(step, **options)


def _answer(fleet: CoreFleet, node: str, order: SpillVersion, **fields: Any) -> list[Effect]:
    report = VersionSpilled(job="job", at=fleet.now, version=order.version, attempt=order.attempt)
    if "code" not in fields:
        report = msgspec.structs.replace(report, url=f"{order.url}/step", bytes=10)
    return fleet.report(node, msgspec.structs.replace(report, **fields))


def test_spill_is_ordered_at_commit_and_pins_the_version() -> None:
    fleet = _fleet()
    effects = _commit(fleet, 100)
    orders, notices = sent(effects, SpillVersion), sent(effects, VersionNotice)
    assert sorted(orders) == ["n1", "n2"]
    assert orders["n1"] == SpillVersion(
        job="job",
        generation=1,
        version=Version(1, 100),
        url="/store/job",
        writers={"n1": (0,), "n2": (1,)},
        keep_last=2,
    )
    assert notices["n1"].pinned == (Version(1, 100),)
    assert notices["n1"].committed == Version(1, 100)


def test_spill_waits_for_interval_and_previous_spill() -> None:
    fleet = _fleet()
    assert not sent(_commit(fleet, 99), SpillVersion)
    order = sent(_commit(fleet, 100), SpillVersion)["n1"]
    assert not sent(_commit(fleet, 250), SpillVersion)
    _answer(fleet, "n1", order)
    _answer(fleet, "n2", order, complete=True)
    assert fleet.job().spills.last_step == 100
    assert sent(_commit(fleet, 260), SpillVersion)["n1"].version == Version(1, 260)


@pytest.mark.promise("storage-checkpoints")
def test_checkpoint_is_stored_once_one_node_reports_whole() -> None:
    fleet = _fleet()
    order = sent(_commit(fleet, 100), SpillVersion)["n1"]
    _answer(fleet, "n1", order)
    assert fleet.job().spills.stored == []
    effects = _answer(fleet, "n2", order, complete=True, url="/store/job/step-00000100-g1")
    assert [(checkpoint.version, checkpoint.url) for checkpoint in fleet.job().spills.stored] == [
        (Version(1, 100), "/store/job/step-00000100-g1")
    ]
    assert fleet.job().spills.pending is None
    assert logged_sentences(effects, "spill.stored")
    later = _commit(fleet, 150)
    assert sent(later, VersionNotice)["n1"].pinned == ()


def test_checkpoints_missing_from_storage_are_forgotten() -> None:
    """The vault that removed the checkpoints was lost with its answer; the next stored checkpoint lists the rest."""
    fleet = _fleet()
    for step in (100, 200, 300):
        order = sent(_commit(fleet, step), SpillVersion)["n1"]
        left = ("step-200", "step-300") if step == 300 else ()
        _answer(fleet, "n1", order)
        _answer(fleet, "n2", order, complete=True, url=f"/store/job/step-{step}", remaining=left)
    assert [checkpoint.version.step for checkpoint in fleet.job().spills.stored] == [200, 300]


def test_spill_is_abandoned_after_repeated_unavailability() -> None:
    fleet = _fleet()
    order = sent(_commit(fleet, 100), SpillVersion)["n1"]
    for _ in range(fleet.policy.checkpoints.vault_order_failures - 1):
        _answer(fleet, "n1", order, code=Unavailable.code, message="no route to the store")
    assert fleet.job().spills.pending is not None
    effects = _answer(fleet, "n1", order, code=Unavailable.code, message="no route to the store")
    assert fleet.job().spills.pending is None
    assert fleet.job().spills.failed_versions == 1
    assert "no route to the store" in logged_sentences(effects, "spill.given_up")[0]


def test_spill_is_abandoned_when_storage_never_shows_all_parts() -> None:
    fleet = _fleet()
    order = sent(_commit(fleet, 100), SpillVersion)["n1"]
    for attempt in range(fleet.policy.checkpoints.vault_order_failures):
        assert fleet.job().spills.pending is not None
        again = msgspec.structs.replace(order, attempt=order.attempt + attempt)
        _answer(fleet, "n1", again)
        effects = _answer(fleet, "n2", again)
    assert fleet.job().spills.pending is None
    assert "not all parts are listed on storage" in logged_sentences(effects, "spill.given_up")[0]


def test_overwritten_share_ends_spill_and_delays_the_next() -> None:
    fleet = _fleet()
    order = sent(_commit(fleet, 100), SpillVersion)["n1"]
    _answer(fleet, "n2", order, code=NotFound.code, message="no sealed slot holds it")
    assert fleet.job().spills.pending is None
    assert not sent(_commit(fleet, 110), SpillVersion)
    fleet.advance(fleet.policy.checkpoints.vault_order_retry_s + 0.1, "n1", "n2")
    assert sent(_commit(fleet, 120), SpillVersion)


def test_spill_backoff_grows_with_each_failure() -> None:
    fleet = _fleet()
    waits = []
    for round_ in range(3):
        order = sent(_commit(fleet, 100 * (round_ + 1)), SpillVersion)["n1"]
        _answer(fleet, "n1", order, code=NotFound.code, message="gone")
        waits.append(fleet.job().spills.not_before - fleet.now)
        fleet.advance(waits[-1] + 0.1, "n1", "n2")
    assert waits[1] > waits[0]
    assert waits[2] > waits[1]


def test_stale_generation_answers_do_not_count_as_failures() -> None:
    fleet = _fleet()
    order = sent(_commit(fleet, 100), SpillVersion)["n1"]
    for _ in range(20):
        _answer(fleet, "n1", order, code=StaleGeneration.code, message="over")
    assert fleet.job().spills.pending is not None


def test_spill_assigns_shares_of_lost_node_to_replica_node() -> None:
    fleet = _fleet(4)
    order = sent(_commit(fleet, 100, copied=True), SpillVersion)["n1"]
    heir = fleet.spec().replica_nodes["n4"][0]
    _answer(fleet, heir, order)
    fleet.disconnect("n4")
    fleet.advance(30, "n1", "n2", "n3")
    assert "n4" not in fleet.state.liveness.reachable_nodes
    spilling = fleet.job().spills.pending
    assert spilling is not None
    assert "n4" not in spilling.writers
    assert 3 in spilling.writers[heir]
    assert heir not in fleet.state.job_runtime["job"].vault_orders.spilled_nodes


def test_spill_is_lost_with_the_only_holder_of_a_share() -> None:
    fleet = _fleet(4)
    _commit(fleet, 100)  # each node stores other parts, and no node holds all of them
    fleet.disconnect("n4")
    fleet.advance(30, "n1", "n2", "n3")
    assert fleet.job().spills.pending is None
    assert fleet.job().spills.failed_versions == 1


def test_corrupt_version_is_neither_spilled_nor_restored() -> None:
    fleet = _fleet(3, replicas=2)
    order = sent(_commit(fleet, 100), SpillVersion)["n1"]
    for node in ("n1", "n2", "n3"):
        _answer(fleet, node, order, complete=node == "n3", url="/store/job/a")
    assert fleet.spec().restore.storage_url == ""
    fleet.lose_rank(0)
    assert fleet.spec().restore.storage_url == "/store/job/a"
    fleet.resume(step=101)
    fleet.job().spills.stored[0] = type(fleet.job().spills.stored[0])(
        Version(2, 500), "/store/job/a", 1, fleet.now, fleet.now
    )
    fleet.seal(102, commit_candidate=False, digests={0: "d0", 1: "d0", 2: "liar"})
    assert fleet.job().spills.stored[0].maybe_corrupt
    assert fleet.spec().restore.storage_url == ""


def test_failed_job_resumes_from_storage_on_rerun() -> None:
    for ends_well in (True, False):
        fleet = _fleet()
        order = sent(_commit(fleet, 100), SpillVersion)["n1"]
        _answer(fleet, "n1", order)
        _answer(fleet, "n2", order, complete=True, url="/store/job/a")
        if ends_well:
            fleet.finish()
        else:
            fleet.raise_user_error(0)
        assert sent(fleet.effects, StopJob)
        fleet.advance(1.0, "n1", "n2")
        fleet.launchers = {key: int(fleet.now * 1000) + 5 for key in fleet.launchers}
        fleet.join("n1", "n2")
        assert fleet.job_state() is JobState.RUNNING
        rule = fleet.spec().restore
        assert rule.from_scratch
        assert rule.storage_url == ("" if ends_well else "/store/job/a")


@pytest.mark.promise("storage-choice")
def test_restore_rule_lists_earlier_unsuspected_checkpoints() -> None:
    fleet = _fleet(3, replicas=2)
    fleet.job().spills.stored = [
        StoredCheckpoint(Version(1, step), f"/store/job/{step}", 1, fleet.now, fleet.now, maybe_corrupt=step == 600)
        for step in range(100, 800, 100)
    ]
    fleet.lose_rank(0)
    rule = fleet.spec().restore
    assert rule.storage_url == "/store/job/700"
    assert rule.older_storage_urls == ("/store/job/500", "/store/job/400", "/store/job/300")


def test_job_without_spill_plan_unpins_versions() -> None:
    fleet = _fleet(1)
    _commit(fleet, 100)
    fleet.launchers = {key: life + 1 for key, life in fleet.launchers.items()}
    fleet.join("n1", spill=None, nproc_per_node=1)
    assert fleet.job().spills.pending is None
    assert fleet.spec().restore.pinned == ()


@pytest.mark.promise("storage-credentials")
def test_spill_url_with_credentials_is_refused() -> None:
    fleet = CoreFleet()
    fleet.register("n1")
    fleet.beat("n1")
    fleet.join("n1", spill=SpillPlan(every_steps=1, url="s3://AKIA:hunter2@bucket/x"))
    assert "job" not in fleet.state.jobs
    reason = sent(fleet.effects, StopJob)["n1"].reason
    assert "credentials" in reason
    assert "hunter2" not in reason


def _found(*steps: int, generation: int = 4, folder: str = "job", fresh: bool = False) -> EarlierRun:
    versions = (
        StoredVersion(version=Version(generation, step), url=f"/store/{folder}/step-{step}", written_at=float(step))
        for step in sorted(steps, reverse=True)
    )
    return EarlierRun(folder=folder, versions=tuple(versions), generation=generation if steps else 0, fresh=fresh)


def _join(fleet: CoreFleet, earlier: EarlierRun) -> None:
    if "n1" not in fleet.state.nodes:
        fleet.register("n1")
        fleet.beat("n1")
    fleet.launchers["job", "n1"] = life = fleet.launchers.get(("job", "n1"), 0) + 1
    spec = JobSpec(job="job", spill=PLAN)
    report = LauncherJoined(job="job", at=fleet.now, spec=spec, launcher=life, store="n1:8000", earlier=earlier)
    fleet.report("n1", report)


@pytest.mark.promise("resumed-by-default")
def test_new_job_continues_from_checkpoint_of_earlier_run() -> None:
    fleet = CoreFleet()
    _join(fleet, _found(100, 200))
    spec = fleet.spec()
    assert spec.number == 5, "the job must write to new folders, not to those of the earlier run"
    assert spec.restore.from_scratch
    assert (spec.restore.storage_url, spec.restore.older_storage_urls) == (
        "/store/job/step-200",
        ("/store/job/step-100",),
    )
    fleet.resume(step=101)  # the newest was damaged
    order = sent(_commit(fleet, 200), SpillVersion)["n1"]
    assert order.earlier == Version(4, 100)
    assert order.url == "/store/job"


def test_fresh_job_begins_anew_in_its_own_folder() -> None:
    fleet = CoreFleet()
    _join(fleet, _found(folder="job~2", fresh=True))
    assert fleet.spec().restore.storage_url == ""
    fleet.resume()
    assert sent(_commit(fleet, 100), SpillVersion)["n1"].url == "/store/job~2"


def test_fresh_launcher_does_not_continue_a_paused_job() -> None:
    fleet = CoreFleet()
    _join(fleet, _found())
    fleet.resume()
    _commit(fleet, 50)
    fleet.leave("n1", orderly=True)
    assert fleet.job_state() is JobState.PAUSED
    before = len(fleet.effects)
    _join(fleet, _found(folder="job~2", fresh=True))
    stop = sent(fleet.effects[before:], StopJob)["n1"]
    assert "everstep job stop job" in stop.reason
    assert fleet.job_state() is JobState.PAUSED


def test_finished_job_waits_for_its_last_version_on_storage() -> None:
    fleet = _fleet()
    _commit(fleet, 50)
    before = len(fleet.effects)
    fleet.finish()
    assert fleet.job_state() is JobState.RUNNING
    order = sent(fleet.effects[before:], SpillVersion)["n1"]
    assert order.version == Version(1, 50)
    _answer(fleet, "n1", order)
    _answer(fleet, "n2", order, complete=True)
    fleet.advance(1.0, "n1", "n2")
    assert fleet.job_state() is JobState.FINISHED
    assert [checkpoint.version for checkpoint in fleet.job().spills.stored] == [Version(1, 50)]


def test_last_step_is_the_candidate_for_the_last_commit() -> None:
    fleet = _fleet()
    _commit(fleet, 50)
    for rank, node in enumerate(("n1", "n2")):
        fleet.touch(node, RankProgress(job="job", generation=1, rank=rank, step=55, step_s=0.05, until_step=58))
    fleet.seal(50)
    live = fleet.state.job_runtime["job"]
    live.commits.candidate_step = 54
    fleet.seal(54)
    assert live.commits.candidate_step == 58

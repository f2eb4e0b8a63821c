"""What a node concludes from its connections: which generation holds, who speaks for it, which launchers there are."""

from __future__ import annotations

import msgspec
import pytest
from everstep_agent.jobs.registry import COUNTED_EVENTS

from everstep.errors import MalformedMessage
from everstep.ids import Version
from everstep.vocabulary import Finding, FindingKind, Severity
from everstep.wire.v1.directives import NewGeneration, StopJob, VersionNotice
from everstep.wire.v1.local import ConnectionRole, Goodbye, LauncherLost, RankHeartbeat, WrongProduct
from everstep.wire.v1.training import (
    CollectiveFailed,
    FindingRaised,
    LauncherJoined,
    LauncherLeaving,
    LauncherLeft,
    RankLost,
)
from tests.support.local_node import Node, exited, generation

# --- generations on their way -----------------------------------------------------------------------------------------


def test_registry_knows_the_snapshot_interval_by_job(node: Node) -> None:
    node.regroup(1, (0, "n1", 0), (1, "n1", 1))
    for rank, every in ((0, 2), (1, 3)):
        node.jobs.handle_message(
            node.rank(rank), RankHeartbeat(generation=1, rank=rank, step=1, step_s=0.1, snapshot_every=every)
        )
    assert node.jobs.snapshot_interval_steps() == {"j": 3}


def test_generation_reaches_vault_launcher_and_every_rank(node: Node) -> None:
    launcher, ranks = node.launcher(), [node.rank(0), node.rank(1)]
    node.regroup(1)
    assert [p.generations for p in (launcher, *ranks)] == [[1], [1], [1]]
    assert node.configured == [1]


def test_local_events_are_counted_from_zero(node: Node) -> None:
    assert node.jobs.event_counts["ranks_lost"] == 0
    assert set(node.jobs.event_counts) == set(COUNTED_EVENTS)
    node.regroup(1)
    node.regroup(1)
    assert set(node.jobs.event_counts) == set(COUNTED_EVENTS)


def test_late_rank_or_launcher_gets_the_newest_generation(node: Node) -> None:
    node.regroup(1)
    node.regroup(2)
    rank = node.rank(0)
    assert rank.generations == [2]
    assert node.launcher().generations == [2]


def test_an_older_or_repeated_generation_is_dropped_and_counted(node: Node) -> None:
    rank = node.rank(0)
    for number in (3, 3, 2):
        node.regroup(number)
    assert rank.generations == [3]
    assert node.jobs.event_counts["directives_stale"] == 2


def test_version_notice_goes_only_to_ranks(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    notice = VersionNotice(job="j", generation=1, committed=Version(1, 5), candidate=9)
    node.push(notice)
    assert rank.got(VersionNotice) == [notice]
    assert launcher.got(VersionNotice) == []


def test_restarted_agent_learns_generation_from_ticks(node: Node) -> None:
    rank = node.rank(0)
    node.tick(rank, 4, 0)
    node.regroup(3)
    node.regroup(4)
    assert rank.generations == []
    node.regroup(5)
    assert rank.generations == [5]


def test_reports_count_until_the_announced_boundary(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    node.push(NewGeneration(spec=msgspec.structs.replace(generation(2), after_step=9)))
    node.tick(rank, 1, 0, step=8)
    assert [(p.generation, p.step) for p in node.jobs.rank_progress()] == [(1, 8)]
    failed = CollectiveFailed(job="j", at=0.0, generation=1, rank=0, step=8, detail="reset by peer")
    node.jobs.handle_message(rank, failed)
    assert node.of(CollectiveFailed) == [failed]
    node.tick(rank, 2, 0)
    node.jobs.handle_message(rank, failed)
    assert node.jobs.event_counts["reports_stale"] == 1


def test_vault_takes_copies_until_the_announced_boundary(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    node.push(NewGeneration(spec=msgspec.structs.replace(generation(2), after_step=9)))
    node.tick(rank, 1, 0, step=9)
    assert node.configured == [1, 1]
    assert node.seals_from == {"j": 1}
    node.tick(rank, 2, 0)
    node.tick(rank, 2, 0)
    assert node.configured == [1, 1, 2]
    assert node.seals_from == {"j": 2}


def test_jobs_of_one_node_are_isolated(node: Node) -> None:
    mine, other = node.rank(0), node.rank(0, job="k")
    node.regroup(1)
    assert mine.generations == [1]
    assert other.sent == []


# --- fencing ----------------------------------------------------------------------------------------------------------


def test_a_report_of_an_older_generation_is_dropped_and_counted(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(2)
    for number in (1, 2, 3):
        node.jobs.handle_message(rank, CollectiveFailed(job="j", at=0.0, generation=number, rank=0, step=3, detail="x"))
    assert [r.generation for r in node.of(CollectiveFailed)] == [2, 3]
    assert node.jobs.event_counts["reports_stale"] == 1


def test_wrong_product_of_a_rank_is_kept_on_its_node(node: Node) -> None:
    product = WrongProduct(work="up", dtype="float32", rows=1, inner=1, columns=1, left=b"0000", right=b"0000")
    node.jobs.handle_message(node.rank(0), product)
    assert node.products == [product]
    with pytest.raises(MalformedMessage, match="a launcher may not send WrongProduct"):
        node.jobs.handle_message(node.launcher(), product)


def test_rank_reports_are_accepted_only_for_its_own_job(node: Node) -> None:
    rank = node.rank(0)
    with pytest.raises(MalformedMessage, match="may not send reports of job k"):
        node.jobs.handle_message(rank, CollectiveFailed(job="k", at=0.0, generation=1, rank=0, step=3, detail="x"))


def test_roles_may_send_only_their_messages(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    with pytest.raises(MalformedMessage, match="rank may not send"):
        node.jobs.handle_message(rank, exited(rank))
    with pytest.raises(MalformedMessage, match="launcher may not send"):
        node.jobs.handle_message(launcher, RankHeartbeat(generation=1, rank=0, step=1, step_s=0.1))
    with pytest.raises(MalformedMessage, match="local_rank"):
        node.peer(ConnectionRole.RANK, None)


def test_findings_of_ranks_are_passed_on(node: Node) -> None:
    raised = FindingRaised(
        finding=Finding(kind=FindingKind.SLOT_CORRUPT, subject="s", severity=Severity.WARNING, message="m"), job="j"
    )
    node.jobs.handle_message(node.rank(0), raised)
    assert node.findings == [raised]


def test_progress_is_taken_from_the_newest_generation(node: Node) -> None:
    old, new = node.rank(0), node.rank(1)
    node.regroup(2)
    node.tick(old, 1, 0, step=10)
    node.tick(new, 2, 1, step=11)
    assert [(p.generation, p.rank, p.step) for p in node.jobs.rank_progress()] == [(2, 1, 11)]


# --- launchers --------------------------------------------------------------------------------------------------------


def test_launcher_end_is_reported_to_controller_and_ranks(node: Node) -> None:
    launcher, rank = node.launcher(incarnation=5), node.rank(0)
    node.jobs.handle_disconnect(launcher, "its connection ended")
    (left,) = node.of(LauncherLeft)
    assert (left.launcher, left.orderly) == (5, False)
    assert len(rank.got(LauncherLost)) == 1


def test_launcher_goodbye_is_an_orderly_leave(node: Node) -> None:
    launcher = node.launcher()
    node.jobs.handle_message(launcher, Goodbye(detail="Ctrl-C"))
    node.jobs.handle_disconnect(launcher, "ended")
    assert [(left.orderly, left.detail) for left in node.of(LauncherLeft)] == [(True, "Ctrl-C")]


def test_offers_carry_the_generation_of_their_ranks(node: Node) -> None:
    node.launcher(incarnation=5)
    gone = node.launcher(incarnation=6, job="k")
    node.jobs.handle_disconnect(gone, "ended")
    node.tick(node.rank(0), 4, 0)
    assert [(o.launcher, o.generation) for o in node.jobs.launcher_offers()] == [(5, 4)]


def test_offer_carries_the_newest_pushed_generation(node: Node) -> None:
    node.launcher(incarnation=5)
    node.tick(node.rank(0), 4, 0)
    node.push(NewGeneration(spec=generation(1_000_001)))
    assert [offer.generation for offer in node.jobs.launcher_offers()] == [1_000_001]


def test_reconnecting_launcher_does_not_leave(node: Node) -> None:
    first = node.launcher(incarnation=5)
    node.launcher(incarnation=5)
    assert first.closed
    node.jobs.handle_disconnect(first, "ended")
    assert node.of(LauncherLeft) == []
    assert len(node.of(LauncherJoined)) == 2


def test_a_place_is_vacant_when_its_launcher_is_gone(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.rank(1)
    node.regroup(1)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    node.jobs.handle_disconnect(launcher, "ended")
    node.regroup(2)
    assert [(r.generation, r.rank, r.has_replacement) for r in node.of(RankLost)] == [(1, 0, True), (2, 0, False)]


# --- the end of a job -------------------------------------------------------------------------------------------------


def test_stopped_job_reports_no_rank_loss(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    stop = StopJob(job="j", ok=True, reason="done")
    node.push(stop)
    assert launcher.got(StopJob) == [stop]
    assert rank.got(StopJob) == [stop]
    assert node.forgotten == ["j"]
    node.jobs.handle_disconnect(rank, "ended")
    node.jobs.handle_disconnect(launcher, "ended")
    node.wait()
    assert node.of(RankLost) == []
    assert [left.orderly for left in node.of(LauncherLeft)] == [True]
    assert node.jobs.jobs == ()


def test_stop_of_an_earlier_run_spares_the_new_run(node: Node) -> None:
    node.launcher(incarnation=5)
    later = node.launcher(incarnation=6)
    node.push(StopJob(job="j", ok=True, reason="done", launcher=5))
    assert later.got(StopJob) == []
    assert node.forgotten == ["j"], "what the run before left in memory"
    stop = StopJob(job="j", ok=True, reason="done", launcher=6)
    node.push(stop)
    assert later.got(StopJob) == [stop]


def test_reconnecting_launcher_gets_the_missed_stop(node: Node) -> None:
    node.launcher(incarnation=5)
    rank = node.rank(0)
    node.push(StopJob(job="j", ok=True, reason="done"))
    again = node.launcher(incarnation=5)
    assert len(again.got(StopJob)) == 1
    assert rank.generations == []


def test_new_run_under_an_old_name_starts_fresh(node: Node) -> None:
    node.launcher(incarnation=5)
    old = node.rank(0)
    node.regroup(9)
    node.push(StopJob(job="j", ok=True, reason="done"))
    launcher = node.launcher(incarnation=6)
    assert launcher.got(StopJob) == []
    node.regroup(1)
    assert launcher.generations == [1]
    assert node.rank(0).generations == [1]
    node.jobs.handle_disconnect(old, "ended")
    node.wait()
    assert node.of(RankLost) == []


def test_memory_of_jobs_without_processes_is_bounded(node: Node) -> None:
    node.rank(0)
    for number in range(200):
        node.push(NewGeneration(spec=generation(1, job=f"job{number}")))
    assert len(node.jobs.jobs) <= 66
    assert any(job.name == "j" for job in node.jobs.jobs)


def test_ranks_of_unjoined_launcher_survive_the_earlier_stop(node: Node) -> None:
    """They are there before their launcher offers the node: the end, still on its way, is not theirs."""
    rank = node.rank(0)
    node.push(StopJob(job="j", ok=False, reason="nothing is whole", launcher=5))
    assert rank.got(StopJob) == []
    node.launcher(incarnation=6)
    assert [joined.launcher for joined in node.of(LauncherJoined)] == [6]
    node.regroup(1)
    assert rank.generations == [1]
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    assert [lost.generation for lost in node.of(RankLost)] == [1]


def test_stop_reaches_ranks_once_its_launcher_connects(node: Node) -> None:
    """The agent began anew, and has not seen its launcher again when the end comes."""
    rank = node.rank(0)
    stop = StopJob(job="j", ok=True, reason="done", launcher=5)
    node.push(stop)
    launcher = node.launcher(incarnation=5)
    assert (launcher.got(StopJob), rank.got(StopJob)) == ([stop], [stop])
    assert node.of(LauncherJoined) == []


def test_generation_of_a_stopped_run_is_not_offered_again(node: Node) -> None:
    old = node.launcher(incarnation=5)
    node.rank(0)
    node.regroup(9)
    node.jobs.handle_disconnect(old, "ended")
    node.push(StopJob(job="j", ok=False, reason="nothing is whole", launcher=5))
    rank, launcher = node.rank(0), node.launcher(incarnation=6)
    assert (rank.generations, launcher.generations) == ([], [])
    node.regroup(1)
    assert (rank.generations, launcher.generations) == ([1], [1])


def test_stopped_job_without_processes_is_forgotten(node: Node) -> None:
    node.regroup(9)
    node.push(StopJob(job="j", ok=True, reason="done"))
    assert node.rank(0).generations == []


def test_launcher_that_leaves_is_reported_to_the_controller(node: Node) -> None:
    launcher = node.launcher()
    leaving = LauncherLeaving(job="j", at=0.0, launcher=5, cause="SIGTERM", grace_s=30.0)
    node.jobs.handle_message(launcher, leaving)
    assert node.of(LauncherLeaving) == [leaving]


def test_stop_of_an_interrupted_job_keeps_its_slots(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    stop = StopJob(job="j", ok=True, reason="n1 received SIGTERM", keeps_checkpoints=True)
    node.push(stop)
    assert (launcher.got(StopJob), rank.got(StopJob)) == ([stop], [stop])
    assert node.forgotten == []

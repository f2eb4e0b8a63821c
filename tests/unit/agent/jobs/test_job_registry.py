"""A node's view of its jobs, derived from connections: current generation, rank processes and launchers."""

from __future__ import annotations

import msgspec
import pytest

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
from tests.support.agents.node_jobs import NodeJobs, exited, generation


def test_registry_knows_the_snapshot_interval_by_job(node: NodeJobs) -> None:
    node.regroup(1, (0, "n1", 0), (1, "n1", 1))
    for rank, every in ((0, 2), (1, 3)):
        node.jobs.handle_message(
            node.rank(rank), RankHeartbeat(generation=1, rank=rank, step=1, step_s=0.1, snapshot_every=every)
        )
    assert node.jobs.snapshot_interval_steps() == {"j": 3}
    assert [one.snapshot_every for one in node.jobs.rank_progress()] == [2, 3]


def test_late_rank_or_launcher_gets_the_newest_generation(node: NodeJobs) -> None:
    node.regroup(1)
    node.regroup(2)
    rank = node.rank(0)
    assert rank.generations == [2]
    assert node.launcher().generations == [2]


def test_older_or_repeated_generation_is_dropped_and_counted(node: NodeJobs) -> None:
    rank = node.rank(0)
    for number in (3, 3, 2):
        node.regroup(number)
    assert rank.generations == [3]
    assert node.jobs.event_counts["directives_stale"] == 2


def test_version_notice_goes_only_to_ranks(node: NodeJobs) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    notice = VersionNotice(job="j", generation=1, committed=Version(1, 5), candidate=9)
    node.push(notice)
    assert rank.messages_of(VersionNotice) == [notice]
    assert launcher.messages_of(VersionNotice) == []


def test_restarted_agent_learns_generation_from_ticks(node: NodeJobs) -> None:
    rank = node.rank(0)
    node.heartbeat(rank, 4, 0)
    node.regroup(3)
    node.regroup(4)
    assert rank.generations == []
    node.regroup(5)
    assert rank.generations == [5]


def test_reports_count_until_the_announced_boundary(node: NodeJobs) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.heartbeat(rank, 1, 0)
    node.push(NewGeneration(spec=msgspec.structs.replace(generation(2), after_step=9)))
    node.heartbeat(rank, 1, 0, step=8)
    assert [(p.generation, p.step) for p in node.jobs.rank_progress()] == [(1, 8)]
    failed = CollectiveFailed(job="j", at=0.0, generation=1, rank=0, step=8, detail="reset by peer")
    node.jobs.handle_message(rank, failed)
    assert node.reports_of(CollectiveFailed) == [failed]
    node.heartbeat(rank, 2, 0)
    node.jobs.handle_message(rank, failed)
    assert node.jobs.event_counts["reports_stale"] == 1


def test_vault_takes_copies_until_the_announced_boundary(node: NodeJobs) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.heartbeat(rank, 1, 0)
    node.push(NewGeneration(spec=msgspec.structs.replace(generation(2), after_step=9)))
    node.heartbeat(rank, 1, 0, step=9)
    assert node.configured == [1, 1]
    assert node.seals_from == {"j": 1}
    node.heartbeat(rank, 2, 0)
    node.heartbeat(rank, 2, 0)
    assert node.configured == [1, 1, 2]
    assert node.seals_from == {"j": 2}


def test_wrong_product_of_a_rank_is_kept_on_its_node(node: NodeJobs) -> None:
    product = WrongProduct(work="up", dtype="float32", rows=1, inner=1, columns=1, left=b"0000", right=b"0000")
    node.jobs.handle_message(node.rank(0), product)
    assert node.products == [product]
    with pytest.raises(MalformedMessage, match="a launcher may not send WrongProduct"):
        node.jobs.handle_message(node.launcher(), product)


def test_rank_reports_are_accepted_only_for_its_own_job(node: NodeJobs) -> None:
    rank = node.rank(0)
    with pytest.raises(MalformedMessage, match="may not send reports of job k"):
        node.jobs.handle_message(rank, CollectiveFailed(job="k", at=0.0, generation=1, rank=0, step=3, detail="x"))


def test_roles_may_send_only_their_messages(node: NodeJobs) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    with pytest.raises(MalformedMessage, match="rank may not send"):
        node.jobs.handle_message(rank, exited(rank))
    with pytest.raises(MalformedMessage, match="launcher may not send"):
        node.jobs.handle_message(launcher, RankHeartbeat(generation=1, rank=0, step=1, step_s=0.1))
    with pytest.raises(MalformedMessage, match="local_rank"):
        node.peer(ConnectionRole.RANK, None)


def test_findings_of_ranks_are_passed_on(node: NodeJobs) -> None:
    raised = FindingRaised(
        finding=Finding(kind=FindingKind.SLOT_CORRUPT, subject="s", severity=Severity.WARNING, message="m"), job="j"
    )
    node.jobs.handle_message(node.rank(0), raised)
    assert node.findings == [raised]


def test_launcher_end_is_reported_to_controller_and_ranks(node: NodeJobs) -> None:
    launcher, rank = node.launcher(incarnation=5), node.rank(0)
    node.jobs.handle_disconnect(launcher, "its connection ended")
    (left,) = node.reports_of(LauncherLeft)
    assert (left.launcher, left.orderly) == (5, False)
    assert len(rank.messages_of(LauncherLost)) == 1


def test_launcher_goodbye_is_an_orderly_leave(node: NodeJobs) -> None:
    launcher = node.launcher()
    node.jobs.handle_message(launcher, Goodbye(detail="Ctrl-C"))
    node.jobs.handle_disconnect(launcher, "ended")
    assert [(left.orderly, left.detail) for left in node.reports_of(LauncherLeft)] == [(True, "Ctrl-C")]


def test_offer_carries_the_newest_pushed_generation(node: NodeJobs) -> None:
    node.launcher(incarnation=5)
    node.heartbeat(node.rank(0), 4, 0)
    node.push(NewGeneration(spec=generation(1_000_001)))
    assert [offer.generation for offer in node.jobs.launcher_offers()] == [1_000_001]


def test_reconnecting_launcher_does_not_leave(node: NodeJobs) -> None:
    first = node.launcher(incarnation=5)
    node.launcher(incarnation=5)
    assert first.closed
    node.jobs.handle_disconnect(first, "ended")
    assert node.reports_of(LauncherLeft) == []
    assert len(node.reports_of(LauncherJoined)) == 2


def test_stopped_job_reports_no_rank_loss(node: NodeJobs) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    stop = StopJob(job="j", ok=True, reason="done")
    node.push(stop)
    assert launcher.messages_of(StopJob) == [stop]
    assert rank.messages_of(StopJob) == [stop]
    assert node.forgotten == ["j"]
    node.jobs.handle_disconnect(rank, "ended")
    node.jobs.handle_disconnect(launcher, "ended")
    node.wait()
    assert node.reports_of(RankLost) == []
    assert [left.orderly for left in node.reports_of(LauncherLeft)] == [True]
    assert node.jobs.jobs == ()


def test_stop_of_an_earlier_run_spares_the_new_run(node: NodeJobs) -> None:
    node.launcher(incarnation=5)
    later = node.launcher(incarnation=6)
    node.push(StopJob(job="j", ok=True, reason="done", launcher=5))
    assert later.messages_of(StopJob) == []
    assert node.forgotten == ["j"], "what the run before left in memory"
    stop = StopJob(job="j", ok=True, reason="done", launcher=6)
    node.push(stop)
    assert later.messages_of(StopJob) == [stop]


def test_reconnecting_launcher_gets_the_missed_stop(node: NodeJobs) -> None:
    node.launcher(incarnation=5)
    rank = node.rank(0)
    node.push(StopJob(job="j", ok=True, reason="done"))
    again = node.launcher(incarnation=5)
    assert len(again.messages_of(StopJob)) == 1
    assert rank.generations == []


def test_new_run_under_an_old_name_starts_fresh(node: NodeJobs) -> None:
    node.launcher(incarnation=5)
    old = node.rank(0)
    node.regroup(9)
    node.push(StopJob(job="j", ok=True, reason="done"))
    launcher = node.launcher(incarnation=6)
    assert launcher.messages_of(StopJob) == []
    node.regroup(1)
    assert launcher.generations == [1]
    assert node.rank(0).generations == [1]
    node.jobs.handle_disconnect(old, "ended")
    node.wait()
    assert node.reports_of(RankLost) == []


def test_memory_of_jobs_without_processes_is_bounded(node: NodeJobs) -> None:
    node.rank(0)
    for number in range(200):
        node.push(NewGeneration(spec=generation(1, job=f"job{number}")))
    assert len(node.jobs.jobs) <= 66
    assert any(job.name == "j" for job in node.jobs.jobs)


def test_ranks_of_unjoined_launcher_survive_the_earlier_stop(node: NodeJobs) -> None:
    """Processes connect before their launcher offers the node; the delayed end is another launcher's."""
    rank = node.rank(0)
    node.push(StopJob(job="j", ok=False, reason="nothing is whole", launcher=5))
    assert rank.messages_of(StopJob) == []
    node.launcher(incarnation=6)
    assert [joined.launcher for joined in node.reports_of(LauncherJoined)] == [6]
    node.regroup(1)
    assert rank.generations == [1]
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    assert [lost.generation for lost in node.reports_of(RankLost)] == [1]


def test_stop_reaches_ranks_once_its_launcher_connects(node: NodeJobs) -> None:
    """A restarted agent has not seen its launcher again when the stop arrives."""
    rank = node.rank(0)
    stop = StopJob(job="j", ok=True, reason="done", launcher=5)
    node.push(stop)
    launcher = node.launcher(incarnation=5)
    assert (launcher.messages_of(StopJob), rank.messages_of(StopJob)) == ([stop], [stop])
    assert node.reports_of(LauncherJoined) == []


def test_generation_of_a_stopped_run_is_not_offered_again(node: NodeJobs) -> None:
    old = node.launcher(incarnation=5)
    node.rank(0)
    node.regroup(9)
    node.jobs.handle_disconnect(old, "ended")
    node.push(StopJob(job="j", ok=False, reason="nothing is whole", launcher=5))
    rank, launcher = node.rank(0), node.launcher(incarnation=6)
    assert (rank.generations, launcher.generations) == ([], [])
    node.regroup(1)
    assert (rank.generations, launcher.generations) == ([1], [1])


def test_launcher_that_leaves_is_reported_to_the_controller(node: NodeJobs) -> None:
    launcher = node.launcher()
    leaving = LauncherLeaving(job="j", at=0.0, launcher=5, cause="SIGTERM", grace_s=30.0)
    node.jobs.handle_message(launcher, leaving)
    assert node.reports_of(LauncherLeaving) == [leaving]


def test_stop_of_an_interrupted_job_keeps_its_slots(node: NodeJobs) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    stop = StopJob(job="j", ok=True, reason="n1 received SIGTERM", keeps_checkpoints=True)
    node.push(stop)
    assert (launcher.messages_of(StopJob), rank.messages_of(StopJob)) == ([stop], [stop])
    assert node.forgotten == []

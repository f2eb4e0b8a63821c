"""Lost, ended and silent ranks, derived from a node's connections."""

from __future__ import annotations

import msgspec
import pytest

from everstep.vocabulary import RankActivity
from everstep.wire.v1.directives import KillRank, NewGeneration, StopJob
from everstep.wire.v1.local import ConnectionRole, Goodbye, RankExited
from everstep.wire.v1.training import RankFinished, RankLost, RankUnresponsive
from everstep_agent.jobs.local_processes import ProcessEnd
from tests.support.agents.node_jobs import FakePeer, NodeJobs, exited, generation, kill


@pytest.mark.parametrize("exit_comes_first", [True, False])
def test_launcher_exit_report_merges_in_either_order(node: NodeJobs, exit_comes_first: bool) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    if exit_comes_first:
        node.jobs.handle_message(launcher, exited(rank))
        node.jobs.handle_disconnect(rank, "its connection ended")
    else:
        node.jobs.handle_disconnect(rank, "its connection ended")
        node.jobs.handle_message(launcher, exited(rank))
    (lost,) = node.reports_of(RankLost)
    assert (lost.signal, lost.exit_code) == (9, None)
    assert "signal 9" in lost.detail
    node.wait()
    assert len(node.reports_of(RankLost)) == 1


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (ProcessEnd(signal=9), (9, None, "its process ended; ended by signal 9")),
        (ProcessEnd(exit_code=3), (None, 3, "its process ended; ended with status 3")),
        (ProcessEnd(), (None, None, "its process ended")),
    ],
    ids=["signal", "exit", "unknown"],
)
def test_known_end_stands_in_for_the_launcher_report(
    node: NodeJobs, end: ProcessEnd, expected: tuple[int | None, int | None, str]
) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.jobs.handle_disconnect(rank, "its process ended", end)
    node.wait()
    (lost,) = node.reports_of(RankLost)
    assert (lost.signal, lost.exit_code, lost.detail) == expected
    node.jobs.handle_message(launcher, exited(rank))  # once the process is reaped
    assert len(node.reports_of(RankLost)) == 1


def test_late_exit_report_is_not_a_second_loss(node: NodeJobs) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    node.jobs.handle_message(launcher, exited(rank))
    assert len(node.reports_of(RankLost)) == 1


def test_late_denial_of_replacement_is_reported(node: NodeJobs) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    node.regroup(2)
    node.jobs.handle_message(launcher, exited(rank, replacement=False))
    losses = [(r.generation, r.has_replacement) for r in node.reports_of(RankLost)]
    assert losses == [(1, True), (2, False)]


def test_without_a_launcher_there_is_no_replacement(node: NodeJobs) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    assert [r.has_replacement for r in node.reports_of(RankLost)] == [False]


def test_unreplaced_rank_is_reported_once_per_generation(node: NodeJobs) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    other = node.rank(1)
    node.regroup(1)
    node.jobs.handle_message(launcher, exited(rank, replacement=False))
    node.jobs.handle_disconnect(rank, "ended")
    node.regroup(2)
    assert [(r.generation, r.rank, r.has_replacement) for r in node.reports_of(RankLost)] == [
        (1, 0, False),
        (2, 0, False),
    ]
    node.jobs.handle_message(launcher, exited(rank, replacement=False))
    assert len(node.reports_of(RankLost)) == 2
    assert other.generations == [1, 2]


def test_rank_sending_goodbye_is_not_lost(node: NodeJobs) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.jobs.handle_message(rank, Goodbye())
    node.jobs.handle_disconnect(rank, "ended")
    node.jobs.handle_message(launcher, exited(rank, signal=None, replacement=False))
    node.wait()
    assert node.reports_of(RankLost) == []


def test_finished_rank_needed_again_can_be_lost(node: NodeJobs) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.jobs.handle_message(rank, RankFinished(job="j", at=0.0, generation=1, rank=0, step=9))
    node.regroup(2)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    assert [r.generation for r in node.reports_of(RankLost)] == [2]


def test_rank_dying_before_hello_is_lost_by_exit_report(node: NodeJobs) -> None:
    launcher = node.launcher()
    node.regroup(1)
    dead = FakePeer(77)
    node.jobs.handle_message(launcher, exited(dead, 1))
    node.jobs.handle_message(launcher, exited(dead, 1))
    assert [(r.rank, r.local_rank, r.has_replacement) for r in node.reports_of(RankLost)] == [(1, 1, True)]


def test_replacement_skips_the_generation_of_the_loss(node: NodeJobs) -> None:
    node.launcher()
    rank = node.rank(0)
    node.regroup(1)
    node.jobs.handle_disconnect(rank, "ended")
    replacement = node.rank(0)
    assert replacement.generations == []
    node.wait()
    node.regroup(2)
    assert replacement.generations == [2]
    assert [r.generation for r in node.reports_of(RankLost)] == [1]


def test_kill_with_grace_is_left_to_the_launcher(node: NodeJobs) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.heartbeat(rank, 1, 0)
    order = msgspec.structs.replace(kill(1), has_grace=True)
    node.push(order, NewGeneration(spec=generation(2)))
    assert not rank.killed
    assert launcher.messages_of(KillRank) == [order]
    assert rank.generations == [1], "it is about to end"


def test_kill_with_grace_without_launcher_is_a_kill(node: NodeJobs) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.heartbeat(rank, 1, 0)
    node.jobs.handle_disconnect(launcher, "it ended")
    node.push(msgspec.structs.replace(kill(1), has_grace=True))
    assert rank.killed


def test_stale_kill_never_reaches_the_replacement(node: NodeJobs) -> None:
    node.launcher()
    rank = node.rank(0)
    node.regroup(1)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    early = node.rank(0)
    node.push(kill(1))
    assert not early.killed
    node.regroup(2)
    node.heartbeat(early, 2, 0)
    node.push(kill(1))
    assert not early.killed
    assert node.jobs.event_counts["directives_stale"] == 2


def silent(node: NodeJobs, seconds: float, lag: float = 0.0) -> list[RankUnresponsive]:
    node.clock.advance(seconds)
    node.jobs.check_silence(lag)
    return node.reports_of(RankUnresponsive)


@pytest.mark.parametrize("has_ticked", [True, False])
def test_stopped_rank_is_reported_early_and_once(node: NodeJobs, has_ticked: bool) -> None:
    rank = node.rank(1)
    node.regroup(1)
    if has_ticked:
        node.heartbeat(rank, 1, 1)
    rank.state = "T"
    assert silent(node, 0.25) == []
    (report,) = silent(node, 0.1)
    assert (report.generation, report.rank, report.local_rank, report.process_state) == (1, 1, 1, "T")
    assert report.activity is RankActivity.STOPPED
    assert len(silent(node, 5.0)) == 1


def test_next_check_is_due_when_the_first_rank_may_be_silent(node: NodeJobs) -> None:
    assert node.jobs.next_check_s() == float("inf")
    first, second = node.rank(0), node.rank(1)
    node.regroup(1)
    node.heartbeat(first, 1, 0)
    node.heartbeat(second, 1, 1)
    after_s = node.jobs.next_check_s()
    node.clock.advance(0.1)
    node.heartbeat(second, 1, 1)
    assert node.jobs.next_check_s() == pytest.approx(after_s - 0.1)
    first.state = "T"
    assert silent(node, after_s - 0.11) == []
    assert len(silent(node, 0.02)) == 1, "not before, and not long after"
    assert node.jobs.next_check_s() < 0


def check_repeatedly(node: NodeJobs, seconds: float) -> list[tuple[RankActivity | None, str]]:
    """Check silence every 0.1 s for so long; return the activities that were reported, with the process states."""
    before = len(node.reports_of(RankUnresponsive))
    for _ in range(round(seconds / 0.1)):
        silent(node, 0.1)
    return [(report.activity, report.process_state) for report in node.reports_of(RankUnresponsive)[before:]]


@pytest.mark.parametrize(("cpu_share", "activity"), [(1.0, RankActivity.WORKING), (0.0, RankActivity.STILL)])
def test_silent_rank_is_reported_with_its_activity(node: NodeJobs, cpu_share: float, activity: RankActivity) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.heartbeat(rank, 1, 0)
    rank.state, rank.cpu_share = "R", cpu_share
    assert check_repeatedly(node, 0.9) == []
    assert check_repeatedly(node, 30.0) == [(activity, "R")]


def test_tick_ends_a_reported_silence(node: NodeJobs) -> None:
    rank = node.rank(0)
    node.regroup(1)
    for _ in range(2):
        node.heartbeat(rank, 1, 0)
        check_repeatedly(node, 2.0)
    node.heartbeat(rank, 1, 0)
    kinds = [report.activity for report in node.reports_of(RankUnresponsive)]
    assert kinds == [RankActivity.STILL, RankActivity.MOVING] * 2


def test_unresponsive_rank_is_reported_again_in_next_generation(node: NodeJobs) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.heartbeat(rank, 1, 0)
    rank.state = "T"
    silent(node, 0.4)
    node.regroup(2)
    assert len(silent(node, 0.1)) == 1
    assert [r.generation for r in silent(node, 0.3)] == [1, 2]


@pytest.mark.parametrize("which", ["never_ticked", "spare", "condemned", "finished", "stopped"])
def test_rank_exempt_from_ticks_is_not_reported(node: NodeJobs, which: str) -> None:
    rank = node.rank(0)
    node.regroup(1, (0, "n2" if which == "spare" else "n1", 0))
    if which != "never_ticked":
        node.heartbeat(rank, 1, 0)
    if which == "condemned":
        node.push(kill(1))
    if which == "finished":
        node.jobs.handle_message(rank, RankFinished(job="j", at=0.0, generation=1, rank=0, step=9))
    if which == "stopped":
        node.launcher()
        node.push(StopJob(job="j", ok=True, reason="done"))
    assert silent(node, 5.0) == []


def ended(pid: int, generation: int | None, local_rank: int = 0) -> RankExited:
    return RankExited(
        local_rank=local_rank, pid=pid, exit_code=None, signal=9, has_replacement=True, generation=generation
    )


def test_loss_is_reported_for_first_generation_of_next_agent(node: NodeJobs) -> None:
    launcher = node.launcher()
    node.jobs.handle_message(launcher, ended(77, 3))
    replacement = node.rank(0)
    node.regroup(3)
    assert [(r.generation, r.rank, r.has_replacement, r.signal) for r in node.reports_of(RankLost)] == [(3, 0, True, 9)]
    assert replacement.generations == [], "it could only join what is broken"
    node.regroup(4)
    assert replacement.generations == [4]
    assert len(node.reports_of(RankLost)) == 1


def test_loss_is_reported_once_in_any_connection_order(node: NodeJobs) -> None:
    launcher, replacement = node.launcher(), node.rank(0)
    node.regroup(3)
    for _ in range(2):
        node.jobs.handle_message(launcher, ended(77, 3))
    assert [r.generation for r in node.reports_of(RankLost)] == [3]
    again = node.peer(ConnectionRole.RANK, 0, pid=replacement.pid)
    assert again.generations == []


def test_newer_generation_uses_the_replacement_without_loss(node: NodeJobs) -> None:
    launcher, replacement = node.launcher(), node.rank(0)
    node.jobs.handle_message(launcher, ended(77, 3))
    node.regroup(4)
    node.jobs.handle_message(launcher, ended(78, 3, local_rank=1))
    assert node.reports_of(RankLost) == []
    assert replacement.generations == [4]


@pytest.mark.parametrize("late", [False, True])
def test_rank_ending_before_its_first_tick_is_a_loss(node: NodeJobs, late: bool) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.jobs.handle_disconnect(rank, "ended")
    if late:
        node.wait()
    node.jobs.handle_message(launcher, ended(rank.pid, 3))
    node.regroup(3)
    assert [r.generation for r in node.reports_of(RankLost)] == [3]


@pytest.mark.promise("lost-rank-replaced")
def test_late_launcher_still_replaces_lost_rank(node: NodeJobs) -> None:
    """The launcher of a restarted agent is slower than its ranks, and one of them ends before it has joined again."""
    rank = node.rank(0)
    node.heartbeat(rank, 3, 0)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    assert [(r.generation, r.has_replacement) for r in node.reports_of(RankLost)] == [(3, False)]
    launcher = node.launcher()
    node.regroup(4)
    assert len(node.reports_of(RankLost)) == 1, "the launcher that joined has yet to say whether it replaces the rank"
    node.jobs.handle_message(launcher, ended(rank.pid, 3))
    assert len(node.reports_of(RankLost)) == 1
    assert node.rank(0).generations == [4]


def test_late_launcher_can_still_deny_a_replacement(node: NodeJobs) -> None:
    rank = node.rank(0)
    node.heartbeat(rank, 3, 0)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    launcher = node.launcher()
    node.jobs.handle_message(launcher, exited(rank, replacement=False))
    node.regroup(4)
    assert [(r.generation, r.has_replacement) for r in node.reports_of(RankLost)] == [(3, False), (4, False)]


def test_absent_launcher_leaves_place_vacant(node: NodeJobs) -> None:
    rank = node.rank(0)
    node.heartbeat(rank, 3, 0)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    node.regroup(4)
    assert [(r.generation, r.has_replacement) for r in node.reports_of(RankLost)] == [(3, False), (4, False)]

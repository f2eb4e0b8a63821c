"""What a node concludes from its connections: which rank is lost, which one is ended, which one is silent."""

from __future__ import annotations

import msgspec
import pytest

from everstep.vocabulary import RankActivity
from everstep.wire.v1.directives import KillRank, NewGeneration, StopJob
from everstep.wire.v1.local import ConnectionRole, Goodbye
from everstep.wire.v1.training import CollectiveFailed, RankFinished, RankLost, RankUnresponsive
from tests.support.local_node import FakePeer, Node, exited, generation, kill

# --- losses -----------------------------------------------------------------------------------------------------------


def test_lost_rank_is_reported_after_the_exit_grace(node: Node) -> None:
    node.launcher()
    rank = node.rank(1)
    node.regroup(1)
    node.jobs.handle_disconnect(rank, "its connection ended")
    assert node.of(RankLost) == []
    node.wait(0.003)
    (lost,) = node.of(RankLost)
    assert (lost.generation, lost.rank, lost.local_rank, lost.has_replacement) == (1, 1, 1, True)
    assert lost.trace
    node.wait()
    assert len(node.of(RankLost)) == 1


@pytest.mark.parametrize("word_first", [True, False])
def test_launcher_exit_report_merges_in_either_order(node: Node, word_first: bool) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    if word_first:
        node.jobs.handle_message(launcher, exited(rank))
        node.jobs.handle_disconnect(rank, "its connection ended")
    else:
        node.jobs.handle_disconnect(rank, "its connection ended")
        node.jobs.handle_message(launcher, exited(rank))
    (lost,) = node.of(RankLost)
    assert (lost.signal, lost.exit_code) == (9, None)
    assert "signal 9" in lost.detail
    node.wait()
    assert len(node.of(RankLost)) == 1


def test_late_exit_report_is_not_a_second_loss(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    node.jobs.handle_message(launcher, exited(rank))
    assert len(node.of(RankLost)) == 1


def test_late_denial_of_replacement_is_reported(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    node.regroup(2)
    node.jobs.handle_message(launcher, exited(rank, replacement=False))
    told = [(r.generation, r.has_replacement) for r in node.of(RankLost)]
    assert told == [(1, True), (2, False)]


def test_without_a_launcher_there_is_no_replacement(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    assert [r.has_replacement for r in node.of(RankLost)] == [False]


def test_unreplaced_rank_is_reported_once_per_generation(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    other = node.rank(1)
    node.regroup(1)
    node.jobs.handle_message(launcher, exited(rank, replacement=False))
    node.jobs.handle_disconnect(rank, "ended")
    node.regroup(2)
    assert [(r.generation, r.rank, r.has_replacement) for r in node.of(RankLost)] == [(1, 0, False), (2, 0, False)]
    node.jobs.handle_message(launcher, exited(rank, replacement=False))
    assert len(node.of(RankLost)) == 2
    assert other.generations == [1, 2]


def test_spare_exit_is_no_loss(node: Node) -> None:
    spare = node.rank(1)
    node.regroup(1, (0, "n1", 0))
    node.jobs.handle_disconnect(spare, "ended")
    node.wait()
    assert node.of(RankLost) == []


def test_rank_sending_goodbye_is_not_lost(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.jobs.handle_message(rank, Goodbye())
    node.jobs.handle_disconnect(rank, "ended")
    node.jobs.handle_message(launcher, exited(rank, signal=None, replacement=False))
    node.wait()
    assert node.of(RankLost) == []


def test_finished_rank_with_late_tick_is_not_lost(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.jobs.handle_message(rank, RankFinished(job="j", at=0.0, generation=1, rank=0, step=9))
    node.tick(rank, 1, 0)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    assert node.of(RankLost) == []


def test_finished_rank_needed_again_can_be_lost(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.jobs.handle_message(rank, RankFinished(job="j", at=0.0, generation=1, rank=0, step=9))
    node.regroup(2)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    assert [r.generation for r in node.of(RankLost)] == [2]


def test_rank_dying_before_hello_is_lost_by_exit_report(node: Node) -> None:
    launcher = node.launcher()
    node.regroup(1)
    dead = FakePeer(77)
    node.jobs.handle_message(launcher, exited(dead, 1))
    node.jobs.handle_message(launcher, exited(dead, 1))
    assert [(r.rank, r.local_rank, r.has_replacement) for r in node.of(RankLost)] == [(1, 1, True)]


def test_a_second_process_for_a_place_is_the_loss_of_the_first(node: Node) -> None:
    first = node.rank(0)
    node.launcher()
    node.regroup(1)
    second = node.rank(0)
    node.wait()
    assert first.closed
    assert [r.generation for r in node.of(RankLost)] == [1]
    node.jobs.handle_disconnect(first, "ended")
    node.wait()
    assert len(node.of(RankLost)) == 1
    node.regroup(2)
    assert second.generations == [2]


def test_reconnecting_process_is_not_lost(node: Node) -> None:
    first = node.rank(0)
    node.regroup(1)
    node.peer(ConnectionRole.RANK, 0, pid=first.pid)
    node.jobs.handle_disconnect(first, "ended")
    node.wait()
    assert node.of(RankLost) == []


def test_replacement_skips_the_generation_of_the_loss(node: Node) -> None:
    node.launcher()
    rank = node.rank(0)
    node.regroup(1)
    node.jobs.handle_disconnect(rank, "ended")
    replacement = node.rank(0)
    assert replacement.generations == []
    node.wait()
    node.regroup(2)
    assert replacement.generations == [2]
    assert [r.generation for r in node.of(RankLost)] == [1]


def test_loss_counts_for_the_newest_generation(node: Node) -> None:
    node.launcher()
    rank = node.rank(1)
    node.regroup(1)
    node.regroup(2)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    assert [r.generation for r in node.of(RankLost)] == [2]


def test_restarted_agent_derives_a_loss_from_ticks(node: Node) -> None:
    rank = node.rank(1)
    node.tick(rank, 7, 5)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    assert [(r.generation, r.rank) for r in node.of(RankLost)] == [(7, 5)]


# --- kills ------------------------------------------------------------------------------------------------------------


def test_a_kill_goes_to_the_process_and_its_launcher(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    node.push(kill(1))
    assert rank.killed
    assert launcher.got(KillRank) == [kill(1)]


def test_a_kill_with_grace_is_left_to_the_launcher(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    order = msgspec.structs.replace(kill(1), has_grace=True)
    node.push(order, NewGeneration(spec=generation(2)))
    assert not rank.killed
    assert launcher.got(KillRank) == [order]
    assert rank.generations == [1], "it is about to end"


def test_a_kill_with_grace_without_launcher_is_a_kill(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    node.jobs.handle_disconnect(launcher, "it ended")
    node.push(msgspec.structs.replace(kill(1), has_grace=True))
    assert rank.killed


@pytest.mark.parametrize("kill_first", [True, False])
def test_killed_rank_is_no_loss_of_the_next_generation(node: Node, kill_first: bool) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    both = [kill(1), NewGeneration(spec=generation(2))]
    node.push(*(both if kill_first else both[::-1]))
    assert rank.generations == [1]
    node.jobs.handle_message(launcher, exited(rank))
    node.jobs.handle_disconnect(rank, "ended")
    replacement = node.rank(0)
    assert replacement.generations == [2]
    assert [(r.generation, r.has_replacement) for r in node.of(RankLost)] == [(1, True)]


def test_late_kill_order_still_ends_the_hung_process(node: Node) -> None:
    node.launcher()
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    node.regroup(2)
    node.push(kill(1))
    assert rank.killed
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    assert [r.generation for r in node.of(RankLost)] == [1]


def test_unreplaced_killed_rank_is_lost_in_newest_generation(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    node.push(kill(1), NewGeneration(spec=generation(2)))
    node.jobs.handle_message(launcher, exited(rank, replacement=False))
    node.jobs.handle_disconnect(rank, "ended")
    assert [(r.generation, r.has_replacement) for r in node.of(RankLost)] == [(2, False)]


def test_a_stale_kill_never_reaches_the_replacement(node: Node) -> None:
    node.launcher()
    rank = node.rank(0)
    node.regroup(1)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    early = node.rank(0)
    node.push(kill(1))
    assert not early.killed
    node.regroup(2)
    node.tick(early, 2, 0)
    node.push(kill(1))
    assert not early.killed
    assert node.jobs.event_counts["directives_stale"] == 2


def test_reports_of_a_killed_rank_are_dropped(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    node.push(kill(1))
    node.jobs.handle_message(rank, CollectiveFailed(job="j", at=0.0, generation=1, rank=0, step=3, detail="x"))
    assert node.of(CollectiveFailed) == []


# --- silence ----------------------------------------------------------------------------------------------------------


def silent(node: Node, seconds: float, lag: float = 0.0) -> list[RankUnresponsive]:
    node.clock.advance(seconds)
    node.jobs.check_silence(lag)
    return node.of(RankUnresponsive)


def test_stopped_rank_is_reported_early_and_once(node: Node) -> None:
    rank = node.rank(1)
    node.regroup(1)
    node.tick(rank, 1, 1)
    rank.state = "T"
    assert silent(node, 0.25) == []
    (told,) = silent(node, 0.1)
    assert (told.generation, told.rank, told.local_rank, told.process_state) == (1, 1, 1, "T")
    assert told.activity is RankActivity.STOPPED
    assert len(silent(node, 5.0)) == 1


def look_on(node: Node, seconds: float) -> list[tuple[RankActivity | None, str]]:
    """The agent checks every 0.1 s; returns the activities that it reported, with the kernel's letter."""
    before = len(node.of(RankUnresponsive))
    for _ in range(round(seconds / 0.1)):
        silent(node, 0.1)
    return [(report.activity, report.process_state) for report in node.of(RankUnresponsive)[before:]]


@pytest.mark.parametrize(("cpu_share", "activity"), [(1.0, RankActivity.WORKING), (0.0, RankActivity.STILL)])
def test_silent_rank_is_reported_with_what_it_does(node: Node, cpu_share: float, activity: RankActivity) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    rank.state, rank.cpu_share = "R", cpu_share
    assert look_on(node, 0.9) == []
    assert look_on(node, 30.0) == [(activity, "R")]


def test_change_of_a_silent_ranks_activity_is_reported(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    rank.cpu_share = 1.0
    look_on(node, 5.0)
    rank.cpu_share = 0.0
    assert [activity for activity, _ in look_on(node, 5.0)] == [RankActivity.STILL]


def test_tick_ends_a_reported_silence(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    for _ in range(2):
        node.tick(rank, 1, 0)
        look_on(node, 2.0)
    node.tick(rank, 1, 0)
    kinds = [report.activity for report in node.of(RankUnresponsive)]
    assert kinds == [RankActivity.STILL, RankActivity.MOVING] * 2


def test_unresponsive_rank_is_reported_again_in_next_generation(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    rank.state = "T"
    silent(node, 0.4)
    node.regroup(2)
    assert len(silent(node, 0.1)) == 1
    assert [r.generation for r in silent(node, 0.3)] == [1, 2]


def test_agent_lag_is_not_counted_against_ranks(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    assert silent(node, 3.0, lag=2.9) == []


@pytest.mark.parametrize("which", ["never_ticked", "spare", "condemned", "finished", "stopped"])
def test_rank_exempt_from_ticks_is_not_reported(node: Node, which: str) -> None:
    rank = node.rank(0)
    node.regroup(1, (0, "n2" if which == "spare" else "n1", 0))
    if which != "never_ticked":
        node.tick(rank, 1, 0)
    if which == "condemned":
        node.push(kill(1))
    if which == "finished":
        node.jobs.handle_message(rank, RankFinished(job="j", at=0.0, generation=1, rank=0, step=9))
    if which == "stopped":
        node.launcher()
        node.push(StopJob(job="j", ok=True, reason="done"))
    assert silent(node, 5.0) == []

"""Ranks that ended while their node had no agent: the next one hears of them from the launcher alone."""

from __future__ import annotations

import msgspec
import pytest

from everstep.wire.v1.directives import NewGeneration
from everstep.wire.v1.local import ConnectionRole, RankExited
from everstep.wire.v1.training import RankLost
from tests.support.local_node import FakePeer, Node, exited, generation


def ended(pid: int, generation: int | None, local_rank: int = 0) -> RankExited:
    return RankExited(
        local_rank=local_rank, pid=pid, exit_code=None, signal=9, has_replacement=True, generation=generation
    )


def test_loss_is_reported_for_first_generation_of_next_agent(node: Node) -> None:
    launcher = node.launcher()
    node.jobs.handle_message(launcher, ended(77, 3))
    replacement = node.rank(0)
    node.regroup(3)
    assert [(r.generation, r.rank, r.has_replacement, r.signal) for r in node.of(RankLost)] == [(3, 0, True, 9)]
    assert replacement.generations == [], "it could only join what is broken"
    node.regroup(4)
    assert replacement.generations == [4]
    assert len(node.of(RankLost)) == 1


def test_loss_is_reported_once_in_any_connection_order(node: Node) -> None:
    launcher, replacement = node.launcher(), node.rank(0)
    node.regroup(3)
    for _ in range(2):
        node.jobs.handle_message(launcher, ended(77, 3))
    assert [r.generation for r in node.of(RankLost)] == [3]
    again = node.peer(ConnectionRole.RANK, 0, pid=replacement.pid)
    assert again.generations == []


def test_newer_generation_uses_the_replacement_without_loss(node: Node) -> None:
    launcher, replacement = node.launcher(), node.rank(0)
    node.jobs.handle_message(launcher, ended(77, 3))
    node.regroup(4)
    node.jobs.handle_message(launcher, ended(78, 3, local_rank=1))
    assert node.of(RankLost) == []
    assert replacement.generations == [4]


def test_exit_before_any_generation_is_no_loss(node: Node) -> None:
    node.jobs.handle_message(node.launcher(), ended(77, 0))
    replacement = node.rank(0)
    node.regroup(1)
    assert node.of(RankLost) == []
    assert replacement.generations == [1]


@pytest.mark.parametrize("late", [False, True])
def test_rank_ending_before_its_first_tick_is_a_loss(node: Node, late: bool) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.jobs.handle_disconnect(rank, "ended")
    if late:
        node.wait()
    node.jobs.handle_message(launcher, ended(rank.pid, 3))
    node.regroup(3)
    assert [r.generation for r in node.of(RankLost)] == [3]


def test_loss_at_announced_boundary_counts_for_next_generation(node: Node) -> None:
    node.jobs.handle_message(node.launcher(), ended(77, 3))

    node.push(NewGeneration(spec=msgspec.structs.replace(generation(4), after_step=9)))
    assert [r.generation for r in node.of(RankLost)] == [4]


def test_exit_outside_the_generation_is_no_loss(node: Node) -> None:
    node.jobs.handle_message(node.launcher(), ended(FakePeer(5).pid, 3, local_rank=1))
    node.regroup(3, (0, "n1", 0))
    assert node.of(RankLost) == []


@pytest.mark.promise("lost-rank-replaced")
def test_late_launcher_still_replaces_lost_rank(node: Node) -> None:
    """The launcher of a restarted agent is slower than its ranks, and one of them ends before it has joined again."""
    rank = node.rank(0)
    node.tick(rank, 3, 0)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    assert [(r.generation, r.has_replacement) for r in node.of(RankLost)] == [(3, False)]
    launcher = node.launcher()
    node.regroup(4)
    assert len(node.of(RankLost)) == 1, "the launcher that joined has yet to say whether it replaces the rank"
    node.jobs.handle_message(launcher, ended(rank.pid, 3))
    assert len(node.of(RankLost)) == 1
    assert node.rank(0).generations == [4]


def test_late_launcher_can_still_deny_a_replacement(node: Node) -> None:
    rank = node.rank(0)
    node.tick(rank, 3, 0)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    launcher = node.launcher()
    node.jobs.handle_message(launcher, exited(rank, replacement=False))
    node.regroup(4)
    assert [(r.generation, r.has_replacement) for r in node.of(RankLost)] == [(3, False), (4, False)]


def test_absent_launcher_leaves_place_vacant(node: Node) -> None:
    rank = node.rank(0)
    node.tick(rank, 3, 0)
    node.jobs.handle_disconnect(rank, "ended")
    node.wait()
    node.regroup(4)
    assert [(r.generation, r.has_replacement) for r in node.of(RankLost)] == [(3, False), (4, False)]

"""What a node concludes from its connections: peers played by records, time by a clock that stands still."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest

from agent.local_jobs import LocalJobs
from agent.local_seats import LocalJob
from everstep.clock import ManualClock
from everstep.errors import MalformedMessage
from everstep.ids import Version
from everstep.vocabulary import Finding, FindingKind, GenerationReason, Severity
from everstep.wire.v1.directives import KillRank, NewGeneration, StopJob, VersionNotice
from everstep.wire.v1.local import Goodbye, Hello, LauncherLost, RankExited, Role, Tick
from everstep.wire.v1.training import (
    CollectiveFailed,
    FindingRaised,
    GenerationSpec,
    Holder,
    JobSpec,
    LauncherJoined,
    LauncherLeft,
    RankFinished,
    RankLost,
    RankUnresponsive,
    RestoreRule,
)

T = TypeVar("T")
JOB = JobSpec(job="j", max_nodes=2, nproc_per_node=2)


def generation(number: int, *members: tuple[int, str, int], job: str = "j") -> GenerationSpec:
    members = members or ((0, "n1", 0), (1, "n1", 1), (2, "n2", 0), (3, "n2", 1))
    seats = tuple(dict.fromkeys(node for _, node, _ in members))
    return GenerationSpec(
        job=job,
        number=number,
        reason=GenerationReason.FORMED,
        sentence="",
        trace="",
        seats=seats,
        store="127.0.0.1:1",
        store_node="n1",
        restore=RestoreRule(),
        holders=(Holder(node="n1", vault="127.0.0.1:2"),),
        replica_nodes={},
        secret="s" * 16,
        spec=msgspec.structs.replace(JOB, nproc_per_node=len(members) // len(seats)),
        issued_at=0.0,
    )


class FakePeer:
    """A connection that remembers what it was sent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sent: list[Any] = []
        self.killed = False
        self.closed = False
        self.state = "S"

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed = True

    def process_state(self) -> str:
        return self.state

    def got(self, kind: type[T]) -> list[T]:
        return [m for m in self.sent if isinstance(m, kind)]

    @property
    def generations(self) -> list[int]:
        return [m.spec.number for m in self.got(NewGeneration)]


class Timer:
    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at = at
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Node:
    """One node's jobs with everything around them recorded."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.reports: list[Any] = []
        self.findings: list[FindingRaised] = []
        self.configured: list[int] = []
        self.forgotten: list[str] = []
        self._timers: list[Timer] = []
        self._traces = 0
        self._pids = 1000
        self.jobs = LocalJobs("n1", self.clock, self, exit_grace_s=0.003, silence_s=0.3, unresponsive_after_s=1.0)

    # what LocalJobs calls
    def report(self, report: Any) -> None:
        self.reports.append(report)

    def finding(self, raised: FindingRaised) -> None:
        self.findings.append(raised)

    def configure_vault(self, job: LocalJob) -> None:
        assert job.spec is not None
        self.configured.append(job.oldest)

    def forget_in_vault(self, job: str) -> None:
        self.forgotten.append(job)

    def new_trace(self) -> str:
        self._traces += 1
        return f"t{self._traces}"

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self._timers.append(Timer(self.clock.monotonic() + delay_s, call))
        return self._timers[-1]

    # what the tests call
    def wait(self, seconds: float = 0.01) -> None:
        self.clock.advance(seconds)
        due = [t for t in self._timers if t.at <= self.clock.monotonic() and not t.cancelled]
        self._timers = [t for t in self._timers if t not in due]
        for timer in due:
            timer.call()

    def launcher(self, incarnation: int = 5, job: str = "j") -> FakePeer:
        peer = self.peer(Role.LAUNCHER, None, job)
        spec = JobSpec(job=job, max_nodes=2, nproc_per_node=2)
        offer = LauncherJoined(job=job, at=0.0, spec=spec, launcher=incarnation, store="127.0.0.1:1")
        self.jobs.heard(peer, offer)
        return peer

    def rank(self, local_rank: int, job: str = "j") -> FakePeer:
        return self.peer(Role.RANK, local_rank, job)

    def peer(self, role: Role, local_rank: int | None, job: str = "j", pid: int | None = None) -> FakePeer:
        self._pids += 1
        peer = FakePeer(pid or self._pids)
        self.jobs.hello(peer, Hello(protocols=(1,), role=role, job=job, pid=peer.pid, local_rank=local_rank))
        return peer

    def push(self, *bodies: Any) -> None:
        self.jobs.directives(list(bodies))

    def regroup(self, number: int, *members: tuple[int, str, int]) -> None:
        self.push(NewGeneration(spec=generation(number, *members)))

    def tick(self, peer: FakePeer, generation: int, rank: int, step: int = 1) -> None:
        self.jobs.heard(peer, Tick(generation=generation, rank=rank, step=step, step_s=0.1))

    def of(self, kind: type[T]) -> list[T]:
        return [r for r in self.reports if isinstance(r, kind)]


def kill(generation: int, local_rank: int = 0, rank: int = 0) -> KillRank:
    return KillRank(job="j", generation=generation, rank=rank, local_rank=local_rank, reason="it hangs")


def exited(peer: FakePeer, local_rank: int = 0, *, replacement: bool = True, signal: int | None = 9) -> RankExited:
    code = None if signal is not None else 1
    return RankExited(local_rank=local_rank, pid=peer.pid, exit_code=code, signal=signal, replacement=replacement)


@pytest.fixture
def node() -> Node:
    return Node()


# --- generations on their way -----------------------------------------------------------------------------------------


def test_how_often_ranks_snapshot_is_known_by_job(node: Node) -> None:
    node.regroup(1, (0, "n1", 0), (1, "n1", 1))
    for rank, every in ((0, 2), (1, 3)):
        node.jobs.heard(node.rank(rank), Tick(generation=1, rank=rank, step=1, step_s=0.1, snapshot_every=every))
    assert node.jobs.snapshot_every() == {"j": 3}


def test_a_generation_reaches_the_vault_the_launcher_and_every_rank(node: Node) -> None:
    launcher, ranks = node.launcher(), [node.rank(0), node.rank(1)]
    node.regroup(1)
    assert [p.generations for p in (launcher, *ranks)] == [[1], [1], [1]]
    assert node.configured == [1]


def test_a_late_comer_gets_the_newest_generation(node: Node) -> None:
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
    assert node.jobs.counts["directives_stale"] == 2


def test_versions_go_to_ranks(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    notice = VersionNotice(job="j", generation=1, committed=Version(1, 5), candidate=9)
    node.push(notice)
    assert rank.got(VersionNotice) == [notice]
    assert launcher.got(VersionNotice) == []


def test_a_restarted_agent_learns_the_generation_from_ticks_and_does_not_push_it_back(node: Node) -> None:
    rank = node.rank(0)
    node.tick(rank, 4, 0)
    node.regroup(3)
    node.regroup(4)
    assert rank.generations == []
    node.regroup(5)
    assert rank.generations == [5]


def test_until_an_announced_boundary_the_ranks_of_the_running_generation_are_heard(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    node.push(NewGeneration(spec=msgspec.structs.replace(generation(2), after_step=9)))
    node.tick(rank, 1, 0, step=8)
    assert [(p.generation, p.step) for p in node.jobs.progress()] == [(1, 8)]
    failed = CollectiveFailed(job="j", at=0.0, generation=1, rank=0, step=8, detail="reset by peer")
    node.jobs.heard(rank, failed)
    assert node.of(CollectiveFailed) == [failed]
    node.tick(rank, 2, 0)
    node.jobs.heard(rank, failed)
    assert node.jobs.counts["reports_stale"] == 1


def test_until_an_announced_boundary_the_vault_takes_copies_of_the_running_generation(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    node.push(NewGeneration(spec=msgspec.structs.replace(generation(2), after_step=9)))
    node.tick(rank, 1, 0, step=9)
    assert node.configured == [1, 1]
    node.tick(rank, 2, 0)
    node.tick(rank, 2, 0)
    assert node.configured == [1, 1, 2]


def test_jobs_of_one_node_do_not_hear_of_each_other(node: Node) -> None:
    mine, other = node.rank(0), node.rank(0, job="k")
    node.regroup(1)
    assert mine.generations == [1]
    assert other.sent == []


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_lost_rank_is_reported_after_the_grace_when_the_launcher_says_nothing(node: Node) -> None:
    node.launcher()
    rank = node.rank(1)
    node.regroup(1)
    node.jobs.gone(rank, "its connection ended")
    assert node.of(RankLost) == []
    node.wait(0.003)
    (lost,) = node.of(RankLost)
    assert (lost.generation, lost.rank, lost.local_rank, lost.replacement) == (1, 1, 1, True)
    assert lost.trace
    node.wait()
    assert len(node.of(RankLost)) == 1


@pytest.mark.parametrize("word_first", [True, False])
def test_the_launchers_word_is_merged_whichever_comes_first(node: Node, word_first: bool) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    if word_first:
        node.jobs.heard(launcher, exited(rank))
        node.jobs.gone(rank, "its connection ended")
    else:
        node.jobs.gone(rank, "its connection ended")
        node.jobs.heard(launcher, exited(rank))
    (lost,) = node.of(RankLost)
    assert (lost.signal, lost.exit_code) == (9, None)
    assert "signal 9" in lost.detail
    node.wait()
    assert len(node.of(RankLost)) == 1


def test_a_word_that_comes_late_is_not_another_loss(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.jobs.gone(rank, "ended")
    node.wait()
    node.jobs.heard(launcher, exited(rank))
    assert len(node.of(RankLost)) == 1


def test_a_late_word_that_nobody_will_replace_it_is_told(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.jobs.gone(rank, "ended")
    node.wait()
    node.regroup(2)
    node.jobs.heard(launcher, exited(rank, replacement=False))
    told = [(r.generation, r.replacement) for r in node.of(RankLost)]
    assert told == [(1, True), (2, False)]


def test_without_a_launcher_there_is_no_replacement(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.jobs.gone(rank, "ended")
    node.wait()
    assert [r.replacement for r in node.of(RankLost)] == [False]


def test_a_generation_that_still_counts_on_a_place_nobody_takes_is_told_once(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    other = node.rank(1)
    node.regroup(1)
    node.jobs.heard(launcher, exited(rank, replacement=False))
    node.jobs.gone(rank, "ended")
    node.regroup(2)
    assert [(r.generation, r.rank, r.replacement) for r in node.of(RankLost)] == [(1, 0, False), (2, 0, False)]
    node.jobs.heard(launcher, exited(rank, replacement=False))
    assert len(node.of(RankLost)) == 2
    assert other.generations == [1, 2]


def test_a_spare_that_ends_is_nobodys_loss(node: Node) -> None:
    spare = node.rank(1)
    node.regroup(1, (0, "n1", 0))
    node.jobs.gone(spare, "ended")
    node.wait()
    assert node.of(RankLost) == []


def test_a_rank_before_its_first_generation_is_nobodys_loss(node: Node) -> None:
    node.jobs.gone(node.rank(0), "ended")
    node.wait()
    assert node.of(RankLost) == []


def test_a_rank_that_says_goodbye_is_not_lost(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.jobs.heard(rank, Goodbye())
    node.jobs.gone(rank, "ended")
    node.jobs.heard(launcher, exited(rank, signal=None, replacement=False))
    node.wait()
    assert node.of(RankLost) == []


def test_a_rank_that_finished_is_not_lost_though_it_ticked_on(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.jobs.heard(rank, RankFinished(job="j", at=0.0, generation=1, rank=0, step=9))
    node.tick(rank, 1, 0)
    node.jobs.gone(rank, "ended")
    node.wait()
    assert node.of(RankLost) == []


def test_a_finished_rank_that_a_new_generation_needs_again_can_be_lost(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.jobs.heard(rank, RankFinished(job="j", at=0.0, generation=1, rank=0, step=9))
    node.regroup(2)
    node.jobs.gone(rank, "ended")
    node.wait()
    assert [r.generation for r in node.of(RankLost)] == [2]


def test_a_rank_that_died_before_its_hello_is_lost_by_the_launchers_word(node: Node) -> None:
    launcher = node.launcher()
    node.regroup(1)
    dead = FakePeer(77)
    node.jobs.heard(launcher, exited(dead, 1))
    node.jobs.heard(launcher, exited(dead, 1))
    assert [(r.rank, r.local_rank, r.replacement) for r in node.of(RankLost)] == [(1, 1, True)]


def test_a_second_process_for_a_place_is_the_loss_of_the_first(node: Node) -> None:
    first = node.rank(0)
    node.launcher()
    node.regroup(1)
    second = node.rank(0)
    node.wait()
    assert first.closed
    assert [r.generation for r in node.of(RankLost)] == [1]
    node.jobs.gone(first, "ended")
    node.wait()
    assert len(node.of(RankLost)) == 1
    node.regroup(2)
    assert second.generations == [2]


def test_a_process_that_connects_anew_is_not_lost(node: Node) -> None:
    first = node.rank(0)
    node.regroup(1)
    node.peer(Role.RANK, 0, pid=first.pid)
    node.jobs.gone(first, "ended")
    node.wait()
    assert node.of(RankLost) == []


def test_a_replacement_is_not_offered_the_generation_its_predecessor_was_lost_in(node: Node) -> None:
    node.launcher()
    rank = node.rank(0)
    node.regroup(1)
    node.jobs.gone(rank, "ended")
    replacement = node.rank(0)
    assert replacement.generations == []
    node.wait()
    node.regroup(2)
    assert replacement.generations == [2]
    assert [r.generation for r in node.of(RankLost)] == [1]


def test_a_loss_in_a_new_generation_is_one_of_that_generation(node: Node) -> None:
    node.launcher()
    rank = node.rank(1)
    node.regroup(1)
    node.regroup(2)
    node.jobs.gone(rank, "ended")
    node.wait()
    assert [r.generation for r in node.of(RankLost)] == [2]


def test_after_the_agents_restart_a_loss_is_known_from_ticks(node: Node) -> None:
    rank = node.rank(1)
    node.tick(rank, 7, 5)
    node.jobs.gone(rank, "ended")
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


@pytest.mark.parametrize("kill_first", [True, False])
def test_a_killed_rank_is_no_loss_of_the_generation_made_for_its_replacement(node: Node, kill_first: bool) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    both = [kill(1), NewGeneration(spec=generation(2))]
    node.push(*(both if kill_first else both[::-1]))
    assert rank.generations == [1]
    node.jobs.heard(launcher, exited(rank))
    node.jobs.gone(rank, "ended")
    replacement = node.rank(0)
    assert replacement.generations == [2]
    assert [(r.generation, r.replacement) for r in node.of(RankLost)] == [(1, True)]


def test_a_kill_that_comes_after_the_next_generation_still_finds_the_hung_process(node: Node) -> None:
    node.launcher()
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    node.regroup(2)
    node.push(kill(1))
    assert rank.killed
    node.jobs.gone(rank, "ended")
    node.wait()
    assert [r.generation for r in node.of(RankLost)] == [1]


def test_a_killed_rank_that_nobody_replaces_is_a_loss_of_the_newest_generation(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    node.push(kill(1), NewGeneration(spec=generation(2)))
    node.jobs.heard(launcher, exited(rank, replacement=False))
    node.jobs.gone(rank, "ended")
    assert [(r.generation, r.replacement) for r in node.of(RankLost)] == [(2, False)]


def test_a_stale_kill_never_reaches_the_replacement(node: Node) -> None:
    node.launcher()
    rank = node.rank(0)
    node.regroup(1)
    node.jobs.gone(rank, "ended")
    node.wait()
    early = node.rank(0)
    node.push(kill(1))
    assert not early.killed
    node.regroup(2)
    node.tick(early, 2, 0)
    node.push(kill(1))
    assert not early.killed
    assert node.jobs.counts["directives_stale"] == 2


def test_the_word_of_a_killed_rank_is_not_passed_on(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    node.push(kill(1))
    node.jobs.heard(rank, CollectiveFailed(job="j", at=0.0, generation=1, rank=0, step=3, detail="x"))
    assert node.of(CollectiveFailed) == []


# --- fencing ----------------------------------------------------------------------------------------------------------


def test_a_report_of_an_older_generation_is_dropped_and_counted(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(2)
    for number in (1, 2, 3):
        node.jobs.heard(rank, CollectiveFailed(job="j", at=0.0, generation=number, rank=0, step=3, detail="x"))
    assert [r.generation for r in node.of(CollectiveFailed)] == [2, 3]
    assert node.jobs.counts["reports_stale"] == 1


def test_a_rank_speaks_only_for_its_own_job(node: Node) -> None:
    rank = node.rank(0)
    with pytest.raises(MalformedMessage, match="may not speak for job k"):
        node.jobs.heard(rank, CollectiveFailed(job="k", at=0.0, generation=1, rank=0, step=3, detail="x"))


def test_ranks_and_launchers_say_only_what_is_theirs(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    with pytest.raises(MalformedMessage, match="rank may not send"):
        node.jobs.heard(rank, exited(rank))
    with pytest.raises(MalformedMessage, match="launcher may not send"):
        node.jobs.heard(launcher, Tick(generation=1, rank=0, step=1, step_s=0.1))
    with pytest.raises(MalformedMessage, match="local_rank"):
        node.peer(Role.RANK, None)


def test_findings_of_ranks_are_passed_on(node: Node) -> None:
    raised = FindingRaised(
        finding=Finding(kind=FindingKind.SLOT_CORRUPT, subject="s", severity=Severity.WARNING, message="m"), job="j"
    )
    node.jobs.heard(node.rank(0), raised)
    assert node.findings == [raised]


def test_progress_is_that_of_the_newest_generation(node: Node) -> None:
    old, new = node.rank(0), node.rank(1)
    node.regroup(2)
    node.tick(old, 1, 0, step=10)
    node.tick(new, 2, 1, step=11)
    assert [(p.generation, p.rank, p.step) for p in node.jobs.progress()] == [(2, 1, 11)]


# --- launchers --------------------------------------------------------------------------------------------------------


def test_a_launcher_that_ends_is_told_to_the_controller_and_its_ranks(node: Node) -> None:
    launcher, rank = node.launcher(incarnation=5), node.rank(0)
    node.jobs.gone(launcher, "its connection ended")
    (left,) = node.of(LauncherLeft)
    assert (left.launcher, left.orderly) == (5, False)
    assert len(rank.got(LauncherLost)) == 1


def test_a_launcher_that_says_goodbye_leaves_in_order(node: Node) -> None:
    launcher = node.launcher()
    node.jobs.heard(launcher, Goodbye(detail="Ctrl-C"))
    node.jobs.gone(launcher, "ended")
    assert [(left.orderly, left.detail) for left in node.of(LauncherLeft)] == [(True, "Ctrl-C")]


def test_offers_of_live_launchers_are_made_again_with_the_generation_of_their_ranks(node: Node) -> None:
    node.launcher(incarnation=5)
    gone = node.launcher(incarnation=6, job="k")
    node.jobs.gone(gone, "ended")
    node.tick(node.rank(0), 4, 0)
    assert [(o.launcher, o.generation) for o in node.jobs.offers()] == [(5, 4)]


def test_an_offer_tells_of_the_newest_generation_that_the_ranks_were_told_of(node: Node) -> None:
    node.launcher(incarnation=5)
    node.tick(node.rank(0), 4, 0)
    node.push(NewGeneration(spec=generation(1_000_001)))
    assert [offer.generation for offer in node.jobs.offers()] == [1_000_001]


def test_a_launcher_that_connects_anew_does_not_leave(node: Node) -> None:
    first = node.launcher(incarnation=5)
    node.launcher(incarnation=5)
    assert first.closed
    node.jobs.gone(first, "ended")
    assert node.of(LauncherLeft) == []
    assert len(node.of(LauncherJoined)) == 2


def test_a_place_is_vacant_when_its_launcher_is_gone(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.rank(1)
    node.regroup(1)
    node.jobs.gone(rank, "ended")
    node.wait()
    node.jobs.gone(launcher, "ended")
    node.regroup(2)
    assert [(r.generation, r.rank, r.replacement) for r in node.of(RankLost)] == [(1, 0, True), (2, 0, False)]


# --- the end of a job -------------------------------------------------------------------------------------------------


def test_a_stopped_job_loses_nobody(node: Node) -> None:
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    stop = StopJob(job="j", ok=True, reason="done")
    node.push(stop)
    assert launcher.got(StopJob) == [stop]
    assert rank.got(StopJob) == [stop]
    assert node.forgotten == ["j"]
    node.jobs.gone(rank, "ended")
    node.jobs.gone(launcher, "ended")
    node.wait()
    assert node.of(RankLost) == []
    assert [left.orderly for left in node.of(LauncherLeft)] == [True]
    assert node.jobs.jobs == ()


def test_a_launcher_that_missed_the_stop_hears_it_when_it_is_back(node: Node) -> None:
    node.launcher(incarnation=5)
    rank = node.rank(0)
    node.push(StopJob(job="j", ok=True, reason="done"))
    again = node.launcher(incarnation=5)
    assert len(again.got(StopJob)) == 1
    assert rank.generations == []


def test_a_new_run_under_an_old_name_begins_afresh(node: Node) -> None:
    node.launcher(incarnation=5)
    old = node.rank(0)
    node.regroup(9)
    node.push(StopJob(job="j", ok=True, reason="done"))
    launcher = node.launcher(incarnation=6)
    assert launcher.got(StopJob) == []
    node.regroup(1)
    assert launcher.generations == [1]
    assert node.rank(0).generations == [1]
    node.jobs.gone(old, "ended")
    node.wait()
    assert node.of(RankLost) == []


def test_memory_of_jobs_without_processes_is_bounded(node: Node) -> None:
    node.rank(0)
    for number in range(200):
        node.push(NewGeneration(spec=generation(1, job=f"job{number}")))
    assert len(node.jobs.jobs) <= 66
    assert any(job.name == "j" for job in node.jobs.jobs)


# --- silence ----------------------------------------------------------------------------------------------------------


def silent(node: Node, seconds: float, lag: float = 0.0) -> list[RankUnresponsive]:
    node.clock.advance(seconds)
    node.jobs.watch(lag)
    return node.of(RankUnresponsive)


def test_a_stopped_process_is_told_soon_and_once(node: Node) -> None:
    rank = node.rank(1)
    node.regroup(1)
    node.tick(rank, 1, 1)
    rank.state = "T"
    assert silent(node, 0.25) == []
    (told,) = silent(node, 0.1)
    assert (told.generation, told.rank, told.local_rank, told.process_state) == (1, 1, 1, "T")
    assert len(silent(node, 5.0)) == 1


def test_a_busy_process_is_given_longer(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    rank.state = "R"
    assert silent(node, 0.95) == []
    assert [r.process_state for r in silent(node, 0.1)] == ["R"]


def test_a_word_ends_a_silence_and_the_next_is_told_again(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    for _ in range(2):
        node.tick(rank, 1, 0)
        silent(node, 1.1)
    assert len(node.of(RankUnresponsive)) == 2


def test_a_silence_that_outlasts_a_generation_is_told_in_the_next(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    rank.state = "T"
    silent(node, 0.4)
    node.regroup(2)
    assert len(silent(node, 0.1)) == 1
    assert [r.generation for r in silent(node, 0.3)] == [1, 2]


def test_the_agents_own_lateness_is_not_held_against_ranks(node: Node) -> None:
    rank = node.rank(0)
    node.regroup(1)
    node.tick(rank, 1, 0)
    assert silent(node, 3.0, lag=2.9) == []


@pytest.mark.parametrize("which", ["never_ticked", "spare", "condemned", "finished", "stopped"])
def test_who_need_not_tick_is_not_told(node: Node, which: str) -> None:
    rank = node.rank(0)
    node.regroup(1, (0, "n2" if which == "spare" else "n1", 0))
    if which != "never_ticked":
        node.tick(rank, 1, 0)
    if which == "condemned":
        node.push(kill(1))
    if which == "finished":
        node.jobs.heard(rank, RankFinished(job="j", at=0.0, generation=1, rank=0, step=9))
    if which == "stopped":
        node.push(StopJob(job="j", ok=True, reason="done"))
    assert silent(node, 5.0) == []

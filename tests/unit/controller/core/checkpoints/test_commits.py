"""What is committed, what is verified, and what a generation may start from."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from everstep_controller.core.checkpoints.commits import all_ranks_compared, compare_digests
from everstep_controller.core.effects import Effect, PutJob, PutVersion
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorAction
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import ShareLocations, VersionLocations
from hypothesis import given
from hypothesis import strategies as st

from everstep.ids import Version
from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.directives import NewGeneration, StopJob, VersionNotice
from everstep.wire.v1.training import RestoreRule, VersionSealed
from tests.support.core_fleet import CoreFleet, audits, decisions, generations, sent

ballots = st.dictionaries(st.integers(0, 7), st.sampled_from("abc"), min_size=1)


def _versions(effects: list[Effect]) -> list[tuple[Version, bool]]:
    return [(e.doc.version, e.doc.verified_at is not None) for e in effects if isinstance(e, PutVersion)]


# --- votes -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("digest-majority")
@given(ballots)
def test_digest_vote_marks_ranks_outside_the_majority(votes: dict[int, str]) -> None:
    vote, counts = compare_digests({"g": votes}), Counter(votes.values())
    majority = [digest for digest, count in counts.items() if 2 * count > len(votes)]
    if majority:
        assert vote.divergent_ranks == {rank for rank, digest in votes.items() if digest != majority[0]}
        assert not vote.tied_ranks
    else:
        assert vote.tied_ranks == set(votes)
        assert not vote.divergent_ranks


@pytest.mark.promise("digest-majority")
@given(st.dictionaries(st.sampled_from("gh"), ballots))
def test_digest_vote_never_marks_a_rank_divergent_and_tied(digests: dict[str, dict[int, str]]) -> None:
    vote = compare_digests(digests)
    assert not vote.divergent_ranks & vote.tied_ranks
    assert vote.is_unanimous == all(len(set(votes.values())) == 1 for votes in digests.values())


def test_digest_without_matching_rank_verifies_nothing() -> None:
    assert all_ranks_compared({"g": {0: "a", 1: "a"}}, frozenset({0, 1}))
    assert not all_ranks_compared({"g": {0: "a"}, "h": {1: "a"}}, frozenset({0, 1}))
    assert not all_ranks_compared({"g": {0: "a", 1: "a"}}, frozenset({0, 1, 2}))


# --- commits -----------------------------------------------------------------------------------------------------


@given(st.permutations([(rank, step) for rank in range(3) for step in (1, 2, 3)]))
def test_version_is_verified_once_all_ranks_agree(order: list[tuple[int, int]]) -> None:
    fleet = CoreFleet()
    fleet.start(3)
    seen: dict[int, set[int]] = {}
    newest = 0
    for rank, step in order:
        fleet.seal(step, rank)
        seen.setdefault(step, set()).add(rank)
        newest = max(newest, step) if len(seen[step]) == 3 else newest
        assert fleet.state.job_runtime["job"].commits.verified_version == (Version(1, newest) if newest else None)


def test_version_commits_only_when_every_share_is_safe() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.seal(4, 0)
    assert _versions(fleet.seal(4, 1, durable=False)) == []
    assert _versions(fleet.seal(5)) == [(Version(1, 5), True)]


def test_version_without_digests_commits_unverified() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    assert _versions(fleet.seal(4, digests={0: "", 1: ""})) == [(Version(1, 4), False)]


def test_announced_boundary_blocks_commits_but_compares_digests() -> None:
    fleet = CoreFleet()
    fleet.start(2, 1)
    fleet.seal(3)
    fleet.order(OperatorAction.DRAIN, node="n1")
    assert fleet.job().outgoing_generation is not None
    candidate = fleet.state.job_runtime["job"].commits.candidate_step or 0
    assert _versions(fleet.seal(candidate)) == [], "the ranks of the next generation were told of 1:3"
    assert fleet.state.job_runtime["job"].commits.verified_version == Version(1, candidate)
    assert fleet.spec().restore.floor == fleet.state.job_runtime["job"].commits.committed_version == Version(1, 3)


def test_first_seal_after_boundary_crosses_the_boundary() -> None:
    fleet = CoreFleet()
    fleet.start(2, 1)
    fleet.seal(3)
    fleet.order(OperatorAction.DRAIN, node="n1")
    number, step = fleet.spec().number, (fleet.spec().after_step or 0) + 1
    for rank, member in enumerate(fleet.spec().roster):
        words = VersionSealed(
            job="job",
            at=fleet.now,
            generation=number,
            rank=rank,
            version=Version(number, step),
            bytes=1,
            durable=True,
            commit_candidate=True,
        )
        effects = fleet.report(member.node, words)
    assert fleet.job().outgoing_generation is None
    assert _versions(effects) == [(Version(number, step), False)]


def test_open_version_window_is_bounded() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    for step in range(200):
        fleet.seal(step + 1, 0)
    assert len(fleet.state.job_runtime["job"].commits.seals) == fleet.policy.version_window


@pytest.mark.promise("committed-stays")
def test_version_commits_only_when_every_rank_retains_a_copy() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.seal(4, 0)
    assert _versions(fleet.seal(4, 1, commit_candidate=False)) == []
    assert fleet.state.job_runtime["job"].commits.verified_version == Version(1, 4), (
        "its digests are compared all the same"
    )


def test_commit_announces_candidate_ahead_of_all_ranks() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.progress(step=40, step_s=0.05)
    fleet.advance(0.2, "n1", "n2")
    notice = sent(fleet.seal(41), VersionNotice)
    assert set(notice) == {"n1", "n2"}
    assert notice["n1"] == VersionNotice(job="job", generation=1, committed=Version(1, 41), candidate=52), (
        "ten steps are the half second that is aimed at, and one is under way"
    )


@pytest.mark.parametrize(("step_s", "candidate"), [(30.0, 9), (0.5, 9), (0.002, 258)])
def test_candidate_interval_matches_policy_for_any_step_time(step_s: float, candidate: int) -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.progress(step=7, step_s=step_s)
    assert sent(fleet.seal(7), VersionNotice)["n1"].candidate == candidate


def test_large_job_commits_less_often_than_small_job() -> None:
    candidates = []
    for nodes in (2, 8):
        fleet = CoreFleet(msgspec.structs.replace(CorePolicy.lab_preset(), commit_interval_per_rank_s=0.5))
        fleet.start(nodes)
        fleet.progress(step=7, step_s=0.1)
        notice = sent(fleet.seal(7), VersionNotice)["n1"]
        candidates.append((notice.candidate or 0) - 7)
    assert candidates == [1 + 10, 1 + 40]


def test_candidate_missed_by_a_rank_is_replaced() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.progress(step=7, step_s=0.5)
    fleet.seal(7)
    fleet.seal(9, 0)
    fleet.seal(9, 1, commit_candidate=False)
    fleet.advance(1.0, "n1", "n2")
    fleet.progress(step=14, step_s=0.5)
    late = fleet.advance(4.0, "n1", "n2")
    notice = sent(late, VersionNotice)["n1"]
    assert notice.committed == Version(1, 7)
    assert notice.candidate is not None
    assert notice.candidate > 14
    assert _versions(fleet.seal(notice.candidate)) == [(Version(1, notice.candidate), True)]


def test_commits_continue_after_controller_restart() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.progress(step=7, step_s=0.5)
    fleet.seal(7)
    fleet.restart()
    assert _versions(fleet.seal(9)) == [], "perhaps it was given up already"
    fleet.progress(step=12, step_s=0.5)
    late = fleet.advance(4.0, "n1", "n2")
    notice = sent(late, VersionNotice)["n1"]
    assert notice.committed == Version(1, 7)
    assert _versions(fleet.seal(notice.candidate)) == [(Version(1, notice.candidate), True)]


def test_commits_pause_during_database_outage_and_resume() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.progress(step=7, step_s=0.5)
    fleet.seal(7)
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="disk full", trace=fleet.trace()))
    assert _versions(fleet.seal(9)) == []
    fleet.progress(step=10, step_s=0.5)
    assert sent(fleet.advance(6.0, "n1", "n2"), VersionNotice) == {}, "nothing is announced that cannot be kept"
    assert fleet.spec().restore.floor is None
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=False, trace=fleet.trace()))
    fleet.progress(step=22, step_s=0.5)
    notice = sent(fleet.advance(4.0, "n1", "n2"), VersionNotice)["n1"]
    assert notice.committed == Version(1, 7)
    assert _versions(fleet.seal(notice.candidate)) == [(Version(1, notice.candidate), True)]


def test_replica_locations_are_written_once_per_generation() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.progress(step=7, step_s=0.5)
    assert any(isinstance(effect, PutJob) for effect in fleet.seal(7))
    assert fleet.job().commits.locations == VersionLocations(1, {"n1": ShareLocations(), "n2": ShareLocations()})
    assert not any(isinstance(effect, PutJob) for effect in fleet.seal(9))


# --- what a generation may start from ----------------------------------------------------------------------------


@pytest.mark.promise("restore-clean")
def test_corruption_restores_newest_verified_version() -> None:
    fleet = CoreFleet()
    fleet.start(4, 1)
    fleet.seal(4)
    fleet.seal(5, commit_candidate=False)
    effects = fleet.seal(6, digests={2: "bad"})
    assert decisions(effects) == [("n3", "evict")]
    assert fleet.spec().restore == RestoreRule(floor=Version(1, 4), ceiling=Version(1, 5))
    assert fleet.seats() == ["n1", "n2", "n5", "n4"]
    assert "n3" not in [holder.node for holder in fleet.spec().holders]
    assert "n3" in sent(effects, NewGeneration)


def test_corruption_keeps_later_unverified_commit_as_ceiling() -> None:
    fleet = CoreFleet()
    fleet.start(4, 1)
    fleet.progress(step=4, step_s=0.5)
    candidate = sent(fleet.seal(4), VersionNotice)["n1"].candidate
    assert _versions(fleet.seal(candidate, digests={0: "", 1: "", 2: "", 3: ""})) == [(Version(1, candidate), False)]
    fleet.seal(candidate + 1, digests={2: "bad"})
    assert fleet.spec().restore.ceiling == Version(1, candidate)


def test_corruption_before_first_verification_restarts_job() -> None:
    fleet = CoreFleet()
    fleet.start(4)
    fleet.seal(4, digests={2: "bad"})
    assert fleet.spec().restore == RestoreRule(from_scratch=True)


def test_partial_digest_mismatch_still_limits_restore() -> None:
    fleet = CoreFleet()
    fleet.start(4)
    fleet.seal(4)
    fleet.seal(5, 0, 1, 2, digests={2: "bad"})
    fleet.lose_rank(3)
    assert fleet.spec().restore.ceiling == Version(1, 4)


def test_job_fails_when_divergent_node_cannot_be_evicted() -> None:
    fleet = CoreFleet()
    fleet.start(3, min_nodes=3)
    fleet.seal(1)
    for _ in range(3):
        last = fleet.seal(2, digests={1: "bad"})
    assert fleet.job_state() is JobState.FAILED
    assert set(sent(last, StopJob)) == {"n1", "n2", "n3"}
    assert fleet.node_state("n2") is NodeState.QUARANTINED, "nothing needs it any more"
    assert fleet.state.nodes["n2"].quarantine.needs_operator


def test_digests_that_never_agree_do_not_fail_the_job() -> None:
    fleet = CoreFleet()
    fleet.start(2, 2)
    fleet.seal(1, digests={1: "bad"})
    fleet.disconnect("n1")
    fleet.advance(30.0, "n2", "n3", "n4")
    assert fleet.seats() == ["n3", "n2"] or fleet.seats() == ["n2", "n3"]
    fleet.resume()
    assert decisions(fleet.seal(1, digests={1: "bad"})) == [(n, "no_action") for n in fleet.seats()]
    fleet.resume()
    fleet.seal(1, digests={1: "bad"})
    assert fleet.job_state() is JobState.RUNNING
    assert "must be DTensors, or be tracked under names of their own" in fleet.job().audits.voting_off_reason
    fleet.resume()
    fleet.seal(4, digests={1: "bad"})
    fleet.seal(9, digests={1: "bad"})
    versions = [effect.doc for effect in fleet.effects if isinstance(effect, PutVersion)]
    assert versions, "the job goes on and commits"
    assert all(version.verified_at is None for version in versions)


def test_digest_mismatch_within_one_node_evicts_the_node() -> None:
    fleet = CoreFleet()
    fleet.start(2, 1, nproc_per_node=2)
    fleet.seal(1)
    assert decisions(fleet.seal(2, digests={1: "bad"})) == [("n1", "evict")]
    assert "n1" not in fleet.seats()


def test_two_ranks_that_differ_in_a_job_on_one_node_are_a_tie() -> None:
    fleet = CoreFleet()
    fleet.start(1, 1, nproc_per_node=2)
    fleet.seal(1)
    assert decisions(fleet.seal(2, digests={1: "bad"})) == [("n1", "no_action")]
    assert "compute check of n1" in audits(fleet.effects, "probe.started")[0]


def test_several_divergent_nodes_leave_in_one_generation() -> None:
    fleet = CoreFleet()
    fleet.start(5, 0)
    fleet.seal(1)
    effects = fleet.seal(2, digests={1: "bad", 3: "worse"})
    assert len(generations(effects)) == 1
    assert fleet.seats() == ["n1", "n3", "n5"]

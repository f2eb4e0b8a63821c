"""Commits and verification of versions, and the version from which a generation starts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.ids import Version
from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.directives import NewGeneration, StopJob, VersionNotice
from everstep.wire.v1.training import RankProgress, RestoreRule
from everstep_controller.core.checkpoints.commits import compare_digests
from everstep_controller.core.effects import Effect, PutVersion
from everstep_controller.core.events import OperatorAction
from tests.support.fleet.core_fleet import CoreFleet, decisions, generations, logged_sentences, sent

ballots = st.dictionaries(st.integers(0, 7), st.sampled_from("abc"), min_size=1)


def _versions(effects: list[Effect]) -> list[tuple[Version, bool]]:
    return [(e.doc.version, e.doc.verified_at is not None) for e in effects if isinstance(e, PutVersion)]


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


def test_open_version_window_is_bounded() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    for step in range(200):
        fleet.seal(step + 1, 0)
    assert len(fleet.state.job_runtime["job"].commits.seals) == fleet.policy.checkpoints.version_window


@pytest.mark.promise("committed-stays")
def test_version_commits_only_when_every_rank_retains_a_copy() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.seal(4, 0)
    assert _versions(fleet.seal(4, 1, commit_candidate=False)) == []
    assert fleet.state.job_runtime["job"].commits.verified_version == Version(1, 4), (
        "its digests are compared all the same"
    )


@pytest.mark.parametrize(("step_s", "candidate"), [(30.0, 9), (0.5, 9), (0.002, 258)])
def test_candidate_interval_matches_policy_for_any_step_time(step_s: float, candidate: int) -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.progress(step=7, step_s=step_s)
    assert sent(fleet.seal(7), VersionNotice)["n1"].candidate == candidate


@pytest.mark.parametrize(("every", "candidate"), [(1, 13), (0, 13), (2, 14), (4, 16), (8, 24)])
def test_candidate_is_a_step_that_ranks_store_anyway(every: int, candidate: int) -> None:
    """After 0.5 s, and at the second snapshot at the earliest where ranks do not store each step."""
    fleet = CoreFleet()
    fleet.start(2)
    for rank, node in enumerate(("n1", "n2")):
        progress = RankProgress(job="job", generation=1, rank=rank, step=7, step_s=0.1, snapshot_every=every)
        fleet.touch(node, progress)
    assert sent(fleet.seal(7), VersionNotice)["n1"].candidate == candidate


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


def test_job_paused_before_a_boundary_goes_on() -> None:
    """A version is open that five ranks were to seal, and the generation that was announced has four."""
    fleet = CoreFleet()
    fleet.start(5, min_nodes=4)
    fleet.seal(4)
    fleet.order(OperatorAction.DRAIN, node="n1")
    assert fleet.spec().world_size == 4
    fleet.seal(5, 1, 2, 4)
    fleet.disconnect("n5")
    fleet.advance(fleet.policy.liveness.disconnect_grace_s + 1.0, "n1", "n2", "n3", "n4")
    assert fleet.job_state() is JobState.PAUSED
    fleet.register("n6")
    fleet.join("n6")
    fleet.advance(30.0, "n2", "n3", "n4", "n6")
    assert fleet.job_state() is JobState.RUNNING
    assert fleet.spec().restore.floor == Version(1, 4)


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
    assert "compute check of n1" in logged_sentences(fleet.effects, "probe.started")[0]


def test_several_divergent_nodes_leave_in_one_generation() -> None:
    fleet = CoreFleet()
    fleet.start(5, 0)
    fleet.seal(1)
    effects = fleet.seal(2, digests={1: "bad", 3: "worse"})
    assert len(generations(effects)) == 1
    assert fleet.seats() == ["n1", "n3", "n5"]

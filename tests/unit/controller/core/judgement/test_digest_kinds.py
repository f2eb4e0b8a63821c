"""Digests are compared within one kind of nodes, and replicas that all differ blame no node."""

from __future__ import annotations

import pytest

from everstep.vocabulary import FindingKind, NodeState, Severity
from everstep.wire.v1.directives import VersionNotice
from everstep_controller.core.needs import list_needs
from tests.support.fleet.core_fleet import CoreFleet, decisions, logged_sentences, sent

A, B = "H100, driver 12080, torch 2.13.0", "H100, driver 12090, torch 2.13.0"
TIES = 3


def _fleet(nodes: int = 3, **more: int) -> CoreFleet:
    fleet = CoreFleet()
    fleet.start(nodes, 1, min_nodes=1, **more)
    fleet.seal(1)
    return fleet


def _seal(fleet: CoreFleet, step: int, votes: str, kinds: str) -> list[tuple[str, str]]:
    """Each rank seals with its letter of ``votes`` and its kind; ``-`` is a kind that the rank does not state."""
    spec, before = fleet.running(), len(fleet.effects)
    for member, vote, kind in zip(spec.roster, votes, kinds, strict=True):
        stated = {"A": A, "B": B, "-": ""}[kind]
        fleet.seal_one(step, member.rank, spec=spec, digests={"world": vote}, kind=stated)
    return decisions(fleet.effects[before:])


def test_ranks_of_different_kinds_are_not_compared() -> None:
    fleet = _fleet(2)
    for step in (4, 8, 12):
        assert not _seal(fleet, step, "xy", "AB")
    assert fleet.running().number == 1
    (sentence,) = logged_sentences(fleet.effects, "audit.not_compared")
    assert A in sentence
    assert B in sentence
    assert "No node is accused" in sentence
    assert len(fleet.job().audits.not_compared) == 1


def test_version_of_different_kinds_is_committed_unverified() -> None:
    fleet = _fleet(2)
    _seal(fleet, 4, "xy", "AB")
    version = fleet.state.job_runtime["job"].commits
    assert version.settled_version is not None
    assert version.settled_version.step == 4
    assert version.verified_version is not None
    assert version.verified_version.step == 1


def test_majority_of_one_kind_evicts_its_divergent_node() -> None:
    fleet = _fleet(4)
    assert _seal(fleet, 4, "xyxz", "AAAB") == [("n2", "evict")]


def test_majority_of_another_kind_evicts_no_node() -> None:
    fleet = _fleet(3)
    assert not _seal(fleet, 4, "xxy", "AAB")
    assert fleet.node_state("n3") is NodeState.HEALTHY


@pytest.mark.parametrize("votes", ["xyz", "wxyz"])
def test_replicas_that_all_differ_are_the_program(votes: str) -> None:
    fleet = _fleet(len(votes))
    assert not _seal(fleet, 4, votes, "A" * len(votes))
    (sentence,) = logged_sentences(fleet.effects, "audit.switched_off")
    assert "layers unfrozen after the model was wrapped, a second forward pass under no_sync" in sentence
    assert "GPU" not in sentence
    assert fleet.job().audits.voting_off_reason == sentence
    assert fleet.running().number == 1, "nothing is undone"
    assert not any(record.health.controller_findings for record in fleet.state.nodes.values())
    assert not _seal(fleet, 8, votes, "A" * len(votes))


def _commit(fleet: CoreFleet, step: int) -> tuple[int, ...]:
    """Commit a version, and return the ranks that are then asked to compare their parameters."""
    fleet.progress(step)
    fleet.state.job_runtime["job"].commits.candidate_step = step
    notices = sent(fleet.seal(step), VersionNotice)
    ranks: tuple[int, ...] = notices["n1"].compared_ranks
    return ranks


def test_parameters_that_differ_are_named() -> None:
    fleet = _fleet(3)
    assert _commit(fleet, 2) == ()
    _seal(fleet, 4, "xyz", "AAA")
    assert _commit(fleet, 8) == (0, 1, 2)
    for _ in range(2):
        fleet.seal_one(12, 0, differing_parameters="model.head.weight and 12 more")
    words = "these parameters differ between ranks at version 1:12: model.head.weight and 12 more"
    assert logged_sentences(fleet.effects, "audit.parameters_named") == [words]
    assert fleet.job().audits.voting_off_reason.endswith(f"; {words}")
    assert _commit(fleet, 16) == ()


def test_third_tie_keeps_both_nodes_suspected_and_shown() -> None:
    fleet = _fleet(2)
    for number in range(TIES):
        _seal(fleet, 4 + number, "xy", "AA")
        fleet.resume(step=4 + number)
    assert fleet.job().is_running
    assert fleet.job().audits.voting_off_reason
    assert fleet.job().audits.compared_nodes == ["n1", "n2"]
    assert "evict" not in {decision for _, decision in decisions(fleet.effects)}
    key = f"{FindingKind.DIGEST_MISMATCH}/undecided"
    needs = [need for need in list_needs(fleet.state, fleet.now) if need.finding == key]
    assert [need.node for need in needs] == ["n1", "n2"]
    assert all(need.severity == Severity.CRITICAL for need in needs)
    running = fleet.running().number
    _seal(fleet, 20, "xy", "AA")
    assert fleet.running().number == running


def test_slow_ties_add_up() -> None:
    """A job whose steps take long does not go back forever."""
    fleet = _fleet(2)
    for number in range(TIES):
        _seal(fleet, 4 + number, "xy", "AA")
        fleet.resume(step=4 + number)
        fleet.advance(2 * fleet.policy.regroups.failure_window_s, *fleet.state.nodes)
    assert fleet.job().audits.voting_off_reason


def test_half_of_the_nodes_are_compared_with_the_majority() -> None:
    """Nodes that differ from the majority may hold the same parameters."""
    fleet = _fleet(4, nproc_per_node=2)
    _seal(fleet, 4, "aaaaabbb", "A" * 8)
    assert fleet.job().audits.compared_nodes == ["n1", "n3", "n4"]
    assert _commit(fleet, 8) == (0, 1, 4, 5, 6, 7)

"""Audits that differ on many ranks at once: the program is the cause, and no node is blamed."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.vocabulary import AuditKind, NodeState
from everstep_controller.core.effects import AppendToEventLog, Effect
from everstep_controller.core.judgement.control_group import LIKELY_CAUSES, are_too_many, has_common_cause
from everstep_controller.core.state import Accusation
from tests.support.fleet.core_fleet import CoreFleet, decisions, generations, logged_sentences

OWN: dict[str, Any] = {"audit": AuditKind.MATMUL, "unit": "layers.3", "expects_arbiter": False}
"""An audit in which a rank compares two results of its own."""


def _fleet(nodes: int = 4, nproc: int = 1, **spec: Any) -> CoreFleet:
    fleet = CoreFleet()
    fleet.start(nodes, 1, **({"sdc": "standard", "nproc_per_node": nproc} | spec))
    fleet.progress(2)
    fleet.seal(2)
    return fleet


def _contradict(fleet: CoreFleet, *ranks: int, step: int = 40, **more: Any) -> list[Effect]:
    """Report two different results of each of these ranks in one audit of one step, and none of other ranks."""
    before = len(fleet.effects)
    for rank in ranks:
        fleet.audit(rank, step, f"a{rank}", f"b{rank}", settle=False, **(OWN | more))
    fleet.settle_audits()
    return fleet.effects[before:]


def _strikes(fleet: CoreFleet) -> dict[str, int]:
    return {name: len(node.audits.strikes) for name, node in fleet.state.nodes.items() if node.audits.strikes}


def _switched_off(effects: list[Effect]) -> list[str]:
    return logged_sentences(effects, "audit.switched_off")


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2), (0, 1, 2, 3), (3, 1)])
def test_half_of_all_nodes_at_once_are_not_blamed(ranks: tuple[int, ...]) -> None:
    fleet = _fleet()
    effects = _contradict(fleet, *ranks)
    assert not decisions(effects)
    assert not generations(effects), "nothing is computed again"
    assert not _strikes(fleet)
    (sentence,) = _switched_off(effects)
    assert "the program is the cause" in sentence
    assert "layers.3" in sentence
    assert LIKELY_CAUSES[AuditKind.MATMUL] in sentence
    assert fleet.job().audits.off == {AuditKind.MATMUL: sentence}
    assert fleet.state.counts.audits == {(AuditKind.MATMUL, "program"): len(ranks)}


def test_one_of_four_nodes_gets_a_strike() -> None:
    fleet = _fleet()
    effects = _contradict(fleet, 2)
    assert decisions(effects) == [("n3", "no_action")]
    assert _strikes(fleet) == {"n3": 1}
    assert generations(effects)
    assert not _switched_off(effects)


def test_strike_waits_until_other_ranks_could_speak() -> None:
    fleet = _fleet()
    effects = fleet.audit(2, 40, "a", "b", settle=False, **OWN)
    assert not decisions(effects)
    fleet.progress(40)
    assert not decisions(fleet.advance(fleet.policy.audits.settle_s / 2, *fleet.state.nodes))
    assert decisions(fleet.advance(fleet.policy.audits.settle_s, *fleet.state.nodes)) == [("n3", "no_action")]


def test_one_of_two_nodes_is_blamed() -> None:
    fleet = _fleet(2)
    assert decisions(_contradict(fleet, 1)) == [("n2", "no_action")], "the other one found nothing in the same audit"
    fleet = _fleet(2)
    effects = _contradict(fleet, 0, 1)
    assert not decisions(effects)
    assert _switched_off(effects)


def test_all_gpus_of_one_of_two_nodes_blame_that_node() -> None:
    fleet = _fleet(2, nproc=4)
    effects = _contradict(fleet, 4, 5, 6, 7)
    assert _strikes(fleet) == {"n2": 1}
    assert not _switched_off(effects)


def test_half_of_the_gpus_of_one_node_are_the_program() -> None:
    fleet = _fleet(1, nproc=4)
    assert _switched_off(_contradict(fleet, 1, 3))
    assert not _strikes(fleet)
    assert _strikes_of_one(_fleet(1, nproc=4)) == {"n1": 1}


def _strikes_of_one(fleet: CoreFleet) -> dict[str, int]:
    _contradict(fleet, 2)
    return _strikes(fleet)


def test_job_with_a_single_rank_judges_no_rank() -> None:
    fleet = _fleet(1)
    effects = _contradict(fleet, 0)
    assert not decisions(effects)
    assert not generations(effects)
    (sentence,) = _switched_off(effects)
    assert "no other rank" in sentence
    assert "test it" in sentence


def test_refuted_owners_on_half_of_all_nodes_are_not_blamed() -> None:
    """A module with state of its own gives other results on all peers, which agree."""
    fleet = _fleet()
    for owner in range(4):
        fleet.audit(owner, 40, "bad", "bad", "good", "good", settle=False)
    effects = fleet.settle_audits()
    assert not [decision for decision in decisions(fleet.effects) if decision[1] == "evict"]
    assert not generations(effects)
    assert AuditKind.PEER_REPLAY in fleet.job().audits.off


def test_one_faulty_rank_as_owner_and_peer_is_convicted() -> None:
    fleet = _fleet()
    fleet.audit(2, 40, "bad", "bad", "good", "good", settle=False)
    fleet.audit(1, 40, "good", "good", "bad", "good", settle=False)
    fleet.settle_audits()
    assert ("n3", "evict") in decisions(fleet.effects)
    assert not fleet.job().audits.off


def test_nodes_that_contradict_themselves_in_turn_are_cleared() -> None:
    """The fault of a program may depend on the samples, and show on one rank after another."""
    fleet = _fleet()
    _contradict(fleet, 2)
    assert _strikes(fleet) == {"n3": 1}
    fleet.resume()
    effects = _contradict(fleet, 0, step=60)
    assert not _strikes(fleet)
    assert "sdc.audit_mismatch/strike" not in fleet.state.nodes["n3"].health.controller_findings
    assert logged_sentences(effects, "audit.suspicion_withdrawn") == [
        "a suspicion against n3 was withdrawn: audit matmul of job job differs on several nodes, so the program is the "
        "cause"
    ]


def test_late_statements_withdraw_strike_and_eviction() -> None:
    fleet = _fleet()
    _contradict(fleet, 2)
    fleet.resume()
    spec = fleet.spec()
    _contradict(fleet, 2, step=60)
    assert fleet.node_state("n3") is NodeState.QUARANTINED
    for rank in (0, 1, 3):
        fleet.audit(rank, 60, "a", "b", settle=False, spec=spec, **OWN)
    effects = fleet.settle_audits()
    assert logged_sentences(effects, "audit.suspicion_withdrawn")
    assert not _strikes(fleet)
    assert fleet.node_state("n3") is not NodeState.QUARANTINED
    assert not fleet.state.nodes["n3"].health.controller_findings


def test_undecided_ties_switch_the_audit_off() -> None:
    """Two nodes that differ again and again do not end a job that works."""
    fleet = _fleet(2)
    for number in range(fleet.policy.audits.digest_tie_count):
        fleet.audit(0, 40 + number, "a", "a", "b")
        fleet.resume()
    assert fleet.job().is_running
    assert AuditKind.PEER_REPLAY in fleet.job().audits.off
    assert not [decision for decision in decisions(fleet.effects) if decision[1] == "evict"]


def test_audit_that_is_off_is_not_judged() -> None:
    fleet = _fleet()
    _contradict(fleet, 0, 1)
    before = len(fleet.effects)
    fleet.audit(3, 60, "a", "b", settle=False, **OWN)
    assert not fleet.state.job_runtime["job"].audits.cases
    assert fleet.state.counts.ignored["audit_statement.audit_is_off"] == 1
    assert not [effect for effect in fleet.effects[before:] if isinstance(effect, AppendToEventLog)]
    assert decisions(_contradict(fleet, 3, audit=AuditKind.UPDATE)) == [("n4", "no_action")], "others go on"


def test_next_generation_names_audits_that_are_off() -> None:
    fleet = _fleet()
    _contradict(fleet, 0, 1)
    assert fleet.spec().audits_off == ()
    fleet.lose_rank(2)
    assert fleet.spec().audits_off == (AuditKind.MATMUL,)
    fleet.restart()
    assert fleet.job().audits.off


@pytest.mark.parametrize(
    ("accused", "seats", "is_common"),
    [(1, 2, False), (2, 2, True), (2, 3, True), (2, 4, True), (2, 5, False), (3, 100, False), (4, 100, True)],
)
def test_half_of_the_nodes_or_four_have_a_common_cause(accused: int, seats: int, is_common: bool) -> None:
    assert are_too_many({f"n{number}" for number in range(accused)}, seats) is is_common


def test_ties_count_only_where_a_third_node_exists() -> None:
    ties = [Accusation(rank, f"n{rank + 1}", is_tie=True) for rank in (0, 1)]
    assert not has_common_cause(ties, 2, 2)
    assert has_common_cause(ties, 3, 3)


@pytest.mark.parametrize("audit", AuditKind)
def test_every_audit_has_a_likely_cause(audit: AuditKind) -> None:
    assert LIKELY_CAUSES[audit]

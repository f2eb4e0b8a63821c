"""The judgement of audit statements whose results differ, as a pure function."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from everstep.vocabulary import AuditKind, AuditRole
from everstep.wire.v1.training import AuditStatement
from everstep_controller.core.judgement.audits import (
    AuditJudgement,
    AuditorStrike,
    Incomparable,
    Inconclusive,
    OwnerConvicted,
    OwnerStrike,
    Tied,
    judge,
)

OWNER, PEER, ARBITER = 3, 4, 5
APART = {OWNER: "n3", PEER: "n4", ARBITER: "n5"}


def _statement(rank: int, role: AuditRole, original: str = "", digest: str = "", **more: Any) -> AuditStatement:
    fields: dict[str, object] = {"audit": AuditKind.PEER_REPLAY, "unit": "layers.3 backward", "step": 1204} | more
    words = {"job": "job", "at": 0.0, "generation": 1, "owner": OWNER, "rank": rank, "role": role}
    return AuditStatement(**words, original=original, digest=digest, **fields)  # type: ignore[arg-type]


def _judge(
    original: str | None,
    again: str = "",
    peer: str | None = None,
    arbiter: str | None = None,
    nodes: dict[int, str] | None = None,
    **more: Any,
) -> AuditJudgement:
    """Judge the statements with the given results; None: no statement."""
    given = []
    if original is not None:
        given.append(_statement(OWNER, AuditRole.OWNER, original, again, **more))
    if peer is not None:
        given.append(_statement(PEER, AuditRole.PEER, digest=peer, **more))
    if arbiter is not None:
        given.append(_statement(ARBITER, AuditRole.ARBITER, digest=arbiter, **more))
    return judge(given, nodes or APART)


@pytest.mark.parametrize(
    ("original", "again", "peer", "arbiter", "outcome"),
    [
        ("bad", "bad", "good", "good", OwnerConvicted),
        ("bad", "worse", "good", "good", OwnerConvicted),
        ("bad", "", "good", "good", OwnerConvicted),
        ("bad", "good", "good", "good", OwnerStrike),
        ("good", "good", "bad", "good", AuditorStrike),
        ("good", "", "bad", "good", AuditorStrike),
        ("good", "bad", "bad", "good", Inconclusive),
        ("good", "other", "bad", "good", Inconclusive),
        ("one", "one", "two", "three", Inconclusive),
        ("one", "two", "two", "three", Inconclusive),
        ("good", "good", "good", "bad", Inconclusive),
        ("good", "good", "good", "good", Inconclusive),
        ("good", "bad", "good", "good", OwnerStrike),
    ],
)
def test_three_ranks_on_three_nodes_are_judged_by_majority(
    original: str, again: str, peer: str, arbiter: str, outcome: type
) -> None:
    judgement = _judge(original, again, peer, arbiter)
    assert isinstance(judgement, outcome), judgement
    assert not (isinstance(judgement, Inconclusive) and judgement.is_incomplete)


@pytest.mark.parametrize(
    ("original", "again", "peer", "outcome"),
    [
        ("bad", "bad", "good", Tied),
        ("bad", "", "good", Tied),
        ("bad", "good", "good", OwnerStrike),
        ("one", "two", "three", Inconclusive),
        ("good", "good", "good", Inconclusive),
    ],
)
def test_two_ranks_tie_unless_the_owner_contradicts_itself(original: str, again: str, peer: str, outcome: type) -> None:
    assert isinstance(_judge(original, again, peer), outcome)
    assert isinstance(_judge(original, again, arbiter=peer), outcome)


@pytest.mark.parametrize("audit", [AuditKind.MATMUL, AuditKind.UPDATE, AuditKind.COLLECTIVE])
def test_own_contradiction_is_a_strike(audit: AuditKind) -> None:
    assert isinstance(_judge("used", "again", audit=audit), OwnerStrike)
    same = _judge("used", "used", audit=audit)
    assert isinstance(same, Inconclusive)
    assert same.is_incomplete


@pytest.mark.parametrize("audit", [AuditKind.STATE, AuditKind.CHECKPOINT])
def test_bytes_that_changed_are_a_strike_without_a_rerun(audit: AuditKind) -> None:
    assert isinstance(_judge("before", audit=audit), OwnerStrike)


@pytest.mark.parametrize(("peer", "arbiter"), [("x", None), (None, "x"), ("x", "x"), ("x", "y")])
def test_silent_owner_is_not_convicted(peer: str | None, arbiter: str | None) -> None:
    judgement = _judge(None, peer=peer, arbiter=arbiter)
    assert isinstance(judgement, Inconclusive)
    assert judgement.is_incomplete


@pytest.mark.promise("audit-two-nodes")
def test_majority_on_one_node_blames_no_other_node() -> None:
    auditors = {OWNER: "n3", PEER: "n4", ARBITER: "n4"}
    assert isinstance(_judge("a", "a", "b", "b", auditors), Tied)
    assert isinstance(_judge("a", "b", "b", "b", auditors), OwnerStrike), "the owner's own word"
    friends = {OWNER: "n3", PEER: "n4", ARBITER: "n3"}
    assert isinstance(_judge("a", "a", "b", "a", friends), Tied)
    assert isinstance(_judge("a", "a", "b", "b", {OWNER: "n3", PEER: "n3", ARBITER: "n4"}), OwnerConvicted)
    assert isinstance(_judge("a", "a", "b", "b", dict.fromkeys(APART, "n3")), OwnerConvicted)


@pytest.mark.promise("audit-two-nodes")
@pytest.mark.parametrize("liar", [OWNER, PEER, ARBITER])
def test_divergent_node_convicts_no_other_node(liar: int) -> None:
    """The results of one node's ranks are arbitrary, and those of all other ranks are right."""
    ranks = list(APART)
    for nodes in ({**APART}, *({**APART, other: APART[liar]} for other in ranks if other != liar)):
        liars = [rank for rank in ranks if nodes[rank] == nodes[liar]]
        for lies in itertools.product(("good", "bad", "worse"), repeat=len(liars) + 1):
            digests = dict.fromkeys(ranks, "good") | dict(zip(liars, lies, strict=False))
            again = lies[-1] if OWNER in liars else "good"
            for peer, arbiter in itertools.product((digests[PEER], None), (digests[ARBITER], None)):
                judgement = _judge(digests[OWNER], again, peer, arbiter, nodes)
                accused: tuple[int, ...] = ()
                if isinstance(judgement, OwnerConvicted | OwnerStrike):
                    accused = (OWNER,)
                elif isinstance(judgement, AuditorStrike):
                    accused = (judgement.rank,)
                assert all(nodes[rank] == nodes[liar] for rank in accused), judgement


@pytest.mark.parametrize(
    ("kinds", "outcome"),
    [
        (("A100", "H100", "H100"), Incomparable),
        (("A100", "A100", "H100"), Tied),
        (("A100", "", "H100"), Tied),
        (("A100", "A100", "A100"), OwnerConvicted),
        (("", "", ""), OwnerConvicted),
    ],
)
def test_only_ranks_of_one_kind_are_compared(kinds: tuple[str, str, str], outcome: type) -> None:
    given = [
        _statement(OWNER, AuditRole.OWNER, "a", "a", kind=kinds[0]),
        _statement(PEER, AuditRole.PEER, digest="b", kind=kinds[1]),
        _statement(ARBITER, AuditRole.ARBITER, digest="b", kind=kinds[2]),
    ]
    assert isinstance(judge(given, APART), outcome)


def test_sentence_of_a_conviction_names_work_and_witnesses() -> None:
    judgement = _judge("bad", "bad", "good", "good", difference="3 of 65536 elements differ")
    assert judgement.sentence == (
        "rank 3 computed layers.3 backward of step 1204 wrongly twice: n4 and n5 agree on another result; "
        "3 of 65536 elements differ"
    )

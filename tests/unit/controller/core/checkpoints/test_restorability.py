"""What a job would go back to now, and which loss it could not bear."""

from __future__ import annotations

from itertools import combinations

import msgspec
import pytest
from everstep_controller.core.checkpoints.restore_points import compute_restorability
from hypothesis import given
from hypothesis import strategies as st

from everstep.ids import Version
from everstep.vocabulary import Finding, FindingKind, Severity
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.operator import LossForecast, Restorability
from tests.support.core_fleet import CoreFleet

Kept = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
"""Node to (copies, alike) of what its ranks seal."""


def _fleet(racks: str, **spec: int) -> CoreFleet:
    """A node in each of the racks named."""
    fleet = CoreFleet()
    for at, rack in enumerate(racks):
        fleet.register(f"n{at + 1}", domain=Domain(rack=rack))
        fleet.beat(f"n{at + 1}")
    fleet.join(*[f"n{at + 1}" for at in range(len(racks))], **{"min_nodes": 1, "max_nodes": len(racks), **spec})
    fleet.resume()
    return fleet


def _commit(fleet: CoreFleet, kept: Kept, step: int = 5) -> None:
    """Every rank seals the version, and says where else its share lies."""
    for member in fleet.spec().roster:
        copies, alike = kept.get(member.node, ((), ()))
        fleet.seal_one(step, member.rank, full_copies=copies, partial_copies=alike)


def _ask(fleet: CoreFleet) -> Restorability:
    answer = compute_restorability(fleet.state, fleet.job())
    msgspec.json.decode(msgspec.json.encode(answer), type=Restorability)
    return answer


def _of(answer: Restorability, kind: str, name: str) -> LossForecast:
    return next(one for one in answer.loss_forecasts if (one.kind, one.name) == (kind, name))


PAIRED: Kept = {"n1": (("n3",), ()), "n2": (("n4",), ()), "n3": (("n1",), ()), "n4": (("n2",), ())}


# --- answers -----------------------------------------------------------------------------------------------------


def test_replicas_in_other_rack_survive_any_node_or_rack() -> None:
    fleet = _fleet("aabb", nproc_per_node=2)
    _commit(fleet, PAIRED)
    answer = _ask(fleet)
    assert answer.version == Version(1, 5)
    assert all(one.restorable for one in answer.loss_forecasts if one.kind in ("node", "rack"))
    assert _of(answer, "rack", "a").sentence == (
        "without rack a (2 nodes): version 1:5 stays complete; the job goes on with 2 of 4 nodes"
    )


def test_node_and_its_replica_are_reported_as_fatal_pair() -> None:
    fleet = _fleet("aabb", nproc_per_node=2)
    _commit(fleet, PAIRED)
    answer = _ask(fleet)
    fatal = [one.nodes for one in answer.loss_forecasts if not one.restorable]
    assert fatal == [("n1", "n3"), ("n2", "n4")]
    assert answer.loss_forecasts[0].nodes == ("n1", "n3"), "what would cost something comes first"
    assert answer.loss_forecasts[0].ranks == (0, 1, 4, 5)
    assert "the state of the ranks on n1, n3 at version 1:5 may be lost" in answer.loss_forecasts[0].sentence
    assert answer.sentence.endswith("2 pairs cannot be spared, such as n1 and n3")


def test_node_without_replica_is_reported_as_exposed() -> None:
    fleet = _fleet("ab", replicas=1)
    _commit(fleet, {})
    answer = _ask(fleet)
    assert not _of(answer, "node", "n1").restorable
    assert "2 nodes, 2 racks cannot be spared, such as n1" in answer.sentence


def test_single_node_job_depends_on_its_node() -> None:
    fleet = _fleet("a", nproc_per_node=2)
    _commit(fleet, {})
    only = _of(_ask(fleet), "node", "n1")
    assert (only.restorable, only.remaining_nodes, only.ranks) == (False, 0, (0, 1))
    assert only.sentence.endswith("fewer than 1 node are left and the job is paused")


def test_exposure_reports_job_continuation_separately() -> None:
    fleet = _fleet("aabb", min_nodes=3)
    _commit(fleet, PAIRED)
    answer = _ask(fleet)
    assert _of(answer, "node", "n1").remaining_nodes == 3
    assert _of(answer, "rack", "a").remaining_nodes == 0
    assert _of(answer, "rack", "a").sentence.endswith("fewer than 3 nodes are left and the job is paused")


def test_restorability_before_first_commit_has_no_version() -> None:
    fleet = _fleet("ab")
    assert (
        _ask(fleet).sentence
        == "nothing of job job is committed yet: after a loss the newest complete version in the vaults is restored"
    )


def test_restorability_reports_ceiling_after_corruption() -> None:
    fleet = CoreFleet()
    fleet.start(4, 1)
    fleet.seal(4)
    fleet.seal(6, digests={2: "bad"})
    assert _ask(fleet).ceiling == Version(1, 4)


# --- holders that are gone ---------------------------------------------------------------------------------------


def test_unreachable_holder_is_not_counted() -> None:
    fleet = _fleet("aabb")
    _commit(fleet, PAIRED)
    fleet.disconnect("n3")
    fleet.advance(10.0, "n1", "n2", "n4")
    answer = _ask(fleet)
    assert answer.missing_ranks == ()
    assert not _of(answer, "node", "n1").restorable
    assert _of(answer, "node", "n2").restorable


def test_rebooted_holder_has_lost_its_copies() -> None:
    fleet = _fleet("aabb")
    _commit(fleet, PAIRED)
    fleet.advance(1.0, "n1", "n2", "n3", "n4")
    fleet.register("n3", boot_id="boot-2")
    assert not _of(_ask(fleet), "node", "n1").restorable


def test_ranks_without_reachable_holder_are_reported_missing() -> None:
    fleet = _fleet("aabb")
    _commit(fleet, PAIRED)
    for node in ("n1", "n3"):
        fleet.disconnect(node)
    fleet.advance(40.0, "n2", "n4")
    answer = _ask(fleet)
    assert answer.missing_ranks == (0, 2)
    assert (
        "version 1:5 cannot be restored now: no reachable node has the state of the ranks on n1, n3" in answer.sentence
    )


def test_holders_survive_restart_and_next_generation() -> None:
    fleet = _fleet("aabb")
    _commit(fleet, PAIRED)
    before = _ask(fleet)
    fleet.restart()
    for node in fleet.seats():
        fleet.beat(node)
    assert _ask(fleet) == before
    fleet.leave("n4")
    answer = _ask(fleet)
    assert answer.version == Version(1, 5)
    assert [one.nodes for one in answer.loss_forecasts if not one.restorable] == [("n1", "n3"), ("n2", "n4")]


# --- against a dumb one ------------------------------------------------------------------------------------------


@pytest.mark.promise("restorability")
@given(
    st.lists(st.tuples(st.sets(st.integers(0, 4), max_size=3), st.booleans()), min_size=5, max_size=5),
    st.integers(1, 3),
)
def test_restorability_matches_exhaustive_share_search(kept: list[tuple[set[int], bool]], replicas: int) -> None:
    fleet = _fleet("aabbc", replicas=replicas)
    nodes = fleet.seats()
    others = {node: tuple(nodes[o] for o in sorted(kept[at][0]) if nodes[o] != node) for at, node in enumerate(nodes)}
    copied = {node: kept[at][1] for at, node in enumerate(nodes)}
    _commit(fleet, {n: (others[n], ()) if copied[n] else ((), others[n]) for n in nodes})
    answer = _ask(fleet)
    for one in answer.loss_forecasts:
        assert one.restorable == _whole(nodes, others, copied, replicas, set(one.nodes)), one
    told = {one.nodes for one in answer.loss_forecasts if one.kind == "pair"}
    alone = {one.name for one in answer.loss_forecasts if one.kind == "node" and one.restorable}
    assert told == {pair for pair in combinations(nodes, 2) if alone.issuperset(pair)}


def test_lost_vault_is_not_counted_as_holder() -> None:
    fleet = _fleet("abc")
    _commit(fleet, {"n1": (("n2",), ()), "n2": (("n3",), ()), "n3": (("n1",), ())})
    assert _of(_ask(fleet), "node", "n1").restorable
    gone = Finding(kind=FindingKind.VAULT_LOST, subject="vault", severity=Severity.CRITICAL, message="signal 9")
    fleet.raise_finding("n2", gone)
    assert not _of(_ask(fleet), "node", "n1").restorable
    fleet.clear_finding("n2", gone.key)
    assert _of(_ask(fleet), "node", "n1").restorable


def _whole(
    nodes: list[str], others: dict[str, tuple[str, ...]], copied: dict[str, bool], replicas: int, lost: set[str]
) -> bool:
    """Every part of every share is on a node that is left, whichever of the possible holders a part is on."""
    for node in nodes:
        if replicas == 1 and node in lost:
            return False
        if not others[node]:
            holders = [{node, *rest} for rest in combinations([n for n in nodes if n != node], replicas - 1)]
        elif copied[node]:
            holders = [{node, *others[node]}]
        else:
            count = min(replicas - 1, len(others[node]))
            holders = [{node, *rest} for rest in combinations(others[node], count)]
        if any(some <= lost for some in holders):
            return False
    return True


def test_missing_shares_are_listed_in_rank_order() -> None:
    fleet = _fleet("abcdef")
    _commit(fleet, {f"n{at}": ((f"n{at % 6 + 1}",), ()) for at in range(1, 7)})
    fleet.disconnect("n1")
    fleet.advance(30.0)
    assert "the state of the ranks on n1, n2, n3, n4, n5, n6" in _ask(fleet).sentence
